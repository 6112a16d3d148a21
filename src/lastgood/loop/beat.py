"""What a training loop shows of its progress to `lastgood run`: steps, and the phases in which it makes none.

Without a supervisor nothing is shown. Nothing here is read by the loop, which waits for nothing here.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from .. import reporting
from ..io.heartbeat import Heartbeat
from ..policy.arguments import require
from ..policy.hang import OWN, RESTORE, SAVE
from ..records import Generation
from .progress import Progress


class SavedStep:
    """The newest step whose save is committed, as it is shown to the supervisor. Every method may be called from any
    thread. `page`: None if nobody supervises this process.

    It knows nothing else of the run: what commits saves holds it, and must keep no state of the user alive.
    """

    def __init__(self, page: Heartbeat | None) -> None:
        self._page, self._lock = page, threading.Lock()
        self._newest: int | None = None
        self._most: int | None = None
        """the newest step that is shown at most; None: any is"""

    def committed(self, step: int) -> None:
        """The save of a step is committed. Called by the thread that has committed it: the loop may be busy for long,
        and a failure meanwhile would be counted as one without a newer save."""
        with self._lock:
            self._newest = max(step, self._newest or 0)
            self._show()

    def restored(self, step: int | None) -> None:
        """The loop goes on from the generation of a step; None: from the beginning."""
        with self._lock:
            self._newest, self._most = step, None
            self._show()

    def diverged(self, base: int) -> None:
        """As `Beat.diverged`."""
        with self._lock:
            self._most = base
            self._show()

    def _show(self) -> None:
        if self._page is not None and self._newest is not None:
            self._page.saved(self._newest if self._most is None else min(self._newest, self._most))


class Beat:
    """The progress of one open run. `page`: None if nobody supervises this process."""

    def __init__(self, page: Heartbeat | None, progress: Progress) -> None:
        self._page, self._progress, self._process = page, progress, os.getpid()
        self._phase, self._thread = "", threading.get_ident()
        self._shown_step: int | None = None
        """the step that was shown last, since the restore"""
        self._restored = False
        """whether the loop has called restore(), or was warned that it has not"""
        self.saved_step = SavedStep(page)
        self.stall_seconds = 0.0
        """how long the loop has waited for saves: in the calls that begin them, at the fence, and for their ends"""

    def opened(self, run: str) -> None:
        """The run is open."""
        if self._page is not None:
            self._page.opened(run)

    def restored(self, step: int, generation: Generation | None) -> None:
        """The state is that of a step, restored from a generation or (None) that of the beginning."""
        if self._page is not None:
            self._shown_step, self._restored = None, True
            incarnation = "" if generation is None else generation.id.incarnation
            self._page.restored(step, incarnation, self._progress.next_position())
            self.saved_step.restored(step if generation is not None else None)

    def step(self, n: int) -> None:
        """Step `n` is completed, and counted on the samplers. A second call for it shows nothing: `save` follows
        `step`."""
        if self._page is not None and n != self._shown_step:  # guard: step-is-shown-once
            self._shown_step, self._thread = n, threading.get_ident()
            if not self._restored:
                self._page.restored(0)  # guard: loop-without-restore-has-begun
                self._warn_without_restore()
            self._page.beat(n, self._progress.next_position())

    def _warn_without_restore(self) -> None:
        """Warn, once and on one rank, that the loop trains without having restored."""
        self._restored = True
        if os.environ.get("RANK", "0") == "0":
            reporting.warning(
                "the first step comes without restore(): unless the script calls it at the next start, a job that has "
                "failed cannot go on from what it has saved. Call restore() before it, in a new run too"
            )

    def diverged(self, base: int) -> None:
        """A restore goes back to the generation of step `base` (0: there is none), and trains with the same batches
        again: nothing newer is shown as saved. Otherwise the supervisor would take it for progress, and start the job
        again for ever."""
        self.saved_step.diverged(base)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """In the block, the loop waits for a save."""
        return self._in(SAVE)

    def restoring(self) -> contextlib.AbstractContextManager[None]:
        """In the block, the loop restores. From now on the loop is in this thread."""
        self._thread = threading.get_ident()  # guard: loop-is-where-it-restores
        return self._in(RESTORE)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """In the block, the loop is in a phase of this name. Raises Refused for no name, and for lastgood's."""
        own = isinstance(name, str) and name != "" and not name.startswith(OWN)  # guard: own-phases-are-no-names
        require(own, f"phase({name!r})", 'Give a name of your own: with ckpt.phase("eval").')
        return self._in(name)

    @property
    def is_shown(self) -> bool:
        """Whether a supervisor sees this run."""
        return self._page is not None

    def can_save_just_in_time(self, seconds: float) -> None:
        """If another rank dies, this one may take so many seconds to save for all ranks; 0: it does not save."""
        if self._page is not None:
            self._page.can_save_just_in_time(seconds)

    def wrote_just_in_time(self) -> None:
        """This rank has written what it holds of a step, as a survivor of another one."""
        if self._page is not None:
            self._page.wrote_just_in_time()

    def ended(self) -> None:
        """The loop has ended by itself: what fails from now on fails with no batches."""
        if self._page is not None and self._process == os.getpid():  # guard: fork-shows-no-end
            self._page.ended()  # guard: failure-after-loop-blames-no-batches

    def released(self) -> None:
        """The run is closed."""
        if self._page is not None:
            self._page.released()

    @contextlib.contextmanager
    def _in(self, name: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:  # the loop goes on meanwhile
            yield
            return
        before, self._phase, begun = self._phase, name, time.monotonic()
        self._show()
        try:
            yield
        finally:
            self._phase = before
            self._show()
            if name == SAVE != before:
                self.stall_seconds += time.monotonic() - begun

    def _show(self) -> None:
        if self._page is not None and self._process == os.getpid():  # guard: fork-shows-no-phase
            self._page.phase(self._phase)
