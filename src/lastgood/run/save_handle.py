"""The handle of one save: its progress and its outcome. The pipeline notes both here; the handle starts and stops
nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

from ..errors import Overtaken, TimedOut, TornSnapshot
from ..policy.arguments import require, require_seconds
from ..records import Generation
from . import paths
from .copied_places import CopiedPlaces

Survives = Literal["process", "power", "node", "domain"]


class Save:
    """The handle of one save, which `Checkpointer.step` and `Checkpointer.save` return.

    It passes through `staged` (the live state may change again), `written` and `durable`, or ends with an error. Every
    method may be called from any thread. `step`: the step that is saved.

        save = ckpt.save(step)
        generation = save.result(timeout=60)
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_seconds = 0.0
        """how long the training loop has waited for this save: in the call that began it, and at the fence"""
        self._begun = time.monotonic()
        self._ended: float | None = None
        self._staged, self._written = threading.Event(), threading.Event()
        self._outcome: Future[Generation] = Future()
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """entered while a caller waits for this save"""
        self._places: dict[str, Future[None] | None] = {}
        """the places of the save: None for the one where it is committed first, the end of its copy for the others"""
        self._posted: CopiedPlaces | None = None
        """shows, at a rank other than 0, to which places rank 0 has copied the save"""
        self._seen: list[str] = []
        """the places that it has shown: only those of the newest saves are posted"""

    @classmethod
    def of(cls, generation: Generation, place: str) -> Save:
        """A handle that has ended with `generation`, for a step that was saved before and was read from `place`."""
        save = cls(generation.step)
        save.note_places(place, {})
        save.note_staged()
        save.note_written()
        save.note_outcome(generation, None)
        return save

    def __repr__(self) -> str:
        """One line: `print(ckpt.step(n))` shows it."""
        state = "being written" if self.staged() else "being copied from the live state"
        if self.is_committed():
            copying = [place for place in list(self._places) if self.copying(place)]
            state = f"in {' and '.join(self._known())}"
            state += f", being copied to {' and '.join(copying)}" if copying else ""
        elif (error := self.error()) is not None:
            state = f"{'dropped' if self.dropped() else 'failed'}: {type(error).__name__}"
        return f"<Save: step {self.step}, {state}>"

    def staged(self) -> bool:
        """Whether the live state may change again."""
        return self._staged.is_set()

    def written(self) -> bool:
        """Whether every byte of the state has been written. The generation may not be committed yet."""
        return self._written.is_set()

    def durable(self, survives: Survives = "power") -> bool:
        """Whether the generation exists in a place that survives a failure.

        `survives`: "process", which every place survives; "power" (default), which every place survives but memory;
        "node", the loss of a machine with its disks, or "domain", that of a rack or a zone, which object stores
        survive, and copies in the memory of other nodes, if no node of the job was left out of them. Of several ranks,
        rank 0 makes the copies to further places, and the others ask the store of the job, a call of about a
        millisecond. Raises Refused for another text.
        """
        kinds = get_args(Survives)
        require(survives in kinds, f"survives={survives!r}", f"Give one of {', '.join(kinds)}.")
        return any(survives in paths.survived_by(place) for place in self.where())

    def is_committed(self) -> bool:
        """Whether the generation exists in the place where it is committed first, which may be memory."""
        return self._outcome.done() and self._outcome.exception() is None

    def where(self) -> list[str]:
        """The places that have the generation, the nearest first: paths and URLs, as in messages."""
        if not self.is_committed():
            return []
        if self._posted is not None:
            self._seen = list(dict.fromkeys([*self._seen, *self._posted.of(self.committed().id)]))
        return self._known()

    def _known(self) -> list[str]:
        """The places that are known to have the generation, without asking the store of the job."""
        places = [place for place, copied in self._places.items() if copied is None or _succeeded(copied)]
        return list(dict.fromkeys([*places, *self._seen]))

    def copying(self, place: str) -> bool:
        """Whether the generation exists, and its copy to `place` is under way."""
        copied = self._places.get(place) if self.is_committed() else None
        return copied is not None and not copied.done()

    def dropped(self) -> bool:
        """Whether the save was given up on purpose: because a newer step was committed first (Overtaken), or because
        the live state changed while it was copied (TornSnapshot)."""
        return isinstance(self.error(), (Overtaken, TornSnapshot))

    def ended(self) -> bool:
        """Whether the save is over: durable, failed or dropped."""
        return self._outcome.done()

    def failed(self) -> bool:
        """Whether the save ended with an error; a dropped save counts as failed too."""
        return self.error() is not None

    def error(self) -> BaseException | None:
        """The error with which the save ended; None while it is under way, and if it is durable."""
        return self._outcome.exception() if self._outcome.done() else None

    def result(self, timeout: float | None = None) -> Generation:
        """Wait until the save is durable in every place that receives it, and return its generation. Copies in the
        memory of other nodes are not waited for: `durable("node")` says whether they are made.

        `timeout`: in seconds (None: no limit). Raises TimedOut after it, and the save goes on; raises the error of a
        save that failed or was dropped, or of its copy to one of the places (Overtaken if a newer one is copied).
        """
        require_seconds(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        generation = self.committed(timeout)
        for place, copied in list(self._places.items()):
            if copied is not None and not place.startswith(paths.PEERS):
                try:
                    with self.waiting():
                        copied.result(None if until is None else max(0.0, until - time.monotonic()))
                except FutureTimeout:
                    raise TimedOut(
                        f"step {self.step} is not in {place} after {timeout} s",
                        safe=f"It is in {', '.join(self.where())}, and is still being copied.",
                    ) from None
        return generation

    def committed(self, timeout: float | None = None) -> Generation:
        """As `result`, but waits only for the place where the save is committed first."""
        try:
            with self.waiting():
                return self._outcome.result(timeout)
        except FutureTimeout:
            raise TimedOut(
                f"step {self.step} is not durable after {timeout} s", safe="It is still under way."
            ) from None

    def wait_ended(self) -> None:
        """Wait until the save is over. Raises nothing."""
        with self.waiting():
            self._outcome.exception()

    @property
    def seconds(self) -> float:
        """The seconds from the call that began the save to its end, or until now while it is under way."""
        return (self._ended or time.monotonic()) - self._begun

    def note_staged(self) -> None:
        """Called by the pipeline: the copy of the live state is complete, or has failed."""
        self._staged.set()

    def note_written(self) -> None:
        """Called by the pipeline: every byte has been written."""
        self._written.set()

    def note_posted(self, posted: CopiedPlaces) -> None:
        """Called by the pipeline, at a rank other than 0: where to find what rank 0 has copied."""
        self._posted = posted

    def note_places(self, first: str, copies: Mapping[str, Future[None] | None]) -> None:
        """Called by the pipeline: where the save is committed first, and the copies to other places.

        Those in the memory of other nodes, which were noted before, stay.
        """
        self._places = {first: None, **self.copies_on_nodes(), **copies}

    def copies_on_nodes(self) -> dict[str, Future[None] | None]:
        """The copies in the memory of other nodes."""
        return {place: copied for place, copied in self._places.items() if place.startswith(paths.PEERS)}

    def note_outcome(self, generation: Generation | None, error: BaseException | None) -> None:
        """Called by the pipeline, once: the save has ended with a generation or with an error."""
        self._ended = time.monotonic()
        if error is not None:
            self._outcome.set_exception(error)
        elif generation is not None:
            self._outcome.set_result(generation)


def _succeeded(copied: Future[None]) -> bool:
    return copied.done() and copied.exception() is None
