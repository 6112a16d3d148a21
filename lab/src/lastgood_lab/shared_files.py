"""A file system in memory that several processes of a schedule use: the memory of a node, or the directory of a run.

It implements `ports.Files`. Each call is a point of the schedule, and what it changes is one step. Nothing is lost but
with the machine: power loss is the subject of the crash model (hostile.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any

Folders = dict[str, dict[str, "Content | None"]]


class Content:
    """The bytes of a file, under one or several names."""

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _taken(path: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


Changed = Callable[["SharedFiles", str, str, "Content | None"], Callable[[], None] | None]


class SharedFiles:
    """`world` has the present scheduler. `changed`: called with the call, the path and, for a link or a rename, the
    content, before each change of a file below `gen` and of a whole folder; what it returns is called after the change.
    """

    def __init__(self, world: Any, changed: Changed, folders: Folders) -> None:
        self._world, self._changed = world, changed
        self.folders = folders

    def copied(self) -> Folders:
        """The same names, for another schedule. Contents are shared: no file is changed once it is complete."""
        return {path: dict(names) for path, names in self.folders.items()}

    # ---- `ports.Files` -------------------------------------------------------------------------------------

    def open(self, path: str, mode: str, *, direct: bool = False, fresh: bool = False) -> OpenContent:
        folder, _, name = path.rpartition("/")
        if mode != "new":
            self._world.scheduler.point()
            content = self._names(folder, path).get(name)
            if content is None:
                raise _missing(path)
            return OpenContent(self, path, content)
        self._step("create", path)
        names = self._names(folder, path)
        if name in names:
            raise _taken(path)
        content = names[name] = Content()
        return OpenContent(self, path, content)

    def list(self, path: str) -> Mapping[str, int | None]:
        self._world.scheduler.point()
        names = self._names(path, path)
        return {name: None if one is None else len(one.data) for name, one in names.items()}

    def make_dir(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        if path in self.folders:  # the most frequent outcome: no step of its own
            raise _taken(path)
        self._step("make_dir", path)
        names = self._names(folder, path)
        if name in names:
            raise _taken(path)
        names[name] = None
        self.folders[path] = {}

    def link(self, old: str, new: str) -> None:
        content = self._content(old)
        after = self._step("link", new, content)
        folder, _, name = new.rpartition("/")
        names = self._names(folder, new)
        if name in names:
            raise _taken(new)
        names[name] = content
        if after is not None:
            after()

    def rename(self, old: str, new: str) -> None:
        before, _, name = old.rpartition("/")
        content = None if old in self.folders else self._content(old)
        after = self._step(*(("move_tree", old) if content is None else ("rename", new)), content)
        if name not in self._names(before, old):
            raise _missing(old)
        if content is None:
            for path in [one for one in self.folders if one == old or one.startswith(f"{old}/")]:
                self.folders[new + path[len(old) :]] = self.folders.pop(path)
        names = self._names(new.rpartition("/")[0], new)
        del self._names(before, old)[name]
        names[new.rpartition("/")[2]] = content
        if after is not None:
            after()

    def symlink(self, target: str, path: str) -> None:
        folder, _, name = path.rpartition("/")
        names = self._names(folder, path)
        if name in names:
            raise _taken(path)
        names[name] = Content(target.encode())

    def remove(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        if name not in self._names(folder, path):
            self._world.scheduler.point()
            raise _missing(path)
        after = self._step("remove", path)
        names = self._names(folder, path)
        if name not in names:
            raise _missing(path)
        if names[name] is None:
            if self.folders[path]:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            del self.folders[path]
        del names[name]
        if after is not None:
            after()

    def sync_dir(self, path: str) -> None:
        if path not in self.folders:
            raise _missing(path)

    # ---- beside it -----------------------------------------------------------------------------------------

    def remove_tree(self, path: str) -> None:
        """Remove a folder with all that it holds, in one step."""
        self._step("remove_tree", path)
        for one in [one for one in self.folders if one == path or one.startswith(f"{path}/")]:
            del self.folders[one]
        folder, _, name = path.rpartition("/")
        self.folders.get(folder, {}).pop(name, None)

    def names_in(self, path: str) -> Mapping[str, Content | None]:
        """What a folder holds now, without a point of the schedule. Empty if there is none."""
        return self.folders.get(path, {})

    def step(self, call: str, path: str) -> None:
        self._step(call, path)

    # ---- steps ---------------------------------------------------------------------------------------------

    def _step(self, call: str, path: str, content: Content | None = None) -> Callable[[], None] | None:
        scheduler = self._world.scheduler
        scheduler.point()
        staged = path[-4:] == ".tmp"
        scheduler.note(call, path.rpartition("/")[2].partition(".")[0] if staged else path)
        if ("/gen/" in path and not staged) or call == "move_tree":
            return self._changed(self, call, path, content)
        return None

    def _names(self, folder: str, path: str) -> dict[str, Content | None]:
        names = self.folders.get(folder)
        if names is None:
            raise _missing(path)
        return names

    def _content(self, path: str) -> Content:
        folder, _, name = path.rpartition("/")
        content = self._names(folder, path).get(name)
        if content is None:
            raise _missing(path)
        return content


class OpenContent:
    """`ports.File` of a file in memory."""

    def __init__(self, files: SharedFiles, path: str, content: Content) -> None:
        self._files, self._path, self._content = files, path, content

    def size(self) -> int:
        return len(self._content.data)

    def read_into(self, mv: memoryview, offset: int) -> int:
        part = self._content.data[offset : offset + len(mv)]
        mv[: len(part)] = part
        return len(part)

    def write_at(self, mv: memoryview, offset: int) -> int:
        self._files.step("write", self._path)
        data = self._content.data
        if len(data) < offset + len(mv):
            data.extend(bytes(offset + len(mv) - len(data)))
        data[offset : offset + len(mv)] = mv
        return len(mv)

    def reserve(self, length: int) -> None:
        if len(self._content.data) < length:
            self._content.data.extend(bytes(length - len(self._content.data)))

    def resize(self, length: int) -> None:
        del self._content.data[length:]

    def sync(self) -> None:
        """Nothing is to be done: nothing is lost but with the machine."""

    def close(self) -> None:
        """Nothing is to be done."""
