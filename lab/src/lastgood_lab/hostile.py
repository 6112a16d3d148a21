"""A disk in memory that guarantees to keep only synced data. It does not depend on the format of checkpoints.

A power loss affects everything that was not synced, each part independently of the others:

- A written sector of 512 bytes holds the new bytes, the old ones, zeros, noise, or the new bytes with one bit flipped.
- The length of a file is the new one, the old one, or one between them.
- A name in a directory refers to any of the files (or to none) to which it referred since the last sync of the
  directory. The target of a rename is the old or the new file, and never missing.

`File.sync` makes content and length durable, but no name; `sync_dir` makes names durable, but no content. A kill loses
nothing and syncs nothing. A crash state is another such disk, on which recovery can run and crash again.
"""

from __future__ import annotations

import errno
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from lastgood.io.files import round_up
from lastgood.limits import DIRECT_IO_BYTES
from lastgood.ports import OpenMode

ROOT = "/run"
SECTOR_BYTES = 512
NOISE = random.Random(512).randbytes(SECTOR_BYTES)
STAGED = re.compile(r"\.\d+-\d+\.tmp$")  # states whose names differ only in process and thread ids count as the same

Pick = Callable[[str, int], int]
"""("names" or "data", number of choices) -> the choice: 0 is what readers see now, the last one what was synced."""


class Inode:
    """The content of a file: `data` is what readers see, and `medium` what was synced last."""

    def __init__(self, data: bytes = b"") -> None:
        self.data: bytearray | bytes = data
        self.medium = data
        self.dirty: set[int] = set()
        self.lengths = [len(data)]
        self.sync_failed = False
        self._settled: Inode | None = None
        self._sum: int | None = None

    @property
    def clean(self) -> bool:
        return not self.dirty and len(self.lengths) == 1

    def touched(self, start: int, end: int) -> None:
        self.dirty.update(range(start // SECTOR_BYTES, -(-end // SECTOR_BYTES)))
        if len(self.data) != self.lengths[-1]:
            self.lengths.append(len(self.data))
        self._settled = self._sum = None

    def synced(self, medium: bytes) -> None:
        self.medium, self.dirty, self.lengths = medium, set(), [len(medium)]
        self._settled = self._sum = None

    def digest(self) -> int:
        if self._sum is None:
            self._sum = xxhash.xxh3_64_intdigest(self.data)
        return self._sum

    def crashed(self, pick: Pick, seen: dict[int, Any]) -> Inode:
        if self.clean:
            self._settled = self._settled or Inode(self.medium)
            return self._settled
        if id(self) not in seen:
            between = sorted({*self.lengths, sum(self.lengths) // len(self.lengths)} - {len(self.medium)})
            lengths = list(dict.fromkeys([len(self.data), *between, len(self.medium)]))
            out = bytearray(lengths[pick("data", len(lengths))])
            out[: len(self.medium)] = self.medium[: len(out)]
            for sector in sorted(self.dirty):
                place = slice(sector * SECTOR_BYTES, min((sector + 1) * SECTOR_BYTES, len(out)))
                if place.start < len(out) and (way := pick("data", 5)) < 4:
                    out[place] = _spoiled(bytes(self.data[place]).ljust(place.stop - place.start, b"\0"), way)
            seen[id(self)] = Inode(bytes(out))
        return seen[id(self)]

    def copied(self, seen: dict[int, Any]) -> Inode:
        if id(self) not in seen:
            seen[id(self)] = other = Inode(bytes(self.data))
            other.medium, other.dirty, other.lengths = self.medium, set(self.dirty), list(self.lengths)
        return seen[id(self)]


def _spoiled(new: bytes, way: int) -> bytes:
    if way == 3:
        middle = len(new) // 2
        return new[:middle] + bytes([new[middle] ^ 1]) + new[middle + 1 :]
    return (new, bytes(len(new)), NOISE[: len(new)])[way]


class Link(str):
    """A symbolic link."""

    def digest(self) -> int:
        return xxhash.xxh3_64_intdigest(self.encode())

    def crashed(self, pick: Pick, seen: dict[int, Any]) -> Link:
        return self

    def copied(self, seen: dict[int, Any]) -> Link:
        return self


class Folder:
    """A directory.

    `names` are those that readers see. `was` holds every name that changed since the last sync, with all nodes (None:
    no node) that it referred to since then.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.was: dict[str, list[Any]] = {}

    def put(self, name: str, node: Any) -> None:
        self.was.setdefault(name, [self.names.get(name)]).append(node)
        if node is None:
            del self.names[name]
        else:
            self.names[name] = node

    def writable(self, name: str) -> Inode:
        """Return the file of this name for writing. The first time it is copied, because crash states share files."""
        old = self.names[name]
        if isinstance(old.data, bytearray):
            return old
        self.names[name] = new = old.copied({})
        new.data, new.sync_failed = bytearray(new.data), old.sync_failed
        if name in self.was:
            self.was[name] = [new if one is old else one for one in self.was[name]]
        return new

    def digest(self) -> int:
        named = ((STAGED.sub(".tmp", name), node.digest()) for name, node in self.names.items())
        text = "".join(f"{name}\0{digest:x}\0" for name, digest in sorted(named))
        return xxhash.xxh3_64_intdigest(f"{text}/".encode())

    def crashed(self, pick: Pick, seen: dict[int, Any]) -> Folder:
        out = Folder()
        for name in dict.fromkeys([*self.names, *self.was]):
            node = self.names.get(name)
            if name in self.was:
                oldest = self.was[name][0]
                between = {id(one): one for one in self.was[name][::-1] if one is not node and one is not oldest}
                ways = [node, *between.values(), oldest]
                node = ways[pick("names", len(ways))]
            if node is not None:
                out.names[name] = node.crashed(pick, seen)
        return out

    def copied(self, seen: dict[int, Any]) -> Folder:
        if id(self) not in seen:
            out = seen[id(self)] = Folder()
            out.names = {name: node.copied(seen) for name, node in self.names.items()}
            out.was = {name: [one and one.copied(seen) for one in nodes] for name, nodes in self.was.items()}
        return seen[id(self)]


@dataclass
class Fault:
    """An error for call number `at` (0: the next one) and, if `sticky`, for all later ones.

    If `applied`, the call takes effect although it fails. A link that failed with EIO may still exist after a power
    loss.
    """

    at: int
    code: int
    sticky: bool = False
    applied: bool = False
    fired: bool = False


class HostileDisk:
    """An implementation of `ports.Files` below `path`. `watch(call, path)` is called before each changing call."""

    def __init__(
        self, root: Folder | None = None, *, links: bool = True, most_bytes: int = 1 << 30, path: str = ROOT
    ) -> None:
        self.root, self.path = root or Folder(), path
        self.links, self.most_bytes = links, most_bytes  # one read or write transfers at most `most_bytes`
        self.watch: Callable[[str, str], None] = lambda call, path: None
        self.fault: Fault | None = None

    # ---- crash states -------------------------------------------------------------------------------

    def digest(self) -> int:
        return self.root.digest()

    def copied(self) -> HostileDisk:
        """Return the disk after a kill: every change is visible, and nothing more is synced."""
        return self.holding(self.root.copied({}))

    def crashed(self, pick: Pick) -> HostileDisk:
        return self.holding(self.root.crashed(pick, {}))

    def holding(self, root: Folder) -> HostileDisk:
        """Return a disk of the same kind at the same path with other content."""
        return HostileDisk(root, links=self.links, most_bytes=self.most_bytes, path=self.path)

    def crashes(self, rng: random.Random, most: int) -> Iterator[HostileDisk]:
        """Yield states that a power loss may leave now: all if there are at most `most`, else about `most` of them."""
        ways: list[int] = []

        def now(_: str, count: int) -> int:
            ways.append(count)
            return 0

        yield self.crashed(now)
        path: list[list[int]] = []
        for _ in range(most if math.prod(ways) <= most else 0):
            steps = itertools.count()

            def pick(_: str, count: int, steps: Iterator[int] = steps) -> int:
                at = next(steps)
                if at == len(path):
                    path.append([0, count])
                return path[at][0]

            yield self.crashed(pick)
            while path and path[-1][0] + 1 == path[-1][1]:
                path.pop()
            if not path:
                return
            path[-1][0] += 1
        for _ in range(most):
            yield self.crashed(_sampler(rng))

    def rot(self, path: str, offset: int) -> None:
        """Flip a bit of the byte at `offset` on the medium; readers of the page cache see it after a crash."""
        node = self._find(path)
        medium = bytearray(node.data)  # unsynced bytes are assumed to be written back
        medium[offset] ^= 1
        node.synced(bytes(medium))

    # ---- ports.Files ---------------------------------------------------------------------------------------

    def open(self, path: str, mode: OpenMode, *, direct: bool = False, fresh: bool = False) -> HostileFile:
        late = self._enter("open", path) if mode == "new" else self._enter("read", path)
        folder, name = self._split(path)
        node = folder.names.get(name)
        if mode == "new":
            if node is not None:
                raise OSError(errno.EEXIST, "the name exists", path)
            node = Inode()
            node.data = bytearray()
            folder.put(name, node)
        elif not isinstance(node, Inode):
            code = errno.ENOENT if node is None else errno.ELOOP if isinstance(node, Link) else errno.EISDIR
            raise OSError(code, "not a file", path)
        elif mode == "write":
            node = folder.writable(name)
        if late:
            raise late
        return HostileFile(self, node, path, direct, fresh)

    def list(self, path: str) -> dict[str, int | None]:
        self._enter("read", path)
        kinds: dict[type, Callable[[Any], int | None]] = {
            Inode: lambda node: len(node.data),
            Folder: lambda node: None,
            Link: lambda node: -1,
        }
        return {name: kinds[type(node)](node) for name, node in self._folder(path).names.items()}

    def make_dir(self, path: str) -> None:
        self._change("make_dir", path, Folder())

    def link(self, old: str, new: str) -> None:
        self._need_links(new)
        node = self._find(old)
        try:
            self._change("link", new, node)
        except OSError as error:
            folder, name = self._split(new)
            if error.errno == errno.EIO and name not in folder.names:
                folder.was.setdefault(name, [None]).append(node)  # it may or may not exist after a power loss
            raise

    def symlink(self, target: str, path: str) -> None:
        self._need_links(path)
        self._change("symlink", path, Link(target))

    def rename(self, old: str, new: str) -> None:
        late = self._enter("rename", new)
        node = self._find(old)
        (source, old_name), (target, new_name) = self._split(old), self._split(new)
        target.put(new_name, node)
        source.put(old_name, None)
        if late:
            raise late

    def remove(self, path: str) -> None:
        late = self._enter("remove", path)
        folder, name = self._split(path)
        node = self._find(path)
        if isinstance(node, Folder) and node.names:
            raise OSError(errno.ENOTEMPTY, "not empty", path)
        folder.put(name, None)
        if late:
            raise late

    def sync_dir(self, path: str) -> None:
        late = self._enter("sync_dir", path)
        self._folder(path).was.clear()
        if late:
            raise late

    # ---- steps ---------------------------------------------------------------------------------------------

    def _enter(self, call: str, path: str) -> OSError | None:
        """Report a call to `watch` and apply the fault.

        Raises if the call fails without effect; returns the error of a call that fails although it takes effect.
        """
        if call != "read":
            self.watch(call, path)
        fault = self.fault
        if fault is None or fault.at > 0 or (fault.fired and not fault.sticky):
            if fault is not None:
                fault.at -= 1
            return None
        fault.fired = True
        error = OSError(fault.code, "injected", path)
        if fault.applied and call != "read":
            return error
        raise error

    def _change(self, call: str, path: str, node: Any) -> None:
        late = self._enter(call, path)
        folder, name = self._split(path)
        if name in folder.names:
            raise OSError(errno.EEXIST, "the name exists", path)
        folder.put(name, node)
        if late:
            raise late

    def _need_links(self, path: str) -> None:
        if not self.links:
            raise OSError(errno.EPERM, "this file system has no links", path)

    def _find(self, path: str) -> Any:
        node: Any = self.root
        for part in path.removeprefix(self.path).split("/")[1:]:
            if not isinstance(node, Folder) or part not in node.names:
                raise OSError(errno.ENOENT, "no such name", path)
            node = node.names[part]
        return node

    def _folder(self, path: str) -> Folder:
        node = self._find(path)
        if not isinstance(node, Folder):
            raise OSError(errno.ENOTDIR, "not a directory", path)
        return node

    def _split(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        return self._folder(above), name


class HostileFile:
    """An open file of a `HostileDisk`; implements `ports.File`."""

    def __init__(self, disk: HostileDisk, node: Inode, path: str, direct: bool, fresh: bool) -> None:
        self._disk, self._node, self._path, self._direct = disk, node, path, direct
        self._medium = fresh and node.clean  # unsynced bytes are written back before a fresh read

    def size(self) -> int:
        return len(self._node.data)

    def read_into(self, mv: memoryview, offset: int) -> int:
        self._disk._enter("read", self._path)
        self._need_aligned(len(mv), offset)
        data = self._node.medium if self._medium else self._node.data
        part = data[offset : offset + min(len(mv), self._disk.most_bytes)]
        mv[: len(part)] = part
        return len(part)

    def write_at(self, mv: memoryview, offset: int) -> int:
        late = self._disk._enter("write", self._path)
        self._need_aligned(len(mv), offset)
        count = min(len(mv), self._disk.most_bytes)
        self._grow(offset + count)
        self._node.data[offset : offset + count] = mv[:count]  # type: ignore[index]
        self._node.touched(offset, offset + count)
        if late:
            raise late
        return count

    def reserve(self, length: int) -> None:
        late = self._disk._enter("reserve", self._path)
        self._grow(length)
        if late:
            raise late

    def resize(self, length: int) -> None:
        late = self._disk._enter("resize", self._path)
        self._grow(length)
        del self._node.data[length:]  # type: ignore[union-attr]
        self._node.touched(0, 0)
        if late:
            raise late

    def sync(self) -> None:
        if self._node.sync_failed:
            raise OSError(errno.EIO, "an earlier sync of this file failed", self._path)
        try:
            late = self._disk._enter("sync", self._path)
        except OSError:
            self._node.sync_failed = True
            raise
        self._node.synced(bytes(self._node.data))
        if late:
            raise late

    def close(self) -> None:
        pass

    def _grow(self, length: int) -> None:
        if (more := length - len(self._node.data)) > 0:
            self._node.data.extend(bytes(more))  # type: ignore[union-attr]
        self._node.touched(0, 0)

    def _need_aligned(self, length: int, offset: int) -> None:
        if self._direct and (offset % DIRECT_IO_BYTES or length != round_up(length)):
            raise OSError(errno.EINVAL, "not aligned", self._path)


def _sampler(rng: random.Random) -> Pick:
    """Return a `Pick` that draws, with random shares of names and of data that are new or keep their synced value."""
    styles = {
        kind: rng.choice([(1, 0), (0, 1), (0.5, 0.5), (0, 0), (0.9, 0.05), (0.05, 0.9)]) for kind in ("names", "data")
    }

    def pick(kind: str, ways: int) -> int:
        now, old = styles[kind]
        where = rng.random()
        return 0 if where < now else ways - 1 if where < now + old else rng.randrange(ways)

    return pick
