"""What every checkpointing policy of the benchmarks offers, and what it may use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import NamedTuple


class Settings(NamedTuple):
    """What the policies may use. `memory_bytes` bounds PCcheck's arena and, if given, ours; 0: the state's size."""

    in_flight: int = 2
    writers: int = 2
    chunk_bytes: int = 8 << 20
    memory_bytes: int = 0


class SaveTime(NamedTuple):
    """One save: its step and the seconds from the call until it was durable."""

    step: int
    seconds: float


class Policy(ABC):
    """A way to save a workload while it trains."""

    name: str
    in_flight = 1
    durable = True
    """whether what it saves survives the loss of power"""

    def __init__(self) -> None:
        self.saved: list[SaveTime] = []
        """saves that became the newest durable state, in that order"""
        self._held = ExitStack()
        """resources that are released by `close`"""

    @abstractmethod
    def save(self, step: int) -> None:
        """Called after the update of `step`; returns when the loop may go on."""

    def fence(self) -> None:  # noqa: B027 - not abstract: some policies never wait
        """Called before the next update; returns when the state may change."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until no save is under way. Raises the error of a save that failed behind the loop."""

    @abstractmethod
    def load(self) -> int:
        """Bring the newest durable state into the workload; returns its step, 0 when there is none."""

    def close(self) -> None:
        self.wait()
        self._held.close()

    def processes(self) -> list[int]:
        """Further processes whose memory counts."""
        return []


class Nothing(Policy):
    """No saves: how much the speed of the loop alone varies on this machine."""

    name = "no saves"

    def save(self, step: int) -> None: ...
    def wait(self) -> None: ...
    def load(self) -> int:
        return 0
