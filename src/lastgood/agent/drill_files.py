"""Copies that a drill on another node has made here, of files that this node holds (run/drill_nodes.py).

They lie in `.drill/drill-<8 hex>-<8 hex>` of the agent's folder, and are damaged and removed there. The real files are
only read.

    open     room is compared; a folder is made in place of an earlier one, with the COMMIT of the generation
    copy     as "write", with the bytes of the real file of the same name
    remove   the folder is removed
    others   as for real files (peer_files.py), in that folder

Invariants
  1. Nothing is written outside of `.drill`.
  2. Nothing is made before there was room for all of it, with three times as much left for the job (SHARE).
  3. One drill at a time. Its folder is removed once no call has come for IDLE_SECONDS, when the agent serves a job
     anew, and when it starts or ends: so a drill that is killed, and an agent that is killed, leave nothing for long.
  4. What a call makes that ends after its folder was removed is removed by it, and nothing of a later folder is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..errors import LastgoodError, NoSpace, Refused
from ..format import layout, sealed
from ..io import files, memory_files, os_errors
from ..io.files import PosixFiles
from ..io.memory_files import MemoryFiles
from ..io.reused_files import ReusedFiles
from ..ports import Mendable
from ..records import Extent
from ..run import paths
from ..run.peers import DRILL_FOLDER, DRILLS, FileCall
from ..storage.directory import Disk
from ..units import size
from ..wire.port import Answer, Peer, Service
from .peer_files import PeerFiles, decoded

IDLE_SECONDS = 300.0
"""So long a drill may make no call before its copies are removed."""
SHARE = 4
"""A drill gets one part of so many of what is free; the rest stays for the job."""


@dataclass
class _Drill:
    """The drill that has copies here. `by`: its node. `until`: when it has ended without a further call.

    `root`: the folder of its copies. `closed`: whether it has ended.
    """

    name: str
    by: str
    until: float
    files: PeerFiles
    root: str
    closed: bool = False


class DrillFiles:
    """`memory`: makes the tier of this node. `begun`: called when a drill begins. `clock`: monotonic, in seconds."""

    def __init__(
        self,
        memory: Callable[[], Mendable],
        begun: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._begun, self._clock = memory, begun, clock
        self._lock = threading.Lock()
        self._drill: _Drill | None = None

    def seconds_left(self) -> float | None:
        """After what time `end_idle` is to be called; None: no drill has copies here."""
        drill = self._drill
        return None if drill is None else max(0.0, drill.until - self._clock())

    def end_idle(self) -> None:
        """Remove the copies of a drill that has made no call for IDLE_SECONDS. Before that no thread is waited for."""
        if self.seconds_left() != 0.0:
            return
        with self._lock:
            if self._drill is not None and self._clock() >= self._drill.until:  # guard: abandoned-drill-removed
                self._remove()

    def clear(self) -> None:
        """Remove what lies here, also of an agent that was killed."""
        with self._lock:
            self._remove()

    # ---- calls -----------------------------------------------------------------------------------------------

    def buffer(self, peer: Peer, request: bytes, length: int) -> memoryview:
        """As `wire.port.Service.buffer`."""
        name, call = _of_drill(decoded(request))
        return self._called(name).files.buffer(peer, msgspec.json.encode(call), length)

    def handle(self, peer: Peer, request: bytes, bulk: memoryview) -> Answer:
        """As `wire.port.Service.handle`."""
        name, call = _of_drill(decoded(request))
        if call.call == "open":
            self._open(peer, name, call)
            return Answer()
        if call.call == "remove":
            with self._lock:
                if self._drill is not None and self._drill.name == name:
                    self._remove()
            return Answer()
        drill = self._drill
        if call.call == "list" and (drill is None or drill.name != name):
            return Answer(b"{}")  # as a node that was replaced
        drill = self._called(name)
        try:
            if call.call == "copy":
                call = msgspec.structs.replace(call, call="write")
                bulk = drill.files.buffer(peer, msgspec.json.encode(call), call.length)
                self._memory().read_into(Extent(blob=call.name, offset=call.offset, length=call.length), bulk)
            return drill.files.handle(peer, msgspec.json.encode(call), bulk)
        finally:
            if drill.closed:  # guard: late-call-leaves-no-copy
                with self._lock:
                    _close(drill)

    def abandon(self, peer: Peer, request: bytes) -> None:
        """As `wire.port.Service.abandon`."""

    def _called(self, name: str) -> _Drill:
        """The drill of this name, which has made a call now. Raises Refused where it has no copies."""
        with self._lock:
            if self._drill is None or self._drill.name != name:
                raise Refused("the copies of this drill were removed on this node", safe="The run is untouched.")
            self._drill.until = self._clock() + IDLE_SECONDS
            return self._drill

    def _open(self, peer: Peer, name: str, call: FileCall) -> None:
        memory = self._memory()
        with self._lock:
            drill, now = self._drill, self._clock()
            if drill is not None and drill.by != peer.node and now < drill.until:  # guard: one-drill-at-a-time
                raise Refused(f"node {drill.by} plays a drill here now", safe="The run is untouched.")
            self._remove()
            if layout.COMMIT not in (listing := memory.list(call.name)):
                raise Refused(f"{call.name} was deleted on this node, or never committed", safe="Nothing was written.")
            path = f"{call.name}/{layout.COMMIT}"
            data = sealed.read(memory, path, listing[layout.COMMIT])
            root = os.path.join(_folder(memory), DRILLS, f"{name}-{secrets.token_hex(4)}")
            disk = self._made(memory, root, call.length)
            self._drill = _Drill(name, peer.node, now + IDLE_SECONDS, PeerFiles(lambda: disk, parity=True), root)
            try:
                disk.put_new(path, data)
            except LastgoodError:
                self._remove()
                raise
        self._begun()

    def _made(self, memory: Mendable, root: str, length: int) -> Disk:
        """The folder `root` for copies of so many bytes. Raises NoSpace, NotWritable."""
        folder, in_memory = _folder(memory), paths.in_memory(memory.place)
        try:
            free = memory_files.free_bytes(folder) if in_memory else files.free_bytes(folder)
            if not 0 <= length <= free // SHARE:  # guard: drill-asks-nodes-for-room
                raise NoSpace(
                    f"the copies need {size(length)}, and of {size(free)} that are free a drill gets a quarter",
                    safe="Nothing was written.",
                )
            os.makedirs(os.path.join(root, "gen"), 0o700)
        except OSError as error:
            raise os_errors.at_path(error, root) from error
        if not in_memory:
            return Disk(PosixFiles(), root, shared=True)
        kept = MemoryFiles(folder, None, buffered=False)  # it compares the room again before each file
        kept.reused = ReusedFiles(root)  # not the memory of deleted files that the next save takes
        return Disk(kept, root, shared=True)

    def _remove(self) -> None:
        """End the drill, and remove its copies. The lock is held."""
        drill, self._drill = self._drill, None
        if drill is not None:
            drill.closed = True
            _close(drill)
        shutil.rmtree(os.path.join(_folder(self._memory()), DRILLS), ignore_errors=True)


class WithDrills:
    """`wire.port.Service`: the calls of drills go to `drills`, all others to `files`."""

    def __init__(self, files: PeerFiles, drills: DrillFiles) -> None:
        self._files, self._drills = files, drills

    def buffer(self, peer: Peer, request: bytes, length: int) -> memoryview:
        """As `wire.port.Service.buffer`."""
        return self._of(request).buffer(peer, request, length)

    def handle(self, peer: Peer, request: bytes, bulk: memoryview) -> Answer:
        """As `wire.port.Service.handle`."""
        return self._of(request).handle(peer, request, bulk)

    def abandon(self, peer: Peer, request: bytes) -> None:
        """As `wire.port.Service.abandon`."""

    def _of(self, request: bytes) -> Service:
        return self._drills if DRILL_FOLDER.fullmatch(decoded(request).name.partition("/")[0]) else self._files


def _close(drill: _Drill) -> None:
    """Drop the files of a drill, finished or not. `DrillFiles` holds its lock, so that no other drill begins."""
    with contextlib.suppress(LastgoodError):
        drill.files.close()
    shutil.rmtree(drill.root, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(drill.root))


def _of_drill(call: FileCall) -> tuple[str, FileCall]:
    """The name of the folder of a drill, and the call with the name that the file has in it."""
    name, _, rest = call.name.partition("/")
    if call.call == "open" and layout.parse_folder(rest.removeprefix("gen/")) is None:
        raise Refused(f"{rest!r} is no folder of a generation", safe="Nothing was written.")
    return name, msgspec.structs.replace(call, name=rest)


def _folder(memory: Mendable) -> str:
    return memory.place.removeprefix(paths.MEMORY)
