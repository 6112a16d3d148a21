"""Copies that a drill on another node has made here, of files that this node holds (run/drill_nodes.py).

They lie in `.drill/drill-<8 hex>-<8 hex>` of the agent's folder, and are damaged and removed there. The real files are
only read.

    open     room is compared; a folder is made in place of an earlier one, with the COMMIT of the generation
    copy     as "write", with the bytes of the real file of the same name
    remove   the folder is removed
    others   as for real files (peer_files.py), in that folder

Invariants
  1. Nothing is written outside of `.drill`.
  2. Nothing is made before there was room for all of it, with three times as much left for the job (DRILL_SHARE).
  3. One drill at a time. Its folder is removed once no call has come for DRILL_IDLE_SECONDS, when the agent serves a
     job anew, and when it starts or ends: so a drill that is killed, and an agent that is killed, leave nothing for
     long.
  4. A folder is renamed at once, and removed in a thread: that takes a second for each 10 GB, and the thread of the
     agent, and a job that is opened, wait for no removal.
  5. A call that ends after its folder was removed makes nothing in its place or in a later folder, and leaves no file
     open, whose room would stay taken.
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
from typing import NamedTuple

import msgspec

from ..errors import LastgoodError, NoSpace, Refused
from ..format import layout, sealed
from ..io import files, memory_files, os_errors
from ..io.files import PosixFiles
from ..io.memory_files import MemoryFiles
from ..io.reused_files import ReusedFiles
from ..limits import DRILL_IDLE_SECONDS, DRILL_SHARE
from ..ports import Mendable
from ..records import Extent
from ..run import memory_place, paths
from ..run.peers import DRILL_FOLDER, DRILLS, FileCall
from ..storage.directory import Disk
from ..units import size
from ..wire.port import Answer, Peer, Service
from .peer_files import PeerFiles, decoded


@dataclass
class _Drill:
    """The drill that has copies here. `by`: its node. `until`: when it has ended without a further call.

    `closed`: whether it has ended.
    """

    name: str
    by: str
    until: float
    files: PeerFiles
    closed: bool = False


class _Ended(NamedTuple):
    """A drill that has ended (None: there was none), and the folders that are to be removed."""

    drill: _Drill | None
    folders: list[str]


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
        self._removals = list[threading.Thread]()

    def close(self) -> None:
        """Wait until everything that was removed is gone."""
        for one in self._removals:
            one.join()

    def seconds_left(self) -> float | None:
        """After what time `end_idle` is to be called; None: no drill has copies here."""
        drill = self._drill
        return None if drill is None else max(0.0, drill.until - self._clock())

    def end_idle(self) -> None:
        """Remove the copies of a drill that has made no call for DRILL_IDLE_SECONDS, as `clear`. Before that no thread
        is waited for."""
        if self.seconds_left() != 0.0:
            return
        with self._lock:
            if self._drill is None or self._clock() < self._drill.until:
                return
            ended = self._set_aside()
        self._remove_behind(ended)  # guard: abandoned-drill-removed

    def clear(self) -> None:
        """Remove what lies here, also of an agent that was killed: in a thread, for which `close` waits."""
        with self._lock:
            ended = self._set_aside()
        self._remove_behind(ended)

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
                ended = self._set_aside() if self._drill is not None and self._drill.name == name else _Ended(None, [])
            self._remove(ended)
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
            if drill.closed:  # guard: late-call-leaves-no-open-file
                _drop(drill)

    def abandon(self, peer: Peer, request: bytes) -> None:
        """As `wire.port.Service.abandon`."""

    def _called(self, name: str) -> _Drill:
        """The drill of this name, which has made a call now. Raises Refused where it has no copies."""
        with self._lock:
            if self._drill is None or self._drill.name != name:
                raise Refused("the copies of this drill were removed on this node", safe="The run is untouched.")
            self._drill.until = self._clock() + DRILL_IDLE_SECONDS
            return self._drill

    def _open(self, peer: Peer, name: str, call: FileCall) -> None:
        memory = self._memory()
        with self._lock:
            self._require_none(lambda drill: drill.by != peer.node and self._clock() < drill.until)
            ended = self._set_aside()
        self._remove(ended)  # before room is compared
        with self._lock:
            self._require_none(lambda drill: True)  # another one was quicker
            if layout.COMMIT not in (listing := memory.list(call.name)):
                raise Refused(f"{call.name} was deleted on this node, or never committed", safe="Nothing was written.")
            path = f"{call.name}/{layout.COMMIT}"
            data = sealed.read(memory, path, listing[layout.COMMIT])
            root = os.path.join(_folder(memory), DRILLS, f"{name}-{secrets.token_hex(4)}")
            disk = self._made(memory, root, call.length)
            until = self._clock() + DRILL_IDLE_SECONDS
            try:
                disk.put_new(path, data)
            except LastgoodError:
                shutil.rmtree(root, ignore_errors=True)
                raise
            self._drill = _Drill(name, peer.node, until, PeerFiles(lambda: disk, of_drill=True))
        self._begun()

    def _require_none(self, hinders: Callable[[_Drill], bool]) -> None:
        """Raise Refused if another drill has copies here that hinders. The lock is held."""
        if self._drill is not None and hinders(self._drill):  # guard: one-drill-at-a-time
            raise Refused(f"node {self._drill.by} plays a drill here now", safe="The run is untouched.")

    def _made(self, memory: Mendable, root: str, length: int) -> Disk:
        """The folder `root` for copies of so many bytes. Raises NoSpace, NotWritable."""
        folder, in_memory = _folder(memory), paths.in_memory(memory.place)
        try:
            free = memory_files.free_bytes(folder) if in_memory else files.free_bytes(folder)
            if not 0 <= length <= free // DRILL_SHARE:  # guard: drill-asks-nodes-for-room
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

    def _set_aside(self) -> _Ended:
        """End the drill, and rename what lies here. The lock is held."""
        drill, self._drill = self._drill, None
        if drill is not None:
            drill.closed = True
        folder, found = os.path.join(_folder(self._memory()), DRILLS), list[str]()
        with contextlib.suppress(FileNotFoundError):
            for path in (os.path.join(folder, name) for name in os.listdir(folder)):
                if not path.endswith(memory_place.REMOVED):
                    with contextlib.suppress(OSError):
                        os.rename(path, path + memory_place.REMOVED)
                        path += memory_place.REMOVED
                found.append(path)
        return _Ended(drill, found)

    def _remove_behind(self, ended: _Ended) -> None:
        """As `_remove`, in a thread."""
        if ended.drill is not None or ended.folders:
            self._removals = [one for one in self._removals if one.is_alive()]
            self._removals.append(threading.Thread(target=self._remove, args=(ended,), name="lastgood-drill-remove"))
            self._removals[-1].start()  # guard: agent-waits-for-no-removal

    def _remove(self, ended: _Ended) -> None:
        """Remove what was set aside. The lock is not held."""
        if ended.drill is not None:
            _drop(ended.drill)
        for one in ended.folders:
            shutil.rmtree(one, ignore_errors=True)
        with self._lock, contextlib.suppress(OSError):
            os.rmdir(os.path.join(_folder(self._memory()), DRILLS))


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


def _drop(drill: _Drill) -> None:
    """Close the files of a drill that were not finished."""
    with contextlib.suppress(LastgoodError):
        drill.files.close()


def _of_drill(call: FileCall) -> tuple[str, FileCall]:
    """The name of the folder of a drill, and the call with the name that the file has in it."""
    name, _, rest = call.name.partition("/")
    if call.call == "open" and layout.parse_folder(rest.removeprefix("gen/")) is None:
        raise Refused(f"{rest!r} is no folder of a generation", safe="Nothing was written.")
    return name, msgspec.structs.replace(call, name=rest)


def _folder(memory: Mendable) -> str:
    return memory.place.removeprefix(paths.MEMORY)
