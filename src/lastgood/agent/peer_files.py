"""What an agent does with the calls of other nodes (run/peers.py): it keeps their files in the memory of this node.

Invariants
  1. Only files of ranks, in folders of generations, are written, and no finished file is changed or deleted.
  2. A file counts only with its manifest, which comes after it.
"""

from __future__ import annotations

import threading

import msgspec

from ..errors import Refused
from ..format import layout
from ..limits import SLOT_LIMIT_BYTES, WIRE_BULK_LIMIT_BYTES
from ..ports import Upload
from ..records import Extent
from ..run.peers import RANK_FILE, FileCall
from ..storage.directory import Disk
from ..wire.port import Answer, Peer


class PeerFiles:
    """`wire.port.Service` over the memory of this node."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._uploads: dict[tuple[str, str], Upload] = {}
        """(node, file) -> the file that this node is sending"""

    def close(self) -> None:
        """Drop the files that were not finished."""
        with self._lock:
            uploads, self._uploads = [*self._uploads.values()], {}
        for one in uploads:
            one.abort()

    def buffer(self, peer: Peer, request: bytes, length: int) -> memoryview:
        """Memory for the bytes of a "write" or "put"."""
        call = _decoded(request)
        if call.call not in ("write", "put") or call.length != length or length > WIRE_BULK_LIMIT_BYTES:
            raise Refused(f"{call.call} of {length} bytes; its record says {call.length}", safe="Nothing was written.")
        return memoryview(bytearray(length))

    def handle(self, peer: Peer, request: bytes, bulk: memoryview) -> Answer:
        """As `wire.port.Service.handle`."""
        call = _decoded(request)
        key = (peer.node, call.name)
        if call.call == "list":
            return Answer(msgspec.json.encode(dict(self._disk.list(call.name))))
        if call.call == "read":
            data = memoryview(bytearray(call.length))
            self._disk.read_into(Extent(blob=call.name, offset=call.offset, length=call.length), data)
            return Answer(b"", (data,))
        if call.call == "create":
            self._drop(key)
            self._remove_unfinished(call.name)
            upload: Upload = self._disk.create(call.name, call.length)
            with self._lock:
                self._uploads[key] = upload
        elif call.call == "put":
            self._disk.put_new(call.name, bytes(bulk))
        else:
            self._go_on(key, call, bulk)
        return Answer()

    def abandon(self, peer: Peer, request: bytes) -> None:
        """As `wire.port.Service.abandon`: the sender begins the file anew."""

    def _go_on(self, key: tuple[str, str], call: FileCall, bulk: memoryview) -> None:
        with self._lock:
            upload = self._uploads.get(key)
            if call.call == "finish":
                self._uploads.pop(key, None)
        if upload is None:
            raise Refused(f"{call.name} was not begun, or was begun anew", safe="Nothing was written.")
        if call.call == "finish":
            upload.finish()
        else:
            upload.write_at(bulk, call.offset)

    def _drop(self, key: tuple[str, str]) -> None:
        with self._lock:
            upload = self._uploads.pop(key, None)
        if upload is not None:
            upload.abort()

    def _remove_unfinished(self, name: str) -> None:
        """Remove what an earlier attempt has left: a file without its manifest."""
        folder, _, file = name.rpartition("/")
        there, manifest = self._disk.list(folder), f"{file.partition('.')[0]}.manifest.json"
        if file in there and manifest not in there:  # guard: finished-copy-not-replaced
            self._disk.delete(name)


def _decoded(request: bytes) -> FileCall:
    """The call. Raises Refused for anything else, and for a file that is not one of a rank."""
    try:
        call = msgspec.json.decode(request, type=FileCall)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(f"this is no call of an agent: {error}", safe="Nothing was written.") from error
    folder = call.name.removeprefix("gen/")
    if call.call == "list" and call.name.startswith("gen/") and layout.parse_folder(folder) is not None:
        return call
    found = RANK_FILE.fullmatch(call.name)
    known = found is not None and layout.parse_folder(found[1]) is not None
    if not known or call.call == "list" or min(call.offset, call.length) < 0 or call.length > _longest(call):
        raise Refused(f"{call.call} {call.name!r} is no call for a file of a rank", safe="Nothing was written.")
    return call


def _longest(call: FileCall) -> int:
    """The longest that the length of a call may be: bulk bytes are bounded, files are not."""
    return SLOT_LIMIT_BYTES if call.call == "create" else WIRE_BULK_LIMIT_BYTES
