"""A world of one rank: the calls of `rounds.RankGroup`, answered at once. It has no store and waits for nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .rounds import RankGroup, Topic


class SingleTopic:
    """A topic that one rank decides alone."""

    is_retry = False
    """as `Topic.is_retry`: there is no other rank that has to delete the remains of an earlier attempt"""

    def agree(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return `decide([mine])`."""
        return decide([mine])

    def fail(self, error: BaseException) -> None:
        """Do nothing: no other rank waits for this one."""

    def failing(self) -> AbstractContextManager[None]:
        """A block in which an exception is only raised: no other rank waits for this one."""
        return nullcontext()

    def barrier(self) -> AbstractContextManager[None]:
        """A block; no other rank is waited for at its end."""
        return nullcontext()


class SingleRank:
    """The only rank of its world."""

    rank = 0
    size = 1
    is_coordinator = True
    restore_count = 0

    def __init__(self) -> None:
        self.closed = threading.Event()
        """as `RankGroup.closed`"""
        self.abandoned = threading.Event()
        """as `RankGroup.abandoned`"""

    def topic(self, kind: str, across_restores: bool = False) -> SingleTopic:
        """As `RankGroup.topic`."""
        return SingleTopic()

    def step_topic(self, kind: str, step: int) -> SingleTopic:
        """As `RankGroup.step_topic`."""
        return SingleTopic()

    def agree(self, kind: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return `decide([mine])`."""
        return decide([mine])

    def begin_restore(self, restore_count: int) -> None:
        """Do nothing: there are no messages from before the restore."""


AnyRanks = RankGroup | SingleRank
AnyTopic = Topic | SingleTopic
