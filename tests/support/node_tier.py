"""A tier on the disks of two nodes, which speak through the messages that ranks send each other."""

from __future__ import annotations

import os

from boards import ThreadedBoard
from lastgood.coordination.rounds import RankGroup
from lastgood.io.files import PosixFiles
from lastgood.run.node_disks import SUBJECT, NodeDisks, NodeFiles, Nodes
from lastgood.run.rank_requests import Requests, RequestServer
from lastgood.storage.directory import Disk


class NodeTier(NodeDisks):
    """The place as rank 0 sees it. `writer`: the rank, 0 or 1, whose files the tensor files are; each rank writes its
    own to the disk of its node."""

    def __init__(self, root: str, writer: int = 0) -> None:
        roots = [f"{root}/{node}" for node in "ab"]
        for one in roots:
            os.mkdir(one)
        disks = [Disk(PosixFiles(), one) for one in roots]
        board = ThreadedBoard()
        coordinator, other = (RankGroup(rank, 2, board, "opening") for rank in range(2))
        self._asked = Requests(coordinator, SUBJECT, [1])
        super().__init__(disks[0], Nodes((0, 1)), self._asked)
        self.create = disks[writer].create
        self._server = RequestServer(other, SUBJECT, NodeFiles(disks[1]))

    def close(self) -> None:
        self._asked.end()
        self._server.close()
