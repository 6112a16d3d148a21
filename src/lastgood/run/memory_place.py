"""The folder of a run in the memory of this machine: its name, and the checks before it is used.

    /dev/shm/lastgood-UID/      mode 0700, of this user; LASTGOOD_MEMORY names another tmpfs than /dev/shm
        NAME-DIGEST/            one run: the last part of the path of its last place, and a digest

A tmpfs outlives the processes that write to it, and nothing of it reaches a disk.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping

import msgspec

from ..errors import LastgoodError, NotWritable, Refused
from ..format import layout
from ..io import checksum, memory_moves, os_errors
from ..io.files import PosixFiles
from ..io.machine import NODE, host, machine
from ..io.memory_files import MemoryFiles, still
from ..storage.directory import Disk
from . import agent_link, paths

VARIABLE = "LASTGOOD_MEMORY"
"""The environment variable that names the tmpfs; its default is /dev/shm."""
DEFAULT = "/dev/shm"
SPILL = ".spill"
"""The folder, in the directory of a run on a disk, for files that do not fit into memory."""
REMOVED = ".removed"
"""After the name of a folder of a run, of its spill folder or of a drill: it is being removed."""
STAGED = ".staged"
"""The file, in the folder of a run, that names what supervisors of nodes in reserve have put there (staged.py)."""
_IN_MEMORY = ("tmpfs", "ramfs")
_SAFE = "Nothing was touched."


def folder_of_user(environ: Mapping[str, str] = os.environ) -> str:
    """The folder that holds all runs of this user in the memory of this machine. It may not exist."""
    named = environ.get(VARIABLE) or DEFAULT
    if not os.path.isabs(named):
        raise Refused(
            f"{VARIABLE}={named} is no absolute path", safe=_SAFE, todo="Name the mount point of a tmpfs: /dev/shm."
        )
    return os.path.join(os.path.normpath(named), f"lastgood-{os.geteuid()}")


def url_of(last_place: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> str:
    """The URL of the memory of a run, as `folder_of`."""
    return f"{paths.MEMORY}{folder_of(last_place, environ)}"


def folder_of(last_place: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> str:
    """The folder of the memory of a run. `last_place`: the path or URL of its durable place.

    Raises as `paths.parsed`.
    """
    url = paths.identity(last_place)
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", url.rstrip("/").rpartition("/")[2])[:40]
    digest = checksum.digest("xxh3_128", f"{url}\0{machine(environ)}".encode())
    return f"{folder_of_user(environ)}/{name}-{digest[:12]}"


def folders() -> list[str]:
    """The folders of all runs of this user in the memory of this machine, and those that are being removed.

    Empty where the folder above is not of this user: another one may have made it, or a file, or a link to elsewhere.
    """
    above = folder_of_user()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = os.lstat(above)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():  # guard: folders-of-this-user-only
            return sorted(one.path for one in os.scandir(above) if one.is_dir(follow_symlinks=False))
    return []


def runs_near(place: paths.Place) -> str:
    """As `paths.runs_near`; but the memory of this machine comes first, if a run with this path was saved there."""
    with contextlib.suppress(LastgoodError):  # LASTGOOD_MEMORY may be no path
        folder = folder_of(place.root) if place.kind == "directory" else ""
        if folder and is_private(folder) and glob.glob(os.path.join(glob.escape(folder), "gen", "*", layout.COMMIT)):
            url = f"{paths.MEMORY}{folder}"
            lists = f"`lastgood ls {url}` lists them"
            return f"{url} has saves of a run with this path: {lists}, and a start with that tier goes on from them."
    return paths.runs_near(place.root)


def spill_folder(root: str, environ: Mapping[str, str] = os.environ) -> str:
    """The folder, in the directory `root` of a run on a disk, for files of this machine that do not fit into memory.

    It is named after the host, not after its start, so that what is left there is found and removed after a restart.
    If the folder of this name belongs to another user, who alone can read it, a name with the id of this one is used.
    """
    digest = checksum.digest("xxh3_128", (environ.get(NODE) or host()).encode())
    folder = os.path.join(root, SPILL, digest[:12])
    own = f"{folder}-{os.geteuid()}"
    with contextlib.suppress(OSError):
        if os.lstat(own).st_uid == os.geteuid():
            return own
    with contextlib.suppress(OSError):
        if os.lstat(folder).st_uid != os.geteuid():  # guard: spill-of-another-user-left-alone
            return own
    return folder


def set_aside(spill: str | None) -> None:
    """Rename the spill folder of a run whose memory is to be removed, so that no later opening writes to it.

    Called before the folder in memory is renamed, while no process has the run open. Nothing that takes long is done,
    because the run cannot be opened meanwhile: `remove_aside` is called then. Where the disk does not allow it, the
    folder stays: the next opening lists what lies there, and removes it. Raises nothing.
    """
    if spill is None:
        return
    with contextlib.suppress(OSError):
        PosixFiles().remove(spill + memory_moves.STAGED)  # of a process that was killed while it moved a file
    with contextlib.suppress(OSError):
        PosixFiles().rename(spill, f"{spill}.{secrets.token_hex(4)}{REMOVED}")  # guard: each-spill-leaves-by-its-name


def remove_aside(spill: str) -> None:
    """Remove what `set_aside` has renamed, also of an agent that was killed. Raises nothing."""
    parent, name = os.path.split(spill)
    with contextlib.suppress(OSError):
        for one in os.listdir(parent):
            if one.startswith(f"{name}.") and one.endswith(REMOVED):
                shutil.rmtree(os.path.join(parent, one), ignore_errors=True)


def make(root: str) -> None:
    """Make the folder of a run in memory, or check the existing one. Its parent must be of this user alone.

    Raises NotWritable if another user may have made its parent, and Refused if it is not in a tmpfs.
    """
    parent = os.path.dirname(root)
    above = os.path.dirname(parent)
    if os.path.exists(above) and not os.path.isdir(above):
        raise Refused(f"{above} is no folder", safe=_SAFE, todo=f"Name the mount point of a tmpfs in {VARIABLE}.")
    try:
        os.makedirs(above, exist_ok=True)
        _make(parent)
        found = os.lstat(parent)
        kind = file_system(parent)
    except OSError as error:
        raise os_errors.at_path(error, root) from error
    if not _is_private(found):  # guard: memory-of-another-user-refused
        raise NotWritable(
            f"{parent} belongs to user {found.st_uid} and has the mode {stat.S_IMODE(found.st_mode):o}: others could "
            "read or change the state",
            safe=_SAFE,
            todo=f"Name another tmpfs in {VARIABLE}. User {found.st_uid}, or root, can remove this folder.",
        )
    if kind not in _IN_MEMORY:  # guard: memory-is-a-tmpfs
        raise Refused(
            f"{parent} is on {kind or 'an unknown file system'}, which is not in memory",
            safe="Only an empty folder was made.",
            todo=f"Name the mount point of a tmpfs in {VARIABLE}, or use a directory as the tier.",
        )
    shutil.rmtree(root + REMOVED, ignore_errors=True)  # who removed it was killed
    try:
        _make(root)
    except OSError as error:
        raise os_errors.at_path(error, root) from error


def files_of(root: str, spill: str | None = None, copies: bool = False) -> MemoryFiles:
    """The files of the run in memory at `root`. `spill` (default None): as for `MemoryFiles`, if no earlier opening has
    chosen a folder in which there may be files. `copies` (default False): only copies are written, chunk by chunk.

    Who gives a `spill` has the run open for writing, or belongs to its job.
    """
    if spill is None:
        # Who only reads needs the folder before it exists: files may be moved there while he reads.
        spec = agent_link.read_spec(root)
        earlier = spec.spill if spec is not None else None  # guard: later-spill-is-read
        return MemoryFiles(root, earlier, buffered=not copies)
    return MemoryFiles(root, _chosen(root, spill), buffered=not copies)


def _chosen(root: str, spill: str) -> str:
    """The spill folder of a run: that of an earlier opening if there may be files in it, else `spill`.

    The agent and the ranks of this node learn it at once: no file moves to another one any more.
    """
    try:
        with still(root):
            spec = agent_link.read_spec(root)
            earlier = spec.spill if spec is not None else None
            if earlier and os.path.isdir(earlier):  # guard: earlier-spill-is-used
                return earlier
            if spec is not None and earlier != spill:
                new = msgspec.structs.replace(spec, spill=spill)
                agent_link.write_spec(Disk(MemoryFiles(root), root), new)  # guard: spill-noted-when-chosen
            return spill
    except FileNotFoundError:  # the memory was removed, and with it what lay in an earlier folder
        return spill
    except LastgoodError:  # it has no room for a record, so that the agent keeps to the earlier folder
        return earlier or spill


def is_spill_of(root: str, spill: str | None) -> bool:
    """Whether the spill folder of the run in memory at `root` is still `spill`, as far as that is noted."""
    spec = agent_link.read_spec(root)
    return spec is None or spec.spill in (None, spill)


def is_private(root: str) -> bool:
    """Whether the folder above that of a run is of this user alone: what lies there was written by this user."""
    try:
        return _is_private(os.lstat(os.path.dirname(root)))
    except OSError:
        return False


def file_system(path: str) -> str:
    """The type of the file system of `path`, such as "tmpfs". Empty where the system does not list its mounts."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as file:
            for line in file:  # 36 35 0:27 / /dev/shm rw,nosuid - tmpfs tmpfs rw
                mount, _, of_system = line.partition(" - ")
                if mount.split()[2] == wanted:
                    return of_system.split()[0]
    except (OSError, IndexError):
        pass
    return ""


def in_memory(path: str) -> bool:
    """Whether what lies in this folder is in the memory of the machine, as in a tmpfs."""
    return file_system(path) in _IN_MEMORY


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _make(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
