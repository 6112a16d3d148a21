"""Opening a place for a run: is it ours, may we, is somebody else at it. Touches nothing before that is known."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Literal

from ..errors import LastgoodError, NoSpace, NotARun, NotWritable, Refused, RunLocked, TierDown
from ..format import layout
from ..io.files import Lock, PosixFiles, lock_holder, takes_direct
from ..io.mapped import MappedFiles
from ..ports import Files, Tier
from ..storage.directory import Disk, WriteMode
from ..storage.slots import HOME, Slots
from . import paths

LOCK = ".lock"
_GENERATIONS = {"gen", HOME}
_OURS = {layout.HEADER, layout.POINTER, layout.OLD_POINTER, layout.LINK, LOCK, "incarnations", *_GENERATIONS}

Persist = Literal["direct", "mmap"]
"""how the slots are written: by direct I/O, where the file system takes it, or through a shared mapping"""


def for_reading(path: str | os.PathLike[str]) -> Tier:
    """The tier of an existing run. Raises NotARun, NotWritable (also for what may not be read), TierDown."""
    root, in_slots = paths.parsed(path)
    names = _look(root, in_slots)
    if names is None:
        raise NotARun(f"there is nothing at {root}", todo="Check the path.")
    if not names & {layout.HEADER, *_GENERATIONS}:
        raise NotARun(f"{root} is not a run of lastgood: it has no {layout.HEADER}", safe="It is untouched.")
    files = PosixFiles()  # not direct: to find out would take a write
    return slots(files, root) if in_slots else Disk(files, root)


def slots(files: Files, root: str, *, in_flight: int = 1, direct: bool = False) -> Slots:
    """A tier over slots, told the names that mean something."""
    return Slots(
        files,
        root,
        commit=layout.COMMIT,
        verified=layout.VERIFIED,
        bad=(layout.DAMAGED, layout.UNFIT),
        in_flight=in_flight,
        direct=direct,
    )


@contextlib.contextmanager
def for_writing(
    path: str | os.PathLike[str], mode: WriteMode, *, in_flight: int = 1, persist: Persist = "direct"
) -> Iterator[Tier]:
    """The tier of a run, made if need be, locked until the end. `in_flight` and `persist` are for slots.

    Raises NotARun, NotWritable, RunLocked, NoSpace, TierDown; Refused for a mode that the place does not know.
    """
    root, in_slots = paths.parsed(path)
    if mode != "atomic_dirsync" and in_slots:
        raise Refused(f"write_mode={mode!r} is for directories; slots are always synced", safe="Nothing was touched.")
    if persist != "direct" and not in_slots:
        raise Refused(f"persist={persist!r} is for slots", todo=f"Open the run as {paths.SLOTS}{root}")
    names = _look(root, in_slots)
    if names is not None:
        foreign = sorted(name for name in names - _OURS if not name.endswith(".tmp") and not name.startswith(".probe-"))
        if foreign and not names & {layout.HEADER, *_GENERATIONS}:
            raise NotARun(
                f"{root} holds other files ({', '.join(foreign[:3])}) and no {layout.HEADER}",
                safe="It is untouched.",
                todo=f"Give a new or empty directory, for example one inside it: {os.path.join(root, 'checkpoints')}",
            )
    try:
        _make(root)
        lock = Lock(os.path.join(root, LOCK))
    except BlockingIOError as error:
        raise _locked(root) from error
    except OSError as error:
        raise _refused(root, error) from error
    try:
        if not in_slots:
            yield Disk(PosixFiles(), root, mode=mode, direct=_direct(root))
            return
        files = MappedFiles(root) if persist == "mmap" else PosixFiles()
        tier = slots(files, root, in_flight=in_flight, direct=_direct(root))
        try:
            yield tier
        except BaseException:
            with contextlib.suppress(LastgoodError):  # what ended it is what must be told
                tier.close()
            raise
        tier.close()
    finally:
        lock.close()


@contextlib.contextmanager
def for_sharing(path: str | os.PathLike[str], mode: WriteMode) -> Iterator[Tier]:
    """The tier of a run that another process of the same job has open for writing. Raises NotARun, NotWritable."""
    root, _ = paths.parsed(path)
    if _look(root, False) is None:
        raise NotARun(
            f"there is nothing at {root} here, though rank 0 has opened it",
            safe="Nothing was touched.",
            todo="All ranks must see the same directory: mount it on every node.",
        )
    yield Disk(PosixFiles(), root, mode=mode, direct=_direct(root), shared=True)


def directory(path: str | os.PathLike[str]) -> str:
    """The directory of a run that does not live in slots, in full. Raises Refused, also for slots."""
    root, slots = paths.parsed(path)
    if slots:
        raise Refused(f"path={path!r}: slots are for a Checkpointer", safe="Nothing was touched.", todo=f"Give {root}")
    return root


def in_slots(path: str | os.PathLike[str]) -> bool:
    """Whether a path means a run that lives in slots."""
    return paths.parsed(path)[1]


def _look(root: str, in_slots: bool) -> set[str] | None:
    """The names at a place that may be a run; None where there is nothing."""
    try:
        os.lstat(root)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _refused(root, error) from error
    try:
        found = PosixFiles().list(root)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(root):
            raise NotARun(
                f"{root} is a link to {os.readlink(root)}, which is not a directory",
                safe="It is untouched.",
                todo="Make that directory, or give another path.",
            ) from None
        raise NotARun(f"{root} is a file, not the directory of a run", safe="It is untouched.") from None
    except OSError as error:
        raise _refused(root, error) from error
    if in_slots != (HOME in found) and found.keys() & _GENERATIONS:
        kind, right = ("slots", f"{paths.SLOTS}{root}") if HOME in found else ("directories", root)
        raise NotARun(f"the run in {root} lives in {kind}", safe="It is untouched.", todo=f"Open it as {right}")
    for name in ("incarnations", *_GENERATIONS):
        if found.get(name, None) is not None:
            raise NotARun(f"{os.path.join(root, name)} is not a directory of its own", todo="Put the real one there.")
    return set(found)


def _locked(root: str) -> RunLocked:
    """Who holds the lock, as far as the system says."""
    holder = lock_holder(os.path.join(root, LOCK))
    if holder == os.getpid():
        return RunLocked(
            f"{root} is open for writing in this process already",
            safe="Nothing was touched.",
            todo="close() the earlier Checkpointer first: a notebook cell that is run twice opens the run twice.",
        )
    which = f"process {holder}" if holder else "another process"
    return RunLocked(
        f"{root} is open for writing in {which}",
        safe="Nothing was touched.",
        todo="End that process, or give this run another path. The lock goes with its process.",
    )


def _make(root: str) -> None:
    """Make a directory and every missing one above it, durably."""
    above = os.path.dirname(root)
    try:
        PosixFiles().make_dir(root)
    except FileExistsError:
        # Whoever made it may have died before its name was durable; a folder that we may not open is not of our making.
        with contextlib.suppress(PermissionError):
            PosixFiles().sync_dir(above)  # guard: existing-run-directory-synced
        return
    except FileNotFoundError:
        _make(above)
        with contextlib.suppress(FileExistsError):
            PosixFiles().make_dir(root)
    PosixFiles().sync_dir(above)  # guard: new-run-directory-synced


def _direct(root: str) -> bool:
    try:
        return takes_direct(root)
    except OSError:
        return False  # a disk that is full or failing says so at the first write, by name


def _refused(root: str, error: OSError) -> LastgoodError:
    what = f"{root}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"no space left for {what}", safe="Nothing was touched.", todo="Free space on this disk.")
    if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN):
        return TierDown(f"the disk failed: {what}", safe="Nothing was touched.")
    return NotWritable(
        what,
        safe="Nothing was touched.",
        todo="Check the owner, the rights and the mount; to read only, use lastgood.open or lastgood.load.",
    )
