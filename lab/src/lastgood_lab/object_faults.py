"""A proxy in front of an S3 server that makes chosen requests fail: cut, refused, repeated, their replies lost.

It counts requests and bytes too. It changes nothing else: the Host header is passed on, because a signature covers it.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "cut_before",
    "cut_during",
    "lose_reply",
    "cut_reply",
    "500",
    "503",
    "429",
    "409",
    "hang",
    "repeat",
    "unconditional",
    "skewed",
    "quota",
    "region",
]
KINDS: tuple[Kind, ...] = ("cut_before", "cut_during", "lose_reply", "cut_reply", "500", "503", "429", "409", "repeat")
"""what a network and a store do by themselves; `hang` and `unconditional` (a creation that the store refuses is
answered with success, as by a store that ignores its condition) are asked for by name, and so are the refusals of S3
for a clock that is off, a quota that is used up, and a bucket of another region"""
CODES = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "429": (429, "TooManyRequests"),
    "409": (409, "ConditionalRequestConflict"),
    "skewed": (403, "RequestTimeTooSkewed"),
    "quota": (403, "QuotaExceeded"),
    "region": (301, "PermanentRedirect"),
}
"""kind -> status and code of the answer"""
END_SECONDS = 30
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass(frozen=True)
class Request:
    """One request that reached the proxy, and the bytes of the reply's body."""

    number: int
    method: str
    target: str
    """path and query"""
    sent: int
    """bytes of its body"""
    received: int = 0
    status: int = 0


@dataclass
class Fault:
    """What happens to matching requests. `times`: to so many of them; None: to all."""

    kind: Kind
    matches: Callable[[Request], bool] = lambda request: True
    times: int | None = None


class FaultyProxy:
    """The proxy. `with FaultyProxy(server.endpoint) as proxy:`, then point clients at `proxy.endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self._upstream = endpoint.removeprefix("http://")
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._numbers = 0
        self._fault: Fault | None = None
        self._down = False
        self.closing = threading.Event()
        self.before: Callable[[Request], object] | None = None
        """called with each request before it is passed on; may block"""

    def __enter__(self) -> FaultyProxy:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = END_SECONDS
            disable_nagle_algorithm = True  # headers and body are sent one after the other: 40 ms a reply otherwise

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()
                    return
                self.close_connection = True

            def do_GET(self) -> None:
                proxy._serve(self)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True  # a client may keep an idle connection open for ever
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def requests(self) -> list[Request]:
        with self._lock:
            return list(self._requests)

    def clear(self) -> None:
        """Forget the requests so far; numbers start at 0 again."""
        with self._lock:
            self._requests.clear()
            self._numbers = 0

    def inject(self, fault: Fault | None) -> None:
        """Replace the present fault (None: no fault)."""
        with self._lock:
            self._fault = fault

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Cut every connection, and accept none that answers, until the block ends."""
        self._down = True
        try:
            yield
        finally:
            self._down = False

    # ---- one request ---------------------------------------------------------------------------------------

    def _serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        if self._down:
            _cut(handler)
            return
        if handler.headers.get("Expect", "").lower() == "100-continue":
            handler.send_response_only(100)
            handler.end_headers()
        body = handler.rfile.read(length)
        with self._lock:
            request = Request(self._numbers, handler.command, handler.path, len(body))
            self._numbers += 1
            fault = self._fault
            struck = fault is not None and fault.times != 0 and fault.matches(request)
            if struck and fault is not None and fault.times is not None:
                fault.times -= 1
        if self.before is not None:
            self.before(request)
        kind = fault.kind if struck and fault is not None else None
        if kind == "cut_before":
            self._note(request, 0, b"")
            _cut(handler)
        elif kind == "hang":
            self._note(request, 0, b"")
            self.closing.wait(END_SECONDS)
            _cut(handler)
        elif kind == "cut_during" and body:
            self._cut_during(handler, body)
            self._note(request, 0, b"")
        elif kind in CODES:
            status, code = CODES[kind]
            answer = f"<Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()
            self._note(request, status, answer)
            _answer(handler, status, [("Content-Type", "application/xml")], answer)
        else:
            self._pass_on(handler, request, body, kind)

    def _pass_on(
        self, handler: http.server.BaseHTTPRequestHandler, request: Request, body: bytes, kind: Kind | None
    ) -> None:
        for _ in range(2 if kind == "repeat" else 1):
            connection = http.client.HTTPConnection(self._upstream, timeout=END_SECONDS)
            with contextlib.closing(connection):
                connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
                for name, value in handler.headers.items():
                    if name.lower() not in ("expect", "connection"):
                        connection.putheader(name, value)
                connection.endheaders(body)
                reply = connection.getresponse()
                data, headers = reply.read(), reply.getheaders()
        self._note(request, reply.status, data)
        if kind == "unconditional" and reply.status == 412:
            _answer(handler, 200, [("ETag", '"0"')], b"")
            return
        if kind in ("lose_reply", "cut_during"):
            _cut(handler)
        else:
            _answer(handler, reply.status, headers, data, cut=kind == "cut_reply")

    def _cut_during(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        """Pass on the headers and half of the body, then cut both connections."""
        host, _, port = self._upstream.partition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), END_SECONDS) as upstream:
            head = [handler.requestline, *(f"{name}: {value}" for name, value in handler.headers.items())]
            upstream.sendall("\r\n".join([*head, "", ""]).encode() + body[: len(body) // 2])
        _cut(handler)

    def _note(self, request: Request, status: int, reply: bytes) -> None:
        done = Request(request.number, request.method, request.target, request.sent, len(reply), status)
        with self._lock:
            self._requests.append(done)


def _answer(
    handler: http.server.BaseHTTPRequestHandler,
    status: int,
    headers: list[tuple[str, str]],
    data: bytes,
    cut: bool = False,
) -> None:
    handler.send_response_only(status)
    length = None
    for name, value in headers:
        if name.lower() == "content-length":
            length = value
        elif name.lower() not in _HOP:
            handler.send_header(name, value)
    if status not in (204, 304):
        handler.send_header("Content-Length", length if handler.command == "HEAD" and length else str(len(data)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data[: len(data) // 2] if cut else data)
    if cut:
        _cut(handler)


def _cut(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    with contextlib.suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)
