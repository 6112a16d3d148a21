"""The interface of the checkpointing policies that `lastgood bench interval` compares, and their settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import NamedTuple


class Settings(NamedTuple):
    """Resources of the policies: saves in flight, writing threads and chunk length.

    `memory_bytes` limits the arena of PCcheck (0: the state's size) and, unless it is 0, that of lastgood.
    """

    in_flight: int = 2
    writers: int = 2
    chunk_bytes: int = 8 << 20
    memory_bytes: int = 0


class SaveTime(NamedTuple):
    """One save: its step and the seconds from the call until it was durable."""

    step: int
    seconds: float


class Policy(ABC):
    """A way to save a workload while it trains. The loop calls `fence` before and `save` after an update."""

    name: str
    in_flight = 1
    durable = True
    """whether its saves survive loss of power"""

    def __init__(self) -> None:
        self.saved: list[SaveTime] = []
        """the saves that became the newest durable state, in the order in which they did"""
        self._held = ExitStack()
        """resources that are released by `close`"""

    @abstractmethod
    def save(self, step: int) -> None:
        """Begin to save the state after `step`; returns when the training loop may continue."""

    def fence(self) -> None:  # noqa: B027 - not abstract: some policies never wait
        """Wait, before the next update, until the state may change."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until no save is under way. Raises the error of a save that failed in the background."""

    @abstractmethod
    def load(self) -> int:
        """Load the newest durable state into the workload; returns its step, or 0 if there is none."""

    def close(self) -> None:
        self.wait()
        self._held.close()

    def processes(self) -> list[int]:
        """The ids of further processes whose memory counts as the policy's."""
        return []


class Nothing(Policy):
    """Saves nothing: measures how much the speed of the loop alone varies on this machine."""

    name = "no saves"

    def save(self, step: int) -> None: ...
    def wait(self) -> None: ...
    def load(self) -> int:
        return 0
