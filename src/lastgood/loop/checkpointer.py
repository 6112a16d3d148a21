"""The checkpointer: the one object in the training loop. Holds what the training thread does; threads are not here.

The training thread cuts (loop/save_planner.py) and goes on; run/pipeline.py does the rest. What happened there is
reported at the next call (run/outcomes.py).
"""

from __future__ import annotations

import contextlib
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from .. import reporting
from ..coordination.single_rank import AnyRanks, SingleRank
from ..data.step_counting import count_step, samplers_in
from ..engine import guard
from ..engine.finite import not_finite_error
from ..errors import HalfLoaded, LastgoodError, NoSuchStep, NotWritable, StepTaken, Unavailable
from ..events import Event, EventKind
from ..format.layout import STEP_LIMIT
from ..policy.arguments import is_whole, require, require_seconds
from ..policy.cadence import Every
from ..policy.retention import KEEP, Keep
from ..policy.scrub import Scrub
from ..ranks.replica_check import Replicas
from ..ranks.torch_store import among_ranks, join_group, require_group, world_size
from ..run import access
from ..run.pipeline import Pipeline
from ..run.save_handle import Save
from ..run.writer import RunWriter
from ..state.live_check import require_live
from ..state.objects import is_fsdp1, modules_of
from ..state.patterns import Patterns
from .ending import Ending, refresh
from .load import LoadRequest, Restored, load, report
from .metrics import numbers
from .options import CADENCE, EarlierKeywords, OnError, Options, Ranks, Tuning, check_state
from .preemption import Asked, Preemption
from .restore import WritableRun
from .save_planner import SavePlanner
from .saver import Saver

if TYPE_CHECKING:
    from typing_extensions import Unpack

TORN_LIMIT = 2
"""torn saves in a row, after which a state is staged while the loop waits"""
EXIT_SECONDS = 60.0
"""how long leaving the `with` on an exception waits for saves in flight"""


class Checkpointer:
    """Saves the complete training state while training goes on, and brings the newest good one back.

    `path`: the run's directory, or "slots:///..." for the newest only, overwritten in place.
    `state`: name -> module, optimizer, scheduler, scaler, sampler, loader, tensor, number, string, dict or list; it is
    read again at every save. What an object's state_dict() returned is refused: it would never change again. Random
    number generators are captured without asking.
    `cadence`: Every(steps=...) or Every(seconds=...), default 300 seconds; or "auto": as often as `Tuning.overhead`
    allows. `retention`: Keep(...), which generations stay; default: the last 3.
    `include`, `exclude`: name patterns (fnmatch) of what is saved; one that matches no name is refused at the first
    step. `on_error`: "warn" (default) reports a save that failed in the background and lets training go on, "raise"
    raises in the loop. `on_event` is called on the training thread with each Event.
    `parity`: "10+2" lets two of any twelve parts of a verified generation be lost and rebuilt, for a fifth more disk;
    default: none. `scrub`: Scrub(...) reads old generations again, now and then; default: never.
    `finite_also`, `finite_except`: name patterns of further tensors that must not hold NaN or infinity, and of those
    that may. Parameters and the optimizer's state must not: a save that holds them is never restored by itself.
    `preemption`: Preemption(...): after a signal a last save is made and `step()` raises Preempted; default: none.
    `save_on_exit` (default True): leaving the `with` without an exception saves the newest step that `step()` or
    `save()` was called with, unless it is saved already, and waits for it.
    `durable_within_seconds` (default None: no limit): `step()` raises NothingDurable when no save became durable for so
    long, whatever `on_error` says.
    `tuning`: Tuning(...), memory, threads and the disk. `ranks`: Ranks(...), timeouts between ranks. Their fields may
    also be given as keyword arguments.
    In a process group every rank opens the same path and makes the same calls; each writes its own part, and what fails
    on one fails on all. Raises Refused, NotARun, NotWritable, RunLocked; nothing has been touched then.

        with lastgood.Checkpointer("runs/gpt", {"model": model, "optimizer": optimizer}) as ckpt:
            for step in range(ckpt.restore().step + 1, total + 1):
                train(step)
                ckpt.step(step)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        cadence: Every | Literal["auto"] = CADENCE,
        retention: Keep = KEEP,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        on_error: OnError = "warn",
        on_event: Callable[[Event], None] | None = None,
        parity: str | None = None,
        scrub: Scrub | None = None,
        finite_also: Sequence[str] = (),
        finite_except: Sequence[str] = (),
        preemption: Preemption | None = None,
        save_on_exit: bool = True,
        durable_within_seconds: float | None = None,
        tuning: Tuning | None = None,
        ranks: Ranks | None = None,
        **earlier: Unpack[EarlierKeywords],
    ) -> None:
        check_state(state)
        options = Options(
            cadence=cadence,
            retention=retention,
            include=include,
            exclude=exclude,
            on_error=on_error,
            on_event=on_event,
            parity=parity,
            scrub=scrub,
            finite_also=finite_also,
            finite_except=finite_except,
            preemption=preemption,
            save_on_exit=save_on_exit,
            durable_within_seconds=durable_within_seconds,
            tuning=tuning if tuning is not None else Tuning(),
            ranks=ranks if ranks is not None else Ranks(),
        )
        self._options = options.with_keywords(earlier)
        self._open(path, state)

    def _open(self, path: str | os.PathLike[str], state: MutableMapping[str, Any]) -> None:
        """Check what the options and the state are to each other, then open the run."""
        options = self._options
        require_live(state)  # guard: state-dict-snapshots-refused
        require_group()
        several = among_ranks()
        options.check_place(access.in_slots(path), several)
        patterns = Patterns(options.include, options.exclude, options.finite_also, options.finite_except)
        include, exclude = tuple(options.include), tuple(options.exclude)
        self._request = LoadRequest(state, include=include, exclude=exclude, patterns=patterns)
        self._advanced = self._resumed = 0  # the newest step that the loop has completed, and where it began
        self._called = self._closed = False  # whether step() or save() was called
        self._unknown = True  # what the state consists of, and to each other: the ranks
        self._process = os.getpid()
        flat = {path for path, one in modules_of(state).items() if any(map(is_fsdp1, one.modules()))} if several else ()
        require(
            not flat,
            f"FSDP1 with several ranks: {', '.join(flat)} is in flat parameters of each rank",
            "Give an object that hands it out in shards, by torch's get_state_dict: see docs/ranks.md.",
        )
        ranks = join_group(path, options.ranks.patience) if several else None
        self._ranks: AnyRanks = ranks or SingleRank()
        self._pipeline = pipeline = Pipeline(path, options.of_run(), self._ranks)
        replicas = Replicas(ranks, options.tuning.digest) if ranks else None
        self._planner = SavePlanner(options, pipeline.wait, replicas)
        try:
            asked = Asked(options.preemption) if options.preemption else None
        except BaseException:
            pipeline.close()
            raise
        self._planner.exempt(state)
        self._asked = asked
        self._saver = Saver(self._request, options, pipeline, self._planner, self._ranks, self._emit)
        self._ending = Ending(self._request, pipeline, self._saver, self._ranks, asked)

    # ---- the loop ------------------------------------------------------------------------------------------

    def restore(
        self, step: int | None = None, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> Restored:
        """Load the newest good generation of the lineage, or that of `step`, into the live state.

        Where nothing was ever committed, the run starts afresh, and `.step` of the result is 0. `restore(step=N)`
        rewinds this process. The first save after it makes the rewind durable: no later restore chooses a step after N
        of the old branch by itself. Until then, the next process resumes as if there had been no rewind.
        `restore(step=0)` without a generation of step 0 starts over in the same way.
        `strict` (default True): whether every difference between state and generation is an error; with False, what
        does not fit is skipped and listed in `.skipped`. `rename`: stored name -> live name; a pair of prefixes, which
        end in ".", renames everything below them.
        Raises StateMismatch, NoSuchStep, Damaged, NothingGood, Unavailable: the live state is untouched then. Raises
        HalfLoaded when it is not: nothing is saved until a restore succeeds.

            start = ckpt.restore().step
        """
        self._require_open()
        run = self._pipeline.run
        source = WritableRun(self._pipeline, self._planner, self._ranks)
        topic = self._ranks.topic("restore", across_restores=True)
        with topic.failing():
            self.wait()
            source.share_survey(topic)
        request = replace(self._request, step=step, strict=strict, rename=rename)
        mender = run.mender if isinstance(run, RunWriter) and self._ranks.size == 1 else None
        try:
            if mender is not None:
                mender.mended.clear()
                mender.mend_known(step, self._pipeline.upkeep.arena())
            found = load(request, source, self._ranks)
        except NoSuchStep:
            if step != 0 or not is_whole(step, 0):
                raise
            require(
                not self._saver.half_loaded,
                "the live state is half of another step",
                "Build it anew, or restore a step.",
            )
            found = Restored(step=0, generation=None, seconds=0.0, bytes=0)
        except BaseException as error:
            # KeyboardInterrupt may have come half way; any LastgoodError but HalfLoaded came before the first write.
            self._saver.half_loaded |= isinstance(error, HalfLoaded) or not isinstance(error, LastgoodError)
            if not isinstance(error, Exception):
                self._planner.interrupted()
            raise
        mended = mender.mended if mender is not None else {}
        found = replace(found, repaired=[(at.step, ", ".join(names)) for at, names in mended.items()])
        self._continue_from(found, source)
        for at, reason in found.stepped_over:
            self._emit("stepped_over", at, detail=reason)
        report(found, "resumed from")
        self._deliver()
        return found

    def _continue_from(self, found: Restored, source: WritableRun) -> None:
        """Let the saves that follow descend from what was restored; from nothing where nothing was."""
        pipeline, generation, state = self._pipeline, found.generation, self._request.state
        run, several = pipeline.run, self._ranks.size > 1
        self._saver.half_loaded = False
        run.begin(generation.id if generation else None)
        self._planner.exempt(state, found.not_demanded if generation else None)
        # The state of optimizers exists once it was restored, or after the first step.
        self._unknown = not several or generation is None
        if not self._unknown:
            self._planner.examine(state, self._request.patterns, pipeline.workers)
        if generation is not None and not generation.verified:
            source.mark(generation, [guard.finding(not_finite_error(name)) for name in found.unfit])
        if isinstance(run, RunWriter):
            with self._hints():
                run.marks.point()
        pipeline.upkeep.note_latest()
        self._advanced = self._resumed = found.step
        pipeline.outcomes.restored(found.step if generation else None)
        self._ending.note_restored(generation)
        for one in samplers_in(state):
            one.restart_after(found.step)  # guard: sampler-restarts-after-restore
        # guard: rewind-durable-at-once
        alone = not several and generation is not None and run.known.resumes_at(generation.id)
        self._saver.follow(found.step, generation if alone else None)

    def step(self, n: int, metrics: Mapping[str, Any] | None = None) -> Save | None:
        """Call after each optimizer step; `n` is how many are completed. Saves when due, and returns at once.

        `metrics`: as for `save`; kept where a save is due.
        The first call raises what every save would: NotRestored, Unstorable with all that cannot be stored, Refused for
        a name pattern that matches nothing. Each call reports or raises what failed in the background since the last
        one, as `on_error` says. Raises Preempted after a signal that asks for it, when a last save is durable or the
        grace is over; NothingDurable as `durable_within_seconds` says; StepTaken when `n` is smaller than before;
        Refused after `close()`.
        """
        n = self._advance(n)
        saver = self._saver
        if saver.announcements is not None and saver.listens:
            with self._hints():
                saver.announcements.poll(n, self.preempted)
                saver.schedule.tell(n, time.monotonic())
        self._ending.end_if_asked(n)
        self._surface()
        self._pipeline.outcomes.require_durable(n, self._options.durable_within_seconds)
        if not saver.schedule.due(n, time.monotonic()):
            return None
        return saver.save(n, False, numbers(metrics), must=False)

    def save(self, n: int, milestone: bool = False, metrics: Mapping[str, Any] | None = None) -> Save:
        """Save now. Returns when the state is copied; `Save.result()` waits until it is durable.

        A step that is saved already, or about to be, is not saved twice: its Save is returned, or one that ends when
        the milestone and the metrics are durable too. So is the step that `restore()` has loaded, where nothing but
        random numbers has changed since (one process only). No newer save stands in for this one, but in slots, which
        keep the newest only. `milestone` keeps it for ever; `metrics` (name -> number) feed Keep(best=...): NaN,
        infinity and None are left out. Raises Unstorable, NotRestored, and StepTaken for a step before the last one, or
        where the parameters or the optimizer's state have changed, on any rank, since this opening saved this step.
        """
        n = self._advance(n)
        self._surface()
        found = numbers(metrics)
        kept = not (milestone and self._pipeline.run.tier.newest_only)
        require(
            kept,
            "a milestone in slots, which keep the newest only",
            "Save it to a directory: lastgood.save(path, ...).",
        )
        known = self._saver.again(n, bool(milestone), found)
        if known is not None:
            return known
        save = self._saver.save(n, bool(milestone), found, must=True)
        assert save is not None
        return save

    def fence(self) -> None:
        """Call before changing parameters or optimizer state anywhere but in `optimizer.step()`. Waits if need be."""
        self._planner.fence.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is durable and looked after. Raises TimedOut; surfaces what failed."""
        require_seconds(timeout)
        self._pipeline.wait(timeout)
        self._surface()

    def latest(self) -> int | None:
        """Step of the newest verified generation of the lineage."""
        refresh(self._pipeline)
        return self._pipeline.upkeep.latest

    @property
    def preempted(self) -> bool:
        """Whether a signal has asked for the end, for loops that end themselves: the next `step()` raises Preempted.

        With several ranks it is a step that all of them end at, some steps later.
        """
        return self._ending.preempted

    def close(self, timeout: float | None = None) -> None:
        """Wait for saves in flight, then release the run. Saves nothing itself; a line says what is not durable.

        Raises TimedOut after `timeout` seconds; what was under way is given up at its next chunk then, and the lock
        goes when its thread has ended. Reports or raises what failed, as `on_error` says.
        """
        if self._process != os.getpid() or self._closed:
            return  # a fork of the process that has it open; or closed before
        require_seconds(timeout)
        self._closed = self._pipeline.outcomes.was_closed = True
        try:
            self._pipeline.close(timeout)
        except BaseException:
            self._planner.fence.close()  # its memory may still be copied to
            raise
        self._planner.close()
        if self._asked is not None:
            self._asked.close()
        try:
            self._surface()
        finally:
            self._pipeline.reported()
            self._ending.report(self._called, self._advanced, self._resumed)

    def __enter__(self) -> Checkpointer:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            try:
                self._save_newest()  # guard: newest-step-saved-on-exit
            finally:
                self.close()
            return
        try:
            left_seconds = self._ending.left_seconds()
            self.close(EXIT_SECONDS if left_seconds is None else left_seconds)
        except Exception as second:  # noqa: BLE001 - the loop's own exception goes first; this one is reported
            reporting.threat(f"while leaving: {type(second).__name__}: {second}")

    # ---- on the training thread ----------------------------------------------------------------------------

    def _save_newest(self) -> None:
        """Leaving normally: save the newest step of the loop, where that is asked for and the state is whole."""
        n = self._advanced
        gone = self._closed or self._process != os.getpid()
        if gone or not self._options.save_on_exit or n == self._resumed or self._saver.half_loaded:
            return
        self._ending.save_last(n)

    def _advance(self, n: int) -> int:
        """The loop has completed step `n`: every sampler of the state counts it, once."""
        self._called = True
        self._require_open()
        require(
            not self._saver.busy,
            "a save was asked for while the state is copied",
            "In a signal handler set a flag only.",
        )
        require(is_whole(n, 0), f"step {n!r} is no whole number", "Count completed optimizer steps.")
        require(n < STEP_LIMIT, f"step {n!r} is not below {STEP_LIMIT}", "Count completed optimizer steps.")
        n = operator.index(n)
        if n < self._advanced:
            raise StepTaken(
                f"step {n} cannot follow step {self._advanced}",
                safe="Nothing was written.",
                todo="Give ascending steps, over all epochs; to go back, restore(step=...) first.",
            )
        if self._unknown:
            self._pipeline.run.known.require_restored()  # guard: forgotten-restore-refused
            self._unknown = False
            state_bytes = self._planner.examine(self._request.state, self._request.patterns, self._pipeline.workers)
            if state_bytes is not None:
                self._saver.report_bound(state_bytes)
        if n > self._advanced:
            rank, ranks, first = self._ranks.rank, self._ranks.size, self._advanced == self._resumed
            count_step(self._request.state, n, self._advanced, rank=rank, ranks=ranks, first=first)
            self._advanced = self._pipeline.outcomes.completed = n
        return n

    @contextlib.contextmanager
    def _hints(self) -> Iterator[None]:
        """Marks, pointers and announcements: where they cannot be written now, that is told, and the run goes on."""
        try:
            yield
        except (Unavailable, NotWritable) as error:
            self._pipeline.outcomes.put(error)

    def _surface(self) -> None:
        """Deliver events, then report what failed behind the loop; the first failure is raised if asked to."""
        self._deliver()
        self._saver.note_fence()
        outcomes = self._pipeline.outcomes
        error = outcomes.report(raises=self._options.on_error == "raise")
        if outcomes.torn_row >= TORN_LIMIT and self._planner.stop_overlapping():  # guard: repeated-tears-block
            reporting.warning(
                f"{TORN_LIMIT} saves in a row were torn: from now on the state is copied while the loop waits"
            )
        if error is not None:
            raise error

    def _deliver(self) -> None:
        while not self._pipeline.events.empty():
            event = self._pipeline.events.get()
            if self._options.on_event is not None:
                self._options.on_event(event)

    def _emit(self, kind: EventKind, step: int, detail: str = "", seconds: float = 0.0) -> None:
        event = Event(kind=kind, step=step, at_seconds=time.monotonic(), seconds=seconds, bytes=0, detail=detail)
        self._pipeline.events.put(event)

    def _require_open(self) -> None:
        require(not self._closed, "this checkpointer is closed", "Open a new one.")
        require(self._process == os.getpid(), "this checkpointer was opened in another process", "Open one here.")
        opened, now = self._ranks.size, world_size()
        require(
            now in (opened, 1),
            f"opened by a world of {opened}, and called in a group of {now} ranks",
            "Call torch.distributed.init_process_group() before opening the run.",
        )
