"""A tier of which files of ranks are read from another node: they are written to its memory, and read over the wire."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from lastgood.agent.peer_files import PeerFiles
from lastgood.io.memory_files import MemoryFiles
from lastgood.records import Extent
from lastgood.run.peers import RANK_FILE, PeerDisk, PeerNode, Peers
from lastgood.storage.directory import Disk
from lastgood.wire.port import Peer
from lastgood.wire.security import SharedKey
from lastgood.wire.serving import Server
from lastgood.wire.window import MakeMemory

JOB, BY_KEY = "0" * 16, SharedKey(b"k" * 32)


class PeerTier(Disk):
    """`root`: the folder in the memory of the other node. `windows`: as for `Peers`, at both nodes."""

    def __init__(self, root: str, windows: MakeMemory | None = None) -> None:
        super().__init__(MemoryFiles(root), root)
        self._open = contextlib.ExitStack()
        files = PeerFiles(lambda: Disk(MemoryFiles(root), root, shared=True))
        self._open.callback(files.close)
        server = self._open.enter_context(Server(("127.0.0.1", 0), Peer(JOB, "b"), BY_KEY, files, windows=windows))
        peers = self._open.enter_context(contextlib.closing(Peers(JOB, BY_KEY, "a", windows)))
        node = PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=server.address[1])
        self._peer = PeerDisk(peers, node)

    def close(self) -> None:
        self._open.close()

    def list(self, folder: str) -> Mapping[str, int | None]:
        over_the_wire = RANK_FILE.fullmatch(f"{folder}/r00000.safetensors")
        return self._peer.list(folder) if over_the_wire else super().list(folder)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        if RANK_FILE.fullmatch(extent.blob):
            self._peer.read_into(extent, mv, fresh=fresh)
        else:
            super().read_into(extent, mv, fresh=fresh)
