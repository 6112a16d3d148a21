"""A world of one rank: the calls of `rounds.Ranks`, answered at once. Holds no store and waits for nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .rounds import Ranks, Topic


class SingleTopic:
    """A topic that one rank decides alone."""

    again = False
    """as `Topic.again`; nobody else has to clear away an earlier try"""

    def agree(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What `decide` returns for this one answer."""
        return decide([mine])

    def fail(self, error: BaseException) -> None:
        """Nobody waits for this rank."""

    def failing(self) -> AbstractContextManager[None]:
        """Nobody waits for this rank."""
        return nullcontext()


class SingleRank:
    """The only rank of its world."""

    rank = 0
    size = 1
    coordinates = True
    rewound = 0

    def __init__(self) -> None:
        self.left = threading.Event()
        """as `Ranks.left`"""

    def topic(self, kind: str, lasting: bool = False) -> SingleTopic:
        """As `Ranks.topic`."""
        return SingleTopic()

    def at(self, kind: str, step: int) -> SingleTopic:
        """As `Ranks.at`."""
        return SingleTopic()

    def agree(self, kind: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """As `Ranks.agree`."""
        return decide([mine])

    def rewind(self, number: int) -> None:
        """Nobody else counts."""


AnyRanks = Ranks | SingleRank
AnyTopic = Topic | SingleTopic
