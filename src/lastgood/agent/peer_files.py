"""What an agent does with the calls of other nodes (run/peers.py): it keeps their files in the memory of this node.

Invariants
  1. Only files of ranks, in folders of generations, are written, and no finished file is changed or deleted.
  2. A file has its name once all bytes are there: who reads while it is being received reads from another node.
  3. A file counts only with its manifest, which comes after it.
  4. Nothing is written to a generation whose COMMIT this node does not have: it may have been deleted meanwhile.
  5. COMMIT itself is created under the lock of the run, beside the seals of this node that it names (late_commit.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ..errors import NameTaken, Refused, RunLocked
from ..format import intents, layout
from ..io import os_errors
from ..io.files import Lock
from ..limits import RECORD_LIMIT_BYTES, SLOT_LIMIT_BYTES, WIRE_BULK_LIMIT_BYTES
from ..ports import Mendable, Upload
from ..records import Commit, Extent, GenerationId
from ..run import access, paths
from ..run.late_commit import HELD
from ..run.peers import RANK_FILE, STRIPE_FILE, FileCall
from ..storage.directory import Disk
from ..wire.port import Answer, FilePart, Peer

RECEIVING = ".copy.tmp"
"""After the name of a file that is being received."""
_CALLS = "create", "write", "finish", "put", "abort", "read"
"""The calls for a file."""


@dataclass
class _Receiving:
    """A file that another node is sending. `sending`: its text. `missing`: bytes that were not written yet.

    `upload`: None until it is made, and once the file has its name. `calls`: how many use it now. `ends`: no further
    call may use it, and the last one drops it unless it has its name.
    """

    sending: str
    missing: int
    upload: Upload | None = None
    calls: int = 1
    ends: bool = False


class PeerFiles:
    """`wire.port.Service` over the memory of this node. `memory`: makes its tier. `committed`: called after a late
    commit. `of_drill` (default False): it serves the copies of a drill (drill_files.py), where other nodes write files
    of parity too, and which are never committed late."""

    def __init__(
        self, memory: Callable[[], Mendable], committed: Callable[[], None] = lambda: None, of_drill: bool = False
    ) -> None:
        self._memory, self._committed, self._of_drill = memory, committed, of_drill
        self._lock = threading.Lock()
        self._files: dict[str, _Receiving] = {}
        self._buffers = threading.local()

    def close(self) -> None:
        """Drop the files that were not finished."""
        for name in [*self._files]:
            self._drop(name)

    def buffer(self, peer: Peer, request: bytes, length: int) -> memoryview:
        """Memory for the bytes of a "write", "put" or "commit"."""
        call = self._decoded(request)
        if call.call not in ("write", "put", "commit") or call.length != length or length > WIRE_BULK_LIMIT_BYTES:
            raise Refused(f"{call.call} of {length} bytes; its record says {call.length}", safe="Nothing was written.")
        return self._buffer(length)

    def handle(self, peer: Peer, request: bytes, bulk: memoryview) -> Answer:
        """As `wire.port.Service.handle`."""
        call, disk = self._decoded(request), self._memory()
        if call.call == "list":
            return Answer(msgspec.json.encode(dict(disk.list(call.name))))
        if call.call == "read":
            return self._read(disk, call)
        if call.call == "abort":
            self._drop(call.name, call.sending)
            return Answer()
        if call.call in ("seals", "commit"):
            at = layout.parse_folder(call.name.removeprefix("gen/"))
            assert at is not None
            with _not_open(disk):  # guard: late-commit-refused-while-open
                if call.call == "seals":
                    return Answer(msgspec.json.encode(intents.seals_of(disk, at)))
                _commit(disk, at, bytes(bulk))
            self._committed()
            return Answer()
        folder = call.name.rpartition("/")[0]
        if layout.COMMIT not in disk.list(folder):  # guard: deleted-generation-gets-no-copies
            self._drop_deleted(disk)
            raise Refused(f"{folder} was deleted on this node, or never committed", safe="Nothing was written.")
        if call.call == "create":
            self._begin(disk, call)
        elif call.call == "put":
            disk.put_new(call.name, bytes(bulk))
        else:
            self._go_on(disk, call, bulk)
        return Answer()

    def _read(self, disk: Mendable, call: FileCall) -> Answer:
        extent = Extent(blob=call.name, offset=call.offset, length=call.length)
        if call.caller_verifies and isinstance(disk, Disk):  # guard: unverified-bytes-sent-if-asked
            return Answer(part=FilePart(disk.opened(extent), call.offset, call.length))
        data = self._buffer(call.length)
        disk.read_into(extent, data)
        return Answer(b"", (data,), call.background)

    def _decoded(self, request: bytes) -> FileCall:
        """The call. Raises Refused for anything else, and for a file that is not one of a rank."""
        call = decoded(request)
        folder = call.name.removeprefix("gen/")
        of_folder = ("list",) if self._of_drill else ("list", "seals", "commit")
        is_folder = call.name.startswith("gen/") and layout.parse_folder(folder) is not None
        if call.call in of_folder and is_folder and 0 <= call.length <= RECORD_LIMIT_BYTES:
            return call
        found = RANK_FILE.fullmatch(call.name)
        if self._of_drill or call.call == "read":  # guard: parity-of-others-not-written
            found = found or STRIPE_FILE.fullmatch(call.name)
        known = found is not None and layout.parse_folder(found[1]) is not None and call.call in _CALLS
        if not known or min(call.offset, call.length) < 0 or call.length > _longest(call):
            raise Refused(f"{call.call} {call.name!r} is no call for a file of a rank", safe="Nothing was written.")
        return call

    def _buffer(self, length: int) -> memoryview:
        """Memory for the bytes of one call; the next call of its connection uses it again."""
        # A new buffer for each chunk costs more than the chunk: the system clears every page of it.
        if len(found := getattr(self._buffers, "memory", b"")) < length:
            found = self._buffers.memory = bytearray(length)
        return memoryview(found)[:length]

    def abandon(self, peer: Peer, request: bytes) -> None:
        """As `wire.port.Service.abandon`: the sender begins the file anew."""

    # ---- files that are being received ----------------------------------------------------------------------

    def _begin(self, disk: Mendable, call: FileCall) -> None:
        """Make the file in which `call.name` is received, in place of what an earlier sending has left."""
        self._drop(call.name)
        self._drop_deleted(disk)
        one = _Receiving(call.sending, call.length)
        with self._lock:
            if call.name in self._files:  # guard: file-received-once-at-a-time
                raise Refused(f"{call.name} is being received; try again", safe="Nothing was written.")
            self._files[call.name] = one
        try:
            _require_unfinished(disk, call.name)
            disk.delete(call.name + RECEIVING)  # of an agent that was killed
            one.upload = disk.create(call.name + RECEIVING, call.length)  # guard: copy-named-when-complete
        except BaseException:
            one.ends = True
            raise
        finally:
            self._leave(call.name, one)

    def _go_on(self, disk: Mendable, call: FileCall, bulk: memoryview) -> None:
        """Write bytes of a file that is being received, or give it its name."""
        with self._lock:
            one = self._files.get(call.name)
            upload = one.upload if one is not None and not one.ends else None
            if one is None or upload is None or one.sending != call.sending:  # guard: sendings-do-not-mix
                raise Refused(f"{call.name} was not begun, or was begun anew", safe="Nothing was written.")
            if call.call == "finish":
                if one.missing:
                    raise Refused(f"{call.name} lacks {one.missing} bytes", safe="It does not count as a copy.")
                one.ends = True
            one.calls += 1
        try:
            if call.call == "finish":
                upload.finish()
                disk.replace(call.name, call.name + RECEIVING)
                one.upload = None
                return
            upload.write_at(bulk, call.offset)
            with self._lock:
                one.missing -= len(bulk)
        finally:
            self._leave(call.name, one)

    def _drop(self, name: str, sending: str | None = None) -> None:
        """Drop an unfinished file, if it is that of this sending (None: of any), once no call uses it."""
        with self._lock:
            one = self._files.get(name)
            if one is None or one.ends or sending not in (None, one.sending):
                return
            one.ends, one.calls = True, one.calls + 1
        self._leave(name, one)

    def _drop_deleted(self, disk: Mendable) -> None:
        """Drop the unfinished files of generations that were deleted here: a sender that is cut off cannot."""
        folders = {name.rpartition("/")[0] for name in [*self._files]}
        deleted = {folder for folder in folders if layout.COMMIT not in disk.list(folder)}
        for name in [*self._files]:
            if name.rpartition("/")[0] in deleted:  # guard: deleted-generation-keeps-no-memory
                self._drop(name)

    def _leave(self, name: str, one: _Receiving) -> None:
        """A call uses this file no longer. Drops a file that ends with this call."""
        with self._lock:
            one.calls -= 1
            if one.calls or not one.ends:  # guard: used-upload-not-dropped
                return
        try:
            if one.upload is not None:
                one.upload.abort()
        finally:
            with self._lock:
                del self._files[name]  # only now: a file that is begun anew has the same name


@contextlib.contextmanager
def _not_open(disk: Mendable) -> Iterator[None]:
    """Inside, no process opens the run on this node. Raises RunLocked where one has it open, Refused where it was
    removed, and the errors of the file system."""
    path = os.path.join(paths.parsed(disk.place).root, access.LOCK)
    try:
        lock = Lock(path, access.AGENTS_MARK)
    except BlockingIOError as error:
        raise RunLocked(HELD, safe="Nothing was committed.") from error
    except FileNotFoundError as error:
        raise Refused("the memory of this node was removed", safe="Nothing was committed.") from error
    except OSError as error:
        raise os_errors.at_path(error, path) from error
    with contextlib.closing(lock):
        yield


def _commit(disk: Mendable, at: GenerationId, data: bytes) -> None:
    """Create a COMMIT beside the seals of this node. Raises Damaged, Refused, and as `Tier.put_new`."""
    name = f"{layout.folder(at)}/{layout.COMMIT}"
    record = layout.decode(data, Commit, name)
    mine = intents.seals_of(disk, at)
    if record.id != at or not mine or any(seal not in record.seals for seal in mine):
        # guard: commit-beside-its-seals
        raise Refused(f"this node has not sealed its part of {at} as COMMIT says", safe="Nothing was committed.")
    disk.put_new(name, data)


def _require_unfinished(disk: Mendable, name: str) -> None:
    """Raise NameTaken for a file that is there beside its manifest. Another one is what an earlier attempt has left."""
    folder, _, file = name.rpartition("/")
    there, manifest = disk.list(folder), f"{file.partition('.')[0]}.manifest.json"
    if file in there and manifest in there:  # guard: finished-copy-not-replaced
        raise NameTaken(f"{name} is complete on this node", safe="It is untouched.")


def decoded(request: bytes) -> FileCall:
    """The call. Raises Refused for anything else."""
    try:
        return msgspec.json.decode(request, type=FileCall)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(f"this is no call of an agent: {error}", safe="Nothing was written.") from error


def _longest(call: FileCall) -> int:
    """The longest that the length of a call may be: bulk bytes are bounded, files are not."""
    return SLOT_LIMIT_BYTES if call.call == "create" else WIRE_BULK_LIMIT_BYTES
