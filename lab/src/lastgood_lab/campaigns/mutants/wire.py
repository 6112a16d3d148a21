"""Mutants of the safeguards of the wire: who is a peer, what is accepted from it, and what a failure leaves."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "wire, frames",
        ("wire_frames", "wire_faults"),
        ("what is no frame is read as one", "wire-magic-checked", Never()),
        ("a frame of another version is read", "wire-version-checked", Never()),
        ("a frame of a later version is read", "wire-version-checked", Swap("!=", "<")),
        ("a body of any announced length is waited for", "wire-body-bounded", Never()),
        ("a body one byte longer than the limit is read", "wire-body-bounded", Swap("length >", "length - 1 >")),
        ("the tag of a frame is not compared", "wire-tag-checked", Never()),
        ("a repeated frame is read", "wire-number-checked", Never()),
        ("a later frame is read", "wire-number-checked", Swap("!=", "<")),
        (
            "a body that is not valid text raises an error of the decoder",
            "wire-any-body-refused",
            Swap("msgspec.MsgspecError, UnicodeError, RecursionError", "msgspec.MsgspecError, RecursionError"),
        ),
        ("blake3 without a key: anybody can make a digest", "wire-blake3-keyed", Swap("key=key", "")),
        ("the keys do not depend on the nonces", "wire-keys-bound-to-handshake", Swap("transcript.digest()", 'b""')),
    ),
    *table(
        "wire, bulk bytes",
        ("wire_faults", "wire_calls"),
        ("the digest of bulk bytes is not compared", "wire-bulk-digest-checked", Never()),
        ("the end of the stream is read as bytes", "wire-end-of-stream-is-error", Never()),
        ("a buffer that was filled in part is not abandoned", "wire-broken-buffer-abandoned", Remove()),
        ("an answer longer than the caller's buffer is received", "wire-answer-fits-buffer", Never()),
        ("a record of any length is sent", "wire-sizes-checked", Never()),
    ),
    *table(
        "wire, connections",
        ("wire_calls", "wire_faults", "wire_serving"),
        (
            "a connection is used again after an error",
            "wire-failed-connection-closed",
            Instead("self._idle.append(_Idle(session, self._clock()))"),
        ),
        ("an idle connection is used whatever has happened to it", "wire-stale-connection-dropped", Always()),
        (
            "a connection is used again however long it was idle",
            "wire-stale-connection-dropped",
            Swap(" and self._clock() - since_seconds < WIRE_REUSE_SECONDS", ""),
        ),
        ("every wait has the whole time of its deadline", "wire-deadline-kept", Instead("left = self._seconds")),
    ),
    *table(
        "wire, the server",
        ("wire_serving", "wire_calls"),
        ("any number of strangers is served", "wire-strangers-bounded", Never()),
        (
            "one address may have as many strangers as all together",
            "wire-strangers-bounded",
            Swap("strangers.count(host) >= bounds.strangers_of_address", "False"),
        ),
        (
            "any number of connections is served",
            "wire-strangers-bounded",
            Swap("len(self._open) >= bounds.connections", "False"),
        ),
        (
            "strangers of many addresses are not bounded",
            "wire-strangers-bounded",
            Swap("len(strangers) >= bounds.strangers", "False"),
        ),
        ("an ended connection keeps its place", "wire-ended-connection-forgotten", Remove()),
        ("a connection without a thread keeps its place", "wire-unstarted-connection-closed", Remove()),
        ("the end of a server waits for its peers", "wire-connections-cut-at-close", Remove()),
        ("the end of a server leaves the threads of connections", "wire-connection-threads-joined", Remove()),
    ),
    *table(
        "wire, windows",
        ("wire_windows", "wire_serving"),
        ("bytes are sent in the clear though encryption was asked for", "window-never-in-place-of-encryption", Never()),
        ("a piece is written over one that was not taken", "window-piece-taken-before-next", Never()),
        ("a write that never ends is waited for without a limit", "window-write-ends-in-time", Remove()),
        ("a piece that never comes is waited for without a limit", "window-wait-ends-in-time", Remove()),
        ("a peer may offer windows again and again", "window-offered-once", Swap(" and not offered", "")),
        ("the end of a connection leaves its window", "window-ends-with-connection", Remove()),
        ("a failed offer leaves a window", "window-ends-with-failed-offer", Remove()),
        ("UCX uses TCP although nobody chose it", "nixl-transports-chosen", Never()),
    ),
    *table(
        "wire, who is a peer",
        ("wire_security",),
        ("a client talks to a server of another run", "wire-client-compares-run", Never()),
        ("a server talks to a client of another run", "wire-server-compares-run", Never()),
        ("a client talks to another node than it wants", "wire-client-compares-node", Never()),
        ("a server accepts another mode or digest", "wire-server-compares-mode", Never()),
        ("a client does not compare the name in a certificate", "wire-client-checks-certificate-name", Remove()),
        ("a server does not compare the name in a certificate", "wire-server-checks-certificate-name", Remove()),
        ("a connection that is reset before TLS stays open", "reset-connection-closed", Remove()),
        ("any name in a certificate counts", "wire-certificate-names-node", Never()),
        ("peers need no certificate", "wire-certificate-required", Swap("CERT_REQUIRED", "CERT_NONE")),
        ("a node of another version gets no answer", "other-version-answered", Never()),
        ("a server needs no proof of the key", "wire-client-proof-checked", Never()),
        ("a client needs no proof of the key", "wire-server-proof-checked", Never()),
        (
            "a token joins any number of connections",
            "wire-token-used-once",
            Swap("self._joins.pop(token, None)", "self._joins.get(token)"),
        ),
        ("a key that others can read is used", "wire-key-file-private", Never()),
        ("a key that the group can read is used", "wire-key-file-private", Swap("0o077", "0o007")),
        ("without authentication it listens anywhere", "wire-plain-stays-private", Never()),
        ("a node listens without a certificate", "unusable-certificate-does-not-listen", Remove()),
    ),
)
