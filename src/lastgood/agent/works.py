"""Work that a training process asks of its agent: files in memory are read and verified, copied to a place below, or
given parity on other nodes and rebuilt from it (parity_files.py). In a place below parity is written, what is old is
read again, and what is damaged is repaired.

Decides nothing, and commits nothing: the training process does, which holds the locks meanwhile.

Invariants
  1. When the training process closes its connection, its work stops at the next chunk. Until it has stopped, the agent
     tells no process that it is idle.
  2. A stalled agent, in whose place the training process or a later agent does the work, changes no file that they have
     written. Files of parity and of repairs have the same names for all writers (`AskedTier`); each copy has its own.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import NamedTuple, cast

from ..engine import guard, parity
from ..engine.arena import Arena
from ..errors import BeyondRepair, Cancelled, Damaged, LastgoodError, Refused, Unreadable
from ..format import commit, parity_layout
from ..io.reed_solomon import Code
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS, WORKERS
from ..ports import Mendable, Stop, Tier, Upload
from ..records import Extent, Finding, Generation
from ..run import access, agent_link, copying
from ..run.agent_messages import Work
from ..run.peers import Peers
from ..run.reader import read_all
from ..run.scrubber import Pace
from ..run.verify import protect_part
from ..storage.disk_upload import DiskUpload
from . import parity_files

AT_ONCE = 2
"""So many readings, for which the loop may wait, are done at the same time. So many copies come beside them, with the
parity among nodes: they may wait for a slow place or node. So do one scrub, which may be slow on purpose, and one
writing of parity, repair, or reading of what was repaired, which waits for a disk. Each has buffers of its own."""


def text_of(error: BaseException) -> str:
    """The text of an error in an answer: the name of its class, and its message."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        text += "; it has too little memory: raise the limit of its control group, or of its container"
    return text


class Done(NamedTuple):
    """What a work has found, the files that a repair or copy has written, and why the work failed, or \"\"."""

    findings: Sequence[Finding] = ()
    written: Sequence[str] = ()
    error: str = ""


class Works:
    """`memory`: makes the tier of this node's memory. `wake`: called when a work has ended. `peers`: the connections to
    other nodes, or None. It ends with its block.
    """

    def __init__(
        self, memory: Callable[[], Mendable], wake: Callable[[], None], peers: Callable[[], Peers | None] = lambda: None
    ) -> None:
        self._memory, self._wake, self._peers = memory, wake, peers
        self._verifying = ThreadPoolExecutor(AT_ONCE, "lastgood-verify")
        self._copying = ThreadPoolExecutor(AT_ONCE, "lastgood-work")
        self._scrubs = ThreadPoolExecutor(1, "lastgood-scrub")
        self._parity = ThreadPoolExecutor(1, "lastgood-parity")
        self._unfinished = dict[Future[Done], Event]()
        """each work, and what stops it"""

    def __enter__(self) -> Works:
        return self

    def __exit__(self, *_: object) -> None:
        for stopped in self._unfinished.values():
            stopped.set()
        for pool in (self._verifying, self._copying, self._scrubs, self._parity):
            pool.shutdown()

    def begin(self, work: Work, asker: socket.socket) -> Future[Done]:
        """Begin a work. `asker`: the connection of who has asked for it, which does not block."""
        stopped = Event()
        # guard: scrub-delays-no-work, copies-delay-no-reading
        own = {"read": self._verifying, "scrub": self._scrubs, "protect": self._parity, "repair": self._parity}
        pool = own.get(work.task, self._copying)
        if work.task == "scrub" and work.bytes_per_second is None:  # guard: repair-waits-for-no-slow-scrub
            pool = self._parity
        job = pool.submit(self._done, work, stopped, asker)
        self._unfinished[job] = stopped
        job.add_done_callback(lambda _: self._wake())
        return job

    def abandon(self, job: Future[Done]) -> None:
        """Stop a work for which nobody waits any more."""
        if job in self._unfinished:  # otherwise it has ended, and its answer was not sent yet
            self._unfinished[job].set()  # guard: abandoned-work-stops

    def running(self) -> bool:
        """Whether a work for which nobody waits any more has not stopped yet."""
        self._unfinished = {job: stopped for job, stopped in self._unfinished.items() if not job.done()}
        return any(stopped.is_set() for stopped in self._unfinished.values())

    def _done(self, work: Work, stopped: Event, asker: socket.socket) -> Done:
        try:
            return self._worked(work, stopped, asker)
        except Cancelled:
            return Done(error="it was stopped")
        except (LastgoodError, OSError) as error:
            return Done(error=text_of(error))

    def _worked(self, work: Work, stopped: Event, asker: socket.socket) -> Done:
        def stop() -> bool:  # the thread that receives may go on later than this one: it would set `stopped` too late
            return stopped.is_set() or agent_link.has_ended(asker)

        with contextlib.ExitStack() as places:

            def opened(place: str) -> Tier:
                return places.enter_context(access.for_sharing(place, "atomic_dirsync", order=work.order))

            if work.task == "scrub":
                return Done(_scrubbed(opened(work.place), work, stopped))
            if work.task == "protect":
                _protect(opened(work.place), work, stop)
                return Done()
            if work.task == "repair":
                return Done(written=_repaired(opened(work.place), work, stop))
            memory = self._memory()
            if work.task in ("parity", "rebuild"):
                self._with_parity(work, memory, _committed([memory], work), stopped)
                return Done()
            sources = [memory, *map(opened, work.sources)]
            return _on(opened(work.place) if work.place else memory, sources, work, stopped)

    def _with_parity(self, work: Work, memory: Mendable, generation: Generation, stopped: Event) -> None:
        peers = self._peers()
        if peers is None:
            raise Refused("this agent was not asked to serve other nodes", safe="Nothing was written.")
        if work.task == "parity":
            parity_files.write(memory, peers, generation, work.stripes, stopped.is_set)
        else:
            parity_files.rebuild(memory, peers, generation, work.of or [], work.nodes, stopped.is_set)


def _committed(places: Sequence[Tier], work: Work) -> Generation:
    """The generation of a work, from the first of these places that has it."""
    return _require_known(commit.first_generation(places, work.at), work)


def _require_known(generation: Generation, work: Work) -> Generation:
    if generation.root != work.root:
        raise Refused(f"{work.at} has another COMMIT here than the training process knows", safe="", todo="")
    return generation


def _scrubbed(target: Tier, work: Work, stopped: Event) -> list[Finding]:
    """Read all of a generation in a place below, which it may be in alone."""
    if stopped.is_set():
        raise Cancelled("it was stopped before it began")
    try:
        generation = _committed([target], work)
    except Unreadable:
        raise
    except Damaged as error:
        return [guard.finding(error)]
    rate = float("inf") if work.bytes_per_second is None else work.bytes_per_second
    with ThreadPoolExecutor(WORKERS, "lastgood-scrub-read") as workers:
        arena = Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES)
        # guard: agent-scrubs-at-its-pace
        return read_all(target, generation, arena, workers, stopped.is_set, also=Pace(rate, stopped.wait).keep)


def _protect(target: Tier, work: Work, stop: Stop) -> None:
    """Write the parity of a verified generation in a place below, which it may be in alone."""
    generation, code = _committed([target], work), Code(*parity_layout.parsed(work.code))
    with ThreadPoolExecutor(WORKERS, "lastgood-work-read") as workers:
        how = copying.Copying(Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES), workers, stop=stop)
        for rank in work.of or []:
            protect_part(cast(Tier, AskedTier(cast(Mendable, target), stop)), generation, rank, code, how)


def _repaired(target: Tier, work: Work, stop: Stop) -> list[str]:
    """Replace what is damaged of a generation in a place below, whose COMMIT may be damaged too, from its parity."""
    usable = parity.find_all(target, work.at)
    if not usable:
        raise BeyondRepair(f"{work.at} has no parity that can be read", safe="Nothing was changed.")
    _require_known(usable[0].generation, work)
    with ThreadPoolExecutor(WORKERS, "lastgood-work-read") as workers:
        return parity.rebuild(cast(Mendable, AskedTier(cast(Mendable, target), stop)), usable, workers, stop)


class AskedTier:
    """The part of `ports.Mendable` with which parity is written and used: `tier`, as long as it is asked for.

    `stop()` is called before each reading and change. Once it is true, nothing is read, created, replaced or deleted
    (Cancelled): another process may have written under the same names. What was begun stays then, and who does the same
    again clears it.
    """

    def __init__(self, tier: Mendable, stop: Stop) -> None:
        self._tier, self._stop = tier, stop
        self.place, self.newest_only, self.reads_at_once = tier.place, tier.newest_only, tier.reads_at_once

    def list(self, folder: str) -> Mapping[str, int | None]:
        return self._tier.list(folder)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        self._require_asked()  # guard: repair-for-nobody-ends
        self._tier.read_into(extent, mv, fresh=fresh)

    def create(self, name: str, length: int) -> Upload:
        self._require_asked()
        return _AskedUpload(self._tier.create(name, length), self._stop)

    def put_new(self, name: str, data: bytes) -> None:
        self._require_asked()
        self._tier.put_new(name, data)

    def delete(self, name: str) -> None:
        self._require_asked()
        self._tier.delete(name)

    def replace(self, name: str, by: str) -> None:
        self._require_asked()
        self._tier.replace(name, by)

    def _require_asked(self) -> None:
        if self._stop():  # guard: stalled-agent-changes-nothing
            raise Cancelled("who has asked for it has gone")


class _AskedUpload:
    """An upload of `AskedTier`."""

    def __init__(self, upload: Upload, stop: Stop) -> None:
        self._upload, self._stop = upload, stop

    def write_at(self, mv: memoryview, offset: int) -> None:
        self._upload.write_at(mv, offset)

    def finish(self) -> None:
        self._upload.finish()

    def abort(self) -> None:
        if isinstance(self._upload, DiskUpload) and self._stop():  # guard: stalled-agent-removes-nothing
            self._upload.leave()
        else:
            self._upload.abort()  # in an object store it has no name yet


def _on(target: Tier, sources: Sequence[Tier], work: Work, stopped: Event) -> Done:
    generation = _committed([*sources, target], work)
    with ThreadPoolExecutor(WORKERS, "lastgood-work-read") as workers:
        how = copying.Copying(Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES), workers, stop=stopped.is_set)
        if work.task == "read":
            return Done(read_all(target, generation, how.arena, workers, how.stop, of=work.of))
        act = copying.pack_files if work.task == "pack" else copying.copy_files
        return Done(written=act(cast(Mendable, target), sources, generation, work.of, how))
