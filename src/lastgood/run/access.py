"""Opens the directory, the slots, the memory or the folder in an object store of a run, for reading or for writing.

Before a run on a disk is changed, three checks are made: the path is a run or may become one; this user may create the
directory and the file `.lock` in it, all that a failed opening leaves; and no other process has it open for writing
(a lock on that file, which ends with its process). In an object store the last opening counts (claims.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from ..errors import LastgoodError, NotARun, Refused, RunLocked
from ..extras import needed
from ..format import catalog, layout
from ..io import os_errors, reused_files
from ..io.files import Lock, PosixFiles, lock_holder, takes_direct
from ..io.machine import machine
from ..io.mapped import MappedFiles
from ..ports import Files, Tier
from ..records import prepare
from ..storage import object_store
from ..storage.directory import Disk, WriteMode
from ..storage.slots import FOLDER, Slots
from . import agent_link, agent_start, claims, memory_place, memory_relief, paths
from .packed import PackedTier

if TYPE_CHECKING:
    from ..storage.objects import Objects

LOCK = ".lock"
WANTED = ".wanted"
"""After the name of the lock: a file that asks the agent which holds the lock to give way."""
AGENTS_MARK = b"agent"
"""The content of a lock file while an agent holds the lock."""
YIELD_SECONDS, MARK_SECONDS = 15.0, 0.5
"""How long an agent may take to give way, and to mark the lock file once it has the lock."""
POLL_SECONDS = 0.05
_GENERATIONS = {"gen", FOLDER}
_RUN_NAMES = {
    layout.HEADER,
    layout.POINTER,
    layout.OLD_POINTER,
    layout.PLACES,
    layout.LINK,
    catalog.NAME,
    LOCK,
    LOCK + WANTED,
    agent_link.LOCK,
    agent_start.LOG,
    agent_link.SOCKET,
    agent_link.SPEC,
    agent_link.COPIED,
    "incarnations",
    claims.FOLDER,
    memory_place.SPILL,
    memory_place.STAGED,
    reused_files.FOLDER,
} | _GENERATIONS

Persist = Literal["direct", "mmap"]
"""How slots are written: with direct I/O if the file system supports it, or through a shared memory mapping."""


def for_reading(path: str | os.PathLike[str]) -> Tier:
    """Open an existing run for reading. Takes no lock.

    Raises NotARun, TierDown, and NotWritable if this user may not read the run.
    """
    prepare()
    root, kind = place = paths.parsed(path)
    objects = _objects(root) if kind == "objects" else None
    names = set(objects.list("")) or None if objects else _names_at(root, kind == "slots")
    if names is None:
        raise NotARun(f"there is nothing at {root}", safe="Nothing was touched.", todo=memory_place.runs_near(place))
    if not names & {layout.HEADER, *_GENERATIONS}:
        raise NotARun(
            f"{root} is not a run of lastgood: it has no {layout.HEADER}",
            safe="It is untouched.",
            todo=paths.runs_near(root),
        )
    if objects is not None:
        return PackedTier(objects)
    if kind == "memory":
        return directory_tier(place, "atomic_dirsync")
    files = PosixFiles()  # reads without direct I/O: only a write could find out whether it is supported
    return slots(files, root) if kind == "slots" else PackedTier(Disk(files, root))


def slots(files: Files, root: str, *, in_flight: int = 1, direct: bool = False, several: bool = False) -> Slots:
    """Make a tier over slots. It learns here which records mark a generation as committed, verified or bad."""
    return Slots(
        files,
        root,
        commit=layout.COMMIT,
        verified=layout.VERIFIED,
        bad=(layout.DAMAGED, layout.UNFIT),
        in_flight=in_flight,
        direct=direct,
        several=several,
    )


@contextlib.contextmanager
def for_writing(
    path: str | os.PathLike[str],
    mode: WriteMode,
    *,
    in_flight: int = 1,
    persist: Persist = "direct",
    take_over: bool = True,
    several: bool = False,
    spill: str | None = None,
    agent_order: int | None = None,
) -> Iterator[Tier]:
    """Open a run for writing and hold its lock until the context ends. A missing directory is created.

    `mode`: how files are written; slots and object stores accept "atomic_dirsync" only. `in_flight` (default 1): how
    many saves may be in flight, for slots only. `persist` (default "direct"): how slots are written, for slots only.
    `take_over` (default True): whether a process that has the run open in an object store, or ended without closing it,
    is replaced; otherwise RunLocked is raised. `several` (default False): as for `Slots`. `spill` (default None): as
    for `MemoryFiles`, for memory only. `agent_order` (default None): this is an agent, which gives way to any process,
    and replaces claims up to this number. Raises NotARun, NotWritable, RunLocked, NoSpace, TierDown; Refused for a
    `mode` or `persist` that does not fit.
    """
    prepare()
    place = paths.parsed(path)
    root, in_slots = place.root, place.kind == "slots"
    if mode != "atomic_dirsync" and place.kind not in ("directory", "memory"):
        raise Refused(
            f"write_mode={mode!r} is for directories; slots and object stores always make everything durable",
            safe="Nothing was touched.",
            todo="Leave write_mode out, or give a directory.",
        )
    if persist != "direct" and not in_slots:
        raise Refused(
            f"persist={persist!r} is for slots",
            safe="Nothing was touched.",
            todo=f"Open the run as {paths.SLOTS}{root}",
        )
    if place.kind == "objects":
        objects = _objects(root)
        _require_no_other_files(place, set(objects.list("")))
        with claims.claimed(objects, take_over, agent_order or 0) as held:
            yield PackedTier(held)
        return
    _require_no_other_files(place, _names_at(root, in_slots) or set())
    lock = _locked_place(place, of_agent=agent_order is not None)
    try:
        if not in_slots:
            with _opened(place, mode, spill, shared=False, copies=agent_order is not None) as directory:
                yield directory
            return
        files = MappedFiles(root) if persist == "mmap" else PosixFiles()
        tier = slots(files, root, in_flight=in_flight, direct=_supports_direct_io(root), several=several)
        try:
            yield tier
        except BaseException:
            with contextlib.suppress(LastgoodError):  # the first exception is the one that must be raised
                tier.close()
            raise
        tier.close()
    finally:
        lock.close()


@contextlib.contextmanager
def for_sharing(
    path: str | os.PathLike[str], mode: WriteMode, spill: str | None = None, order: int = 0
) -> Iterator[Tier]:
    """Open a run that rank 0 of this job holds open for writing. Takes no lock. Raises NotARun, NotWritable.

    `mode`, `spill`: as for `for_writing`. `order` (default 0): as for `claims.under`, in an object store.
    """
    prepare()
    root, kind = place = paths.parsed(path)
    if kind == "objects":
        yield PackedTier(claims.under(_objects(root), order))
        return
    if _names_at(root, False) is None:
        raise NotARun(
            f"there is nothing at {root} on this machine, though rank 0 has opened it",
            safe="Nothing was touched.",
            todo="All ranks must see the same directory: mount it on every node.",
        )
    with _opened(place, mode, spill, shared=True, copies=False) as directory:
        yield directory


def _opened(
    place: paths.Place, mode: WriteMode, spill: str | None, shared: bool, copies: bool
) -> contextlib.AbstractContextManager[Tier]:
    """As `directory_tier`, or `memory_relief.tier`."""
    if place.kind == "memory":
        return memory_relief.tier(place, spill, shared, copies)
    return contextlib.nullcontext(directory_tier(place, mode, shared))


def directory_tier(place: paths.Place, mode: WriteMode, shared: bool = False) -> Disk | PackedTier:
    """The tier over a directory, on a disk or in memory, where nothing is packed. Takes no lock.

    `mode`: as for `for_writing`. `shared` (default False): other processes write to it too.
    """
    if place.kind == "memory":
        return Disk(memory_place.files_of(place.root), place.root, shared=shared, place=place.url)
    files, direct = PosixFiles(), _supports_direct_io(place.root)
    return PackedTier(Disk(files, place.root, mode=mode, direct=direct, shared=shared))


def identity(path: str | os.PathLike[str]) -> list[str]:
    """What tells the directory of a run from those of the same name on other machines. Makes the directory.

    Raises Refused for an object store, NotARun, NotWritable, NoSpace, TierDown.
    """
    place = paths.parsed(path)
    root = place.root if place.kind == "memory" else directory(path)
    _require_no_other_files(place, _names_at(root, False) or set())
    try:
        _make(place)
        found = os.stat(root)
    except OSError as error:
        raise os_errors.at_path(error, root) from error
    return [machine(), str(found.st_dev), str(found.st_ino)]


def many_files(path: str | os.PathLike[str]) -> str:
    """The directory or URL of a run that is not in slots. Raises Refused, also for slots."""
    place = paths.parsed(path)
    if place.kind == "slots":
        raise Refused(
            f"path={path!r}: only a Checkpointer writes slots",
            safe="Nothing was touched.",
            todo=f"Give a directory, for example {place.root}",
        )
    return place.root


def directory(path: str | os.PathLike[str]) -> str:
    """The absolute directory of a run that is on a disk and not in slots. Raises Refused for any other place."""
    if paths.parsed(path).kind == "objects":
        raise Refused(
            f"path={path!r} is in an object store, and a directory is needed here",
            safe="Nothing was touched.",
            todo="Give a directory.",
        )
    return many_files(path)


def in_slots(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a run in slots. Raises NotARun or Refused, as `paths.parsed`."""
    return paths.parsed(path).kind == "slots"


def require_no_slots_of_one(path: str | os.PathLike[str]) -> None:
    """Raise NotARun if one process has its slots where several ranks are to have theirs."""
    root = paths.parsed(path).root
    if (_names_at(root, True) or set()) & {FOLDER, layout.HEADER}:
        raise NotARun(
            f"{root} holds the slots of a run of one process",
            safe="It is untouched.",
            todo=f"Continue it with one process, or copy it first: lastgood copy {paths.SLOTS}{root} DIRECTORY",
        )


def slots_of_rank(path: str | os.PathLike[str], rank: int) -> str:
    """Where one of several ranks has its slots: in a folder of its own below the path of the run."""
    return f"{paths.SLOTS}{paths.parsed(path).root}/{layout.rank_folder(rank)}"


def _objects(url: str) -> Objects:
    """The tier of a run in an object store. Raises NotInstalled without obstore, Refused for wrong settings."""
    with needed("objects", f"a run at {url}"):
        from ..storage.objects import Objects
    return Objects(object_store.opened(url, object_store.DEADLINES), url, object_store.DEADLINES)


def _require_no_other_files(place: paths.Place, names: set[str]) -> None:
    """Raise NotARun if a place that is no run yet holds other files, or lies among the files of a run."""
    if names & {layout.HEADER, *_GENERATIONS}:
        return
    paths.require_in_no_run(place, _RUN_NAMES)
    root = place.root
    foreign = [one for one in sorted(names - _RUN_NAMES) if not one.endswith(".tmp") and not one.startswith(".probe-")]
    if foreign:
        what = f"{root} holds other files ({', '.join(foreign[:3])}) and no {layout.HEADER}"
        todo = f"Give a new or empty directory, for example one inside it: {os.path.join(root, 'checkpoints')}"
        if layout.rank_folder(0) in foreign:
            what = f"{root} holds the slots of a job of several ranks ({', '.join(foreign[:3])})"
            todo = f"Start as many ranks again, or read those of one rank: {paths.SLOTS}{root}/{foreign[0]}"
        raise NotARun(what, safe="It is untouched.", todo=todo)


def _names_at(root: str, in_slots: bool) -> set[str] | None:
    """List the directory of a run. Returns None if nothing exists at `root`; raises NotARun if it cannot be a run."""
    try:
        os.lstat(root)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise os_errors.at_path(error, root) from error
    try:
        found = PosixFiles().list(root)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(root):
            raise NotARun(
                f"{root} is a link to {os.readlink(root)}, which is not a directory",
                safe="It is untouched.",
                todo="Make that directory, or give another path.",
            ) from None
        raise NotARun(
            f"{root} is a file, not the directory of a run", safe="It is untouched.", todo="Give another path."
        ) from None
    except OSError as error:
        raise os_errors.at_path(error, root) from error
    if in_slots != (FOLDER in found) and found.keys() & _GENERATIONS:
        kind, right = ("slots", f"{paths.SLOTS}{root}") if FOLDER in found else ("directories", root)
        raise NotARun(f"the run in {root} is stored in {kind}", safe="It is untouched.", todo=f"Open it as {right}")
    for name in ("incarnations", *_GENERATIONS):
        if found.get(name, None) is not None:
            raise NotARun(
                f"{os.path.join(root, name)} is not a directory of its own, but a link or a file",
                safe="It is untouched.",
                todo="Put the real directory there.",
            )
    return set(found)


def _locked(root: str) -> RunLocked:
    """The error for a run that is already open for writing. It names the process if the system reports it."""
    holder = lock_holder(os.path.join(root, LOCK))
    if holder == os.getpid():
        return RunLocked(
            f"{root} is open for writing in this process already",
            safe="Nothing was touched.",
            todo="close() the earlier Checkpointer, of a notebook cell that ran twice; if it is lost, end the process.",
        )
    return RunLocked(
        f"{root} is open for writing in {f'process {holder}' if holder else 'another process'}",
        safe="Nothing was touched.",
        todo="End that process, or give this run another path. The lock is released when its process ends.",
    )


def _locked_place(place: paths.Place, of_agent: bool) -> Lock:
    """Create the directory of a run and lock it; an agent that copies into it is asked to give way, and waited for.
    Raises RunLocked, NotWritable, NoSpace, TierDown, Refused."""
    path, begun = os.path.join(place.root, LOCK), time.monotonic()
    until, marked_until = begun + YIELD_SECONDS, begun + MARK_SECONDS
    try:
        if not of_agent:  # guard: agent-makes-no-place-anew
            _make(place)
        while True:
            try:
                lock = Lock(path, AGENTS_MARK if of_agent else b"")
            except BlockingIOError:
                now, marked = time.monotonic(), _held_by_agent(path)
                own = not marked and lock_holder(path) == os.getpid()
                if of_agent or own or now > (until if marked else marked_until):  # guard: agent-may-mark-late
                    raise _locked(place.root) from None
                if marked:
                    marked_until = now + MARK_SECONDS
                    with contextlib.suppress(FileNotFoundError), open(path + WANTED, "w"):
                        os.utime(path + WANTED)
                time.sleep(POLL_SECONDS)
            except FileNotFoundError:  # an agent has removed the memory since it was made
                if of_agent or time.monotonic() > until:
                    raise
                _make(place)
            else:
                if place.kind != "memory" or lock.is_at(path):
                    break
                lock.close()  # the memory was removed since the file was opened
        for left in () if of_agent else (LOCK + WANTED, memory_place.STAGED):  # guard: used-memory-is-not-staged
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(place.root, left))
        return lock
    except OSError as error:
        raise os_errors.at_path(error, place.root) from error


class Wanted:
    """Whether another process waits until an agent gives the run in the directory `root` free, or has moved it away.

    Who waits renews its request each POLL_SECONDS. It counts once renewed since this object was made: no clock is read.
    """

    def __init__(self, root: str) -> None:
        self._path = os.path.join(root, LOCK + WANTED)
        self._first = self._request()

    def __call__(self) -> bool:
        if not os.path.isdir(os.path.dirname(self._path)):
            return True
        request = self._request()
        return request is not None and request != self._first  # guard: request-counts-once-renewed

    def _request(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = os.stat(self._path)
            return found.st_ino, found.st_mtime_ns
        return None


def _held_by_agent(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(AGENTS_MARK)) == AGENTS_MARK
    except FileNotFoundError:
        return True  # it has removed the memory since
    except OSError:
        return False


def _make(place: paths.Place) -> None:
    """Create the directory of a run, on a disk or in memory. Raises OSError, and the errors of `memory_place.make`."""
    if place.kind == "memory":
        memory_place.make(place.root)
    else:
        _make_durably(place.root)


def _make_durably(root: str) -> None:
    """Create a directory and its missing parents, and sync the parents so that the names survive power loss."""
    parent = os.path.dirname(root)
    try:
        PosixFiles().make_dir(root)
    except FileExistsError:
        # The process that created it may have died before the name was durable. A parent that this user may not open
        # was created by another user, and is not synced.
        with contextlib.suppress(PermissionError):
            PosixFiles().sync_dir(parent)  # guard: existing-run-directory-synced
        return
    except FileNotFoundError:
        _make_durably(parent)
        with contextlib.suppress(FileExistsError):
            PosixFiles().make_dir(root)
    PosixFiles().sync_dir(parent)  # guard: new-run-directory-synced


def _supports_direct_io(root: str) -> bool:
    """Whether files in `root` can be opened for direct I/O."""
    with contextlib.suppress(OSError):  # the first write reports a full or failing disk, with the name of the file
        return takes_direct(root)
    return False
