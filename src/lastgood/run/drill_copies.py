"""The copies that a drill has made on other nodes, through their agents (agent/drill_files.py), and how it reads them.

Each node makes its copies itself, from the files that it holds: only requests cross the network.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec

from ..errors import LastgoodError
from ..limits import CHUNK_BYTES, DRILL_KEEP_SECONDS
from ..ports import Tier
from ..records import Extent
from ..wire.security import Security
from .peers import CALL_SECONDS, FileCall, PeerNode, Peers

RECORDS_BYTES = 1 << 20
"""The room that is reckoned for records and for the ends of pages on each node."""


class CopyPeers(Peers):
    """As `Peers`, with the copies of this drill in place of the files themselves. `real`: the files themselves."""

    def __init__(self, job: str, security: Security, name: str, real: Peers) -> None:
        super().__init__(job, security, name)
        self._folder, self._real = f"drill-{secrets.token_hex(4)}", real
        self._with_copies = dict[str, tuple[PeerNode, str]]()
        """name of a node -> the node, and the folder of the generation of which it makes copies"""

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """In the block a thread calls `keep` now and then. A bug in it is raised at the end."""
        ended = threading.Event()
        with ThreadPoolExecutor(1, "lastgood-drill-keep") as keeper:
            job = keeper.submit(self._keep_until, ended)
            try:
                yield
            finally:
                ended.set()
        job.result()

    def keep(self) -> None:
        """Make a call to each node with copies, so that it keeps them. Raises nothing."""
        for node, folder in [*self._with_copies.values()]:
            with contextlib.suppress(LastgoodError):  # who reads there sees it too
                self.list(node, folder)

    def _keep_until(self, ended: threading.Event) -> None:
        while not ended.wait(DRILL_KEEP_SECONDS):
            self.keep()

    def make(self, node: PeerNode, folder: str, files: Mapping[str, int], flipped: Extent | None = None) -> None:
        """Have a node copy these files of the folder of a generation, in this order, in place of earlier copies.

        `files`: name -> length. `flipped`: a bit of this byte differs in the copy. Raises NoSpace and Refused where the
        node makes none, and what `port.Wire` raises.
        """
        room = sum(files.values()) + RECORDS_BYTES
        self._call(node, FileCall(call="open", name=folder, length=room))
        self._with_copies[node.name] = node, folder
        for name, length in files.items():
            file = FileCall(call="create", name=f"{folder}/{name}", sending=secrets.token_hex(8), length=length)
            self._call(node, file)
            for start in range(0, length, CHUNK_BYTES):
                part = msgspec.structs.replace(file, offset=start, length=min(CHUNK_BYTES, length - start))
                at = -1 if flipped is None or flipped.blob != file.name else flipped.offset - start
                if 0 <= at < part.length:
                    self._write_flipped(node, part, at)
                else:
                    self._call(node, msgspec.structs.replace(part, call="copy"))
            self._call(node, msgspec.structs.replace(file, call="finish", length=0))

    def remove(self, node: PeerNode, timeout_seconds: float = CALL_SECONDS) -> None:
        """Remove the copies on a node. Raises what `port.Wire` raises; TimedOut after `timeout_seconds`."""
        self._with_copies.pop(node.name, None)
        self._call(node, FileCall(call="remove", name=""), timeout_seconds=timeout_seconds)

    def _write_flipped(self, node: PeerNode, part: FileCall, at: int) -> None:
        """Write a part of a file with another bit in the byte `at` of it."""
        data = memoryview(bytearray(part.length))
        self._real.read(node, Extent(blob=part.name, offset=part.offset, length=part.length), data)
        data[at] ^= 1
        self._call(node, msgspec.structs.replace(part, call="write"), [data])

    def _encoded(self, call: FileCall) -> bytes:
        return super()._encoded(msgspec.structs.replace(call, name=f"{self._folder}/{call.name}"))


class Counted:
    """The part of `ports.Tier` that a restore reads: `tier`, with a count of the bytes of files that came from it.

    `place`: its name. `before`: called before each reading of a file.
    """

    newest_only = False

    def __init__(self, tier: Tier, place: str, before: Callable[[Extent], None] = lambda extent: None) -> None:
        self._tier, self._before, self._read = tier, before, list[int]()
        self.place, self.reads_at_once = place, tier.reads_at_once

    @property
    def bytes(self) -> int:
        """The bytes that came from it. Those of records do not count."""
        return sum(self._read)

    def list(self, folder: str) -> Mapping[str, int | None]:
        return self._tier.list(folder)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        if extent.blob.endswith(".json"):
            self._tier.read_into(extent, mv, fresh=fresh)
            return
        self._before(extent)
        self._tier.read_into(extent, mv, fresh=fresh)
        self._read.append(extent.length)

    @property
    def tier(self) -> Tier:
        """As what a restore takes."""
        return cast(Tier, self)
