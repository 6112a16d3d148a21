"""The checkpointer: the one object in the training loop. Holds what the training thread does; threads are not here.

The training thread cuts (loop/save_planner.py) and goes on; run/pipeline.py does the rest. What happened there is
reported at the next call (run/outcomes.py).
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import msgspec

from .. import reporting
from ..coordination.announcements import Announcements
from ..coordination.rounds import PATIENCE_SECONDS, Ranks, Topic
from ..data.step_counting import count_step, samplers_in
from ..engine import guard
from ..engine.finite import not_finite_error
from ..errors import (
    CommitUnknown,
    Damaged,
    HalfLoaded,
    HeardLate,
    InFlightFull,
    LastgoodError,
    NoSuchStep,
    NotRestored,
    NotWritable,
    StepDiffers,
    StepTaken,
    Unavailable,
)
from ..format import commit
from ..format import parity_layout as striping
from ..format.layout import CHUNK_BYTES, STEP_LIMIT
from ..policy.arguments import is_whole, require, require_seconds
from ..policy.cadence import Every
from ..policy.merge_values import homeless
from ..policy.retention import KEEP, Keep, wanted
from ..policy.scrub import Scrub
from ..policy.tune import Auto
from ..ranks.replica_check import Together
from ..ranks.torch_store import among_ranks, machine, ranks_of, require_group, world_size
from ..records import Event, EventKind, Finding, Generation
from ..run import access, disk_space, reader
from ..run.authority import Follower, Leader
from ..run.pipeline import Background, Save
from ..snapshot.unchanged import changed, is_same, require_unchanged
from ..state.live_check import Numbers, require_live
from ..state.objects import is_fsdp1, modules_of
from ..state.parameter_versions import version
from ..state.patterns import Patterns
from ..storage.directory import WriteMode
from .adaptive_interval import Pace
from .load import Request, Restored, load_into, report
from .metrics import numbers
from .options import OnError, Options, WhenFull, check_state
from .preemption import Asked, Preempted, Preemption
from .save_planner import Cutter, Staging, TornCheck
from .schedule import Timing, TimingTogether

CADENCE = Every(seconds=300)
TORN_LIMIT = 2
"""torn saves in a row, after which a state is staged while the loop waits"""
SHARED = 1.5
"""times the bytes of a generation, above which a machine that reads so much of it reads through its page cache"""
EXIT_SECONDS = 60.0
"""how long leaving the `with` on an exception waits for saves in flight"""


class Checkpointer:
    """Saves the complete training state while training goes on, and brings the newest good one back.

    `path`: the run's directory, or "slots:///..." for the newest only, overwritten in place (`persist`: "direct" or
    "mmap"). `state`: name -> module, optimizer, scheduler, scaler, sampler, loader, tensor, number, string, dict or
    list; re-read at every save. What an object's state_dict() returned is refused: it would never change again. Random
    number generators are captured without asking.
    `cadence`: Every(...), or "auto" with `overhead`, the share of time that saving may cost (default 0.03).
    `staging`: "overlap" (default where the optimizers can be held) copies behind the next forward and backward,
    "blocking" before the call returns; `torn_check`: "full" digests everything at the cut. `in_flight`: saves side by
    side, each with so many `writers`; `when_full`: a due step waits, is skipped, or raises. `chunk`: bytes of a buffer;
    `memory`: bound of all of them (default: the size of the state; smaller makes the next update wait for the disk).
    `on_error`: "warn" reports a save that failed in the background and lets training go on, "raise" raises in the loop.
    `durable_within_seconds` (default None: no limit): `step()` raises NothingDurable when no save became durable for so
    long, whatever `on_error` says. `save_on_exit` (default True): leaving the `with` without an exception saves the
    newest step that `step()` or `save()` was called with, unless it is saved already, and waits for it.
    `on_event` is called on the training thread with each Event. `include` / `exclude`: name patterns (fnmatch); one
    that matches no name is refused at the first step.
    NaN or infinity in a parameter or in an optimizer's state makes a save intact, and not good: it is never restored by
    itself. `finite_also`, `finite_except`: name patterns of further tensors, and of those that may hold them.
    `parity`: "10+2" lets two of any twelve parts of a verified generation be lost and rebuilt; a fifth more of disk.
    `scrub`: lastgood.Scrub(...) reads old generations again, now and then.
    In a process group every rank opens the same path and makes the same calls; each writes its own part, and what fails
    on one fails on all. `patience`: seconds to wait for a rank; twice that for rank 0, thrice for the group's store.
    Raises Refused, NotARun, NotWritable, RunLocked; nothing has been touched then.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        cadence: Every | Literal["auto"] = CADENCE,
        retention: Keep = KEEP,
        write_mode: WriteMode = "atomic_dirsync",
        digest: str = "xxh3_128",
        on_error: OnError = "warn",
        memory: int | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        on_event: Callable[[Event], None] | None = None,
        staging: Staging | None = None,
        torn_check: TornCheck = "sampled",
        in_flight: int = 2,
        when_full: WhenFull = "wait",
        writers: int = reader.WORKERS,
        chunk: int = CHUNK_BYTES,
        overhead: float | None = None,
        persist: access.Persist = "direct",
        parity: str | None = None,
        scrub: Scrub | None = None,
        finite_also: Sequence[str] = (),
        finite_except: Sequence[str] = (),
        preemption: Preemption | None = None,
        patience: float = PATIENCE_SECONDS,
        save_on_exit: bool = True,
        durable_within_seconds: float | None = None,
    ) -> None:
        check_state(state)
        self._options = options = Options(
            cadence=cadence,
            retention=retention,
            write_mode=write_mode,
            digest=digest,
            on_error=on_error,
            memory=memory,
            include=include,
            exclude=exclude,
            on_event=on_event,
            staging=staging,
            torn_check=torn_check,
            in_flight=in_flight,
            when_full=when_full,
            writers=writers,
            chunk=chunk,
            overhead=overhead,
            persist=persist,
            parity=parity,
            scrub=scrub,
            finite_also=finite_also,
            finite_except=finite_except,
            preemption=preemption,
            patience=patience,
            save_on_exit=save_on_exit,
            durable_within_seconds=durable_within_seconds,
        )
        require_live(state)  # guard: state-dict-snapshots-refused
        require_group()
        several = among_ranks()
        options.check_place(access.in_slots(path), several)
        patterns = Patterns(include, exclude, finite_also, finite_except)
        self._request = Request(state, include=tuple(include), exclude=tuple(exclude), patterns=patterns)
        self._cadence: Every | Pace = (
            cadence
            if isinstance(cadence, Every)
            else Pace(Auto(in_flight=in_flight) if overhead is None else Auto(overhead=overhead, in_flight=in_flight))
        )
        self._last: Save | None = None
        self._restored: Generation | None = None
        """what was restored, where the next process would resume there too"""
        self._advanced = self._resumed = 0  # the newest step that the loop has completed, and where it began
        self._busy = self._half_loaded = self._closed = False
        self._called = self._looked = False  # whether step() or save() was called; whether a generation was restored
        self._version = version(state)
        self._unknown = True  # what the state is made of, and to each other: the ranks
        self._process = os.getpid()
        self._fence_seconds = 0.0
        flat = {path for path, one in modules_of(state).items() if any(map(is_fsdp1, one.modules()))} if several else ()
        require(
            not flat,
            f"FSDP1 with several ranks: {', '.join(flat)} is in flat parameters of each rank",
            "Give an object that hands it out in shards, by torch's get_state_dict: see docs/ranks.md.",
        )
        self._ranks = ranks = ranks_of(path, patience) if several else None
        self._loading: Topic | None = None
        self._behind = Background(
            path,
            write_mode,
            retention,
            digest,
            in_flight=in_flight,
            writers=writers,
            persist=persist,
            parity=parity,
            scrub=scrub,
            ranks=ranks,
        )
        self._spare = striping.share(parity) if parity else 0.0
        self._cutter = Cutter(
            include,
            exclude,
            staging,
            torn_check,
            memory,
            chunk,
            digest,
            self._behind.wait,
            finite_also=finite_also,
            finite_except=finite_except,
            together=Together(ranks, digest) if ranks else None,
        )
        try:
            self._asked = Asked(preemption) if preemption else None
        except BaseException:
            self._behind.close()
            raise
        self._cutter.exempt(state)
        self._count_steps(0)

    # ---- the loop ------------------------------------------------------------------------------------------

    def restore(
        self, step: int | None = None, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> Restored:
        """Bring the newest good generation of the lineage (or that of `step`) into the live state.

        With nothing committed it is a fresh start: `.step` is 0. `restore(step=N)` rewinds this process; the first save
        after it makes the rewind durable, and what came after N is never chosen by itself again. Until then the next
        process resumes as if nobody had looked. `restore(step=0)` without a generation of step 0 starts over in the
        same way. `rename`: old name -> new.
        Raises StateMismatch, NoSuchStep, Damaged, NothingGood; the live state is untouched then. HalfLoaded when it is
        not: nothing is saved until a restore succeeds.
        """
        self._require_open()
        run = self._behind.run
        if self._ranks is None:
            self.wait()
        else:
            self._meet(self._ranks)
        request = replace(self._request, strict=strict, rename=rename)
        run.mended.clear()
        try:
            run.mend_known(step, self._behind.small_arena())
            found = load_into(
                request,
                run.tier,
                run.view,
                step,
                self._cutter.reading_arena,
                self._behind.workers,
                self._examine,
                self._mark,
                lambda one: run.try_to_mend(one.id, self._behind.small_arena()),
                rank=self._ranks.rank if self._ranks else 0,
                ranks=self._ranks.size if self._ranks else 1,
                together=self._all_load if self._ranks else None,
                nowhere=self._homeless,
                fits=self._all_fit,
            )
        except NoSuchStep:
            if step != 0 or not is_whole(step, 0):
                raise
            require(
                not self._half_loaded, "the live state is half of another step", "Build it anew, or restore a step."
            )
            found = Restored(step=0, generation=None, seconds=0.0, bytes=0)
        except BaseException as error:
            # Ctrl-C, or a load_state_dict that fails, may come half way too; other errors of the tree come before.
            self._half_loaded |= isinstance(error, HalfLoaded) or not isinstance(error, LastgoodError)
            if not isinstance(error, Exception):
                self._cutter.interrupted()
            raise
        self._half_loaded = False
        found = replace(found, repaired=[(at.step, ", ".join(names)) for at, names in run.mended.items()])
        run.begin(found.generation.id if found.generation else None)
        self._cutter.exempt(self._request.state, found.not_demanded if found.generation else None)
        # What optimizers keep exists once it was restored, or after the first step.
        self._unknown = self._ranks is None or found.generation is None
        if not self._unknown:
            self._cutter.examine(self._request.state, self._request.patterns, self._behind.workers)
        if found.generation is not None and not found.generation.verified:
            self._mark(found.generation, [guard.finding(not_finite_error(name)) for name in found.unfit])
        with self._hints():
            run.point()
        self._behind.note_latest()
        self._last, self._advanced, self._resumed = None, found.step, found.step
        # guard: rewind-durable-at-once
        alone = self._ranks is None and found.generation is not None and run.resumes_at(found.generation.id)
        self._restored = found.generation if alone else None
        self._behind.outcomes.restored(found.step if found.generation else None)
        self._looked, self._version = found.generation is not None, version(self._request.state)
        for one in samplers_in(self._request.state):
            one.restart_after(found.step)  # guard: sampler-restarts-after-restore
        self._count_steps(found.step)
        for at, reason in found.stepped_over:
            self._tell("stepped_over", at, detail=reason)
        report(found, "resumed from")
        self._deliver()
        return found

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
        if self._ahead is not None and self._listens:
            with self._hints():
                self._ahead.look(n, self.preempted)
                self._timing.tell(n, time.monotonic())
        if self._asked is not None and self._ends(n, self._asked):
            self._leave(n, self._asked)
        self._surface()
        self._behind.outcomes.require_durable(n, self._options.durable_within_seconds)
        if not self._timing.due(n, time.monotonic()):
            return None
        return self._save(n, False, numbers(metrics), must=False)

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
        kept = not (milestone and self._behind.run.tier.newest_only)
        require(
            kept,
            "a milestone in slots, which keep the newest only",
            "Save it to a directory: lastgood.save(path, ...).",
        )
        last = self._last
        if last is not None and last.step == n:
            if self._ranks is not None:
                last.wait_ended()  # so that all ranks come to the same decision
            if not last.failed():
                self._behind.add(last, False, {})  # from now on no newer save stands in for it
                self._require_same_state(last)
                return self._behind.add(last, bool(milestone), found)
        if last is None and (restored := self._restored_save(n)) is not None:
            return self._behind.add(restored, bool(milestone), found)
        save = self._save(n, bool(milestone), found, must=True)
        assert save is not None
        return save

    def _require_same_state(self, save: Save) -> None:
        """A step that is saved a second time is what was saved of it, on every rank. Waits until that is durable."""
        save.wait_ended()
        if not save.durable():
            return
        topic = self._ranks.at("same", save.step) if self._ranks else None
        with topic.failing() if topic else contextlib.nullcontext():
            rank = self._ranks.rank if self._ranks else 0
            manifest = commit.read_manifest(self._behind.run.tier, save.result(), rank)
            names = changed(self._cutter.captured(self._request.state), manifest)
        if topic:
            names = topic.agree(names, lambda told: sorted({name for one in told for name in one}))
        require_unchanged(save.step, names)

    def _restored_save(self, n: int) -> Save | None:
        """The save that was restored, where step `n` is that step and the state is as it was saved."""
        generation = self._restored
        if generation is None or generation.step != n:
            return None
        with contextlib.suppress(Damaged):  # it cannot be compared any more: the step is written anew
            manifest = commit.read_manifest(self._behind.run.tier, generation)
            if is_same(self._cutter.captured(self._request.state), manifest):  # guard: unchanged-restore-not-rewritten
                return Save.of(generation)
        return None

    def fence(self) -> None:
        """Call before changing parameters or optimizer state anywhere but in `optimizer.step()`. Waits if need be."""
        self._cutter.fence.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is durable and looked after. Raises TimedOut; surfaces what failed."""
        require_seconds(timeout)
        self._behind.wait(timeout)
        self._surface()

    def latest(self) -> int | None:
        """Step of the newest verified generation of the lineage."""
        self._look()
        return self._behind.latest

    @property
    def preempted(self) -> bool:
        """Whether a signal has asked for the end, for loops that end themselves: the next `step()` raises Preempted.

        With several ranks it is a step that all of them end at, some steps later.
        """
        return self._asked is not None and self._asked.at is not None

    def close(self, timeout: float | None = None) -> None:
        """Wait for saves in flight, then release the run. Saves nothing itself; a line says what is not durable.

        Raises TimedOut after `timeout` seconds; what was under way is given up at its next chunk then, and the lock
        goes when its thread has ended. Reports or raises what failed, as `on_error` says.
        """
        if self._process != os.getpid() or self._closed:
            return  # a fork of the process that has it open; or closed before
        require_seconds(timeout)
        self._closed = self._behind.outcomes.was_closed = True
        try:
            self._behind.close(timeout)
        except BaseException:
            self._cutter.fence.close()  # its memory may still be copied to
            raise
        self._cutter.close()
        if self._asked is not None:
            self._asked.close()
        try:
            self._surface()
        finally:
            self._behind.reported()
            self._report_end()

    def __enter__(self) -> Checkpointer:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            try:
                self._save_last()  # guard: newest-step-saved-on-exit
            finally:
                self.close()
            return
        try:
            self.close(self._asked.left_seconds if self._asked and self.preempted else EXIT_SECONDS)
        except Exception as second:  # noqa: BLE001 - the loop's own exception goes first; this one is reported
            reporting.threat(f"while leaving: {type(second).__name__}: {second}")

    # ---- on the training thread ----------------------------------------------------------------------------

    def _ends(self, n: int, asked: Asked) -> bool:
        """Whether this is the step to end at. Of several ranks, one that has heard a signal asks rank 0 to name it."""
        if self._ahead is None:
            return self.preempted
        if self._ahead.end is None:
            return False
        asked.ask()
        return n >= self._ahead.end

    def _leave(self, n: int, asked: Asked) -> NoReturn:
        """The last save, where it can be durable in time, and the end of the run; `asked` has a timer for all of it."""
        problem: Exception | None = None
        for _ in range(2):  # one that was torn, or failed, is made once more: the state rests now
            try:
                last = self._last
                if (last is None or last.step < n or last.failed()) and self._in_time(n, last, asked.left_seconds):
                    last = self._save(n, False, {}, must=True, patience_seconds=asked.left_seconds) or last
                if last is not None:
                    last.result(asked.left_seconds)
                problem = None
                break
            except Exception as error:  # noqa: BLE001 - told; the end comes all the same
                problem = error
                if isinstance(error, HeardLate):  # a rank had passed the step: there is none that all could save
                    break
        with contextlib.suppress(LastgoodError):  # what is known without it is told
            self._look()
        newest = next((one for one in self._behind.run.lineage() if not one.damaged and not one.unfit), None)
        durable = f"step {newest.step} is durable" if newest else "nothing is durable"
        more = f" {type(problem).__name__}: {problem}" if problem else ""
        level = reporting.threat if newest is None or problem else reporting.warning
        level(f"asked to end at step {n}: {durable}, exit {asked.wish.exit_code}.{more}")
        raise Preempted(asked.wish.exit_code, newest.step if newest else None)

    def _save_last(self) -> None:
        """Leaving normally: the newest step of the loop is saved, unless it is, or nothing was stepped.

        Of several ranks each comes to the same decision by itself: it depends on the steps and on saves that succeed or
        fail on all of them.
        """
        n = self._advanced
        if self._closed or self._process != os.getpid() or not self._options.save_on_exit or n == self._resumed:
            return
        if self._half_loaded:
            return
        self._behind.wait()
        last = self._last
        if last is not None and last.step == n and isinstance(last.error(), CommitUnknown):
            return  # it may be there: the next opening finds out, and the closing line says what is known
        if last is None or last.step < n or last.failed():
            with contextlib.suppress(NotRestored):  # this state does not continue the run: the closing line says so
                save = self._save(n, False, {}, must=True, patience_seconds=threading.TIMEOUT_MAX)
                assert save is not None
                save.wait_ended()

    def _report_end(self) -> None:
        if self._ranks is not None and not self._ranks.coordinates:
            return
        if not self._called:
            self._report_unused()
        elif self._advanced > self._resumed or self._behind.outcomes.failures:
            newest = next((one for one in self._behind.run.lineage() if not one.damaged and not one.unfit), None)
            self._behind.outcomes.report_end(newest.step if newest else None, self._advanced)

    def _report_unused(self) -> None:
        """Report that nothing was saved, but not on an exception, nor where a state was restored and only looked at."""
        changed = version(self._request.state) != self._version
        if sys.exc_info()[0] is None and (changed or not self._looked):
            what = f"{self._behind.run.tier.place}: nothing was saved: step() and save() were never called"
            reporting.warning(f"{what}, and the parameters have changed" if changed else what)

    def _in_time(self, n: int, last: Save | None, left_seconds: float) -> bool:
        """Whether a save can be durable in time, as the last one took; of several ranks, on all."""
        mine = (last.seconds if last is not None and last.durable() else 0.0) <= left_seconds
        if self._ranks is None or self._ahead is None or self._ahead.end is None:
            return mine
        topic = self._ranks.at("leave", self._ahead.end)
        if self._timing.before >= self._ahead.end:
            late = HeardLate(f"heard at step {n} only that the end is at step {self._ahead.end}")
            topic.fail(late)
            raise late
        return bool(topic.agree(mine, all))

    def _meet(self, ranks: Ranks) -> None:
        """All ranks are here, no save is under way, and all know what rank 0 knows of the run."""
        topic, run = ranks.topic("restore", lasting=True), self._behind.run
        with topic.failing():
            self.wait()
            # guard: restore-counted-by-coordinator
            ranks.rewind(topic.agree(ranks.rewound, lambda told: 1 + max(told)))
            seen = topic.agree(None, lambda _: run.seen() if isinstance(run, Leader) else None)
            if isinstance(run, Follower):
                run.see(seen)  # guard: followers-adopt-survey
            topic.agree(None, lambda _: None)

    def _look(self) -> None:
        """What rank 0 has committed and verified since."""
        if isinstance(self._behind.run, Follower):
            self._behind.run.look()
            self._behind.note_latest()

    def _save(
        self,
        n: int,
        milestone: bool,
        metrics: Mapping[str, float],
        must: bool,
        patience_seconds: float | None = None,
    ) -> Save | None:
        require(not self._half_loaded, "the live state is half of another step", "restore() it first.")
        if self._last is not None and not self._last.failed() and n <= self._last.step:
            raise StepTaken(
                f"step {n} cannot follow step {self._last.step}",
                safe="Nothing was written.",
                todo="Save ascending steps; to go back, restore(step=...) first.",
            )
        if self._ranks is None:
            self._request.patterns.report(self._request.state)
        waited = self._wait_for_a_place(n, must, patience_seconds)
        if waited is None:
            return None
        self._busy, started, begun = True, False, time.monotonic()
        self._timing.counted(n)
        topic = self._ranks.at("save", n) if self._ranks else None
        try:
            if topic is not None:
                self._behind.admit_step(n)  # the first opens the incarnation: nobody waits there for a cut that fails
            cut = self._cutter.cut(self._request.state, topic)
            save = Save(n)
            at = self._behind.admit_step(n)
            if self._last is None:
                if self._ranks is not None and self._ranks.coordinates:
                    self._report_bound(cut.bytes * self._ranks.size)  # all write about as much
                if self._cutter.note:
                    reporting.info(self._cutter.note)
            newest_only = self._behind.run.tier.newest_only  # there an older one would take the place of a newer one
            pinned = (must and not newest_only) or wanted(self._options.retention, n, milestone, metrics)
            options = {**cut.options, "milestone": milestone, "metrics": metrics, "together": topic}
            started = True
            here = not cut.overlapped  # guard: blocking-save-waits-for-copy
            self._behind.start(save, at, cut.images, cut.snapshot.fill, cut.approve, cut.arena, pinned, here, options)
            if cut.overlapped:
                self._cutter.begun(cut)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._cutter.interrupted()
            raise
        finally:
            self._busy = False
            if not started:  # guard: unstarted-save-frees-place
                self._behind.leave(n, topic, sys.exc_info()[1])
        now = time.monotonic()
        save.stall_seconds, self._last = waited + now - begun, save
        self._timing.begun(save, begun, now, waited)
        self._numbers.saved(n, self._request.state)
        return save

    def _count_steps(self, n: int) -> None:
        """The steps after `n` follow; what was told of others holds no more."""
        ranks, self._ahead = self._ranks, None
        self._numbers = Numbers(self._request.state, self._request.include, self._request.exclude)
        if ranks is None:
            self._timing, self._listens = Timing(self._cadence, self._tell), False
        else:
            self._ahead = Announcements(ranks)
            bound = None if self._options.when_full == "wait" else self._options.in_flight
            self._timing = together = TimingTogether(self._cadence, self._tell, ranks, self._ahead, bound)
            self._listens = together.listens or self._asked is not None
        self._timing.restored(n, time.monotonic())

    def _wait_for_a_place(self, n: int, must: bool, patience_seconds: float | None) -> float | None:
        """Take a place in flight, as `when_full` says: how many seconds that took; None where this save is skipped.

        With `patience_seconds` it waits so long, whatever `when_full` says.
        """
        full = self._timing.full()
        if not full and self._behind.admit(0.0):
            return 0.0
        if full is not False and self._options.when_full == "raise" and patience_seconds is None:
            raise InFlightFull(
                f"step {n} was not saved: {self._options.in_flight} saves are in flight",
                safe="They go on.",
                todo='Save less often, allow more (in_flight=...), or wait (when_full="wait").',
            )
        begun = time.monotonic()
        skips = full is not False and self._options.when_full == "skip" and not must  # guard: manual-save-not-skipped
        if skips or not self._behind.admit(patience_seconds):  # guard: due-save-skipped-when-full
            self._tell("skipped", n)
            return None
        waited = time.monotonic() - begun
        self._tell("waited", n, seconds=waited)
        return waited

    def _advance(self, n: int) -> int:
        """The loop has completed step `n`: every sampler of the state counts it, once."""
        self._called = True
        self._require_open()
        require(
            not self._busy, "a save was asked for while the state is copied", "In a signal handler set a flag only."
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
            self._behind.run.require_restored()  # guard: forgotten-restore-refused
            self._unknown = False
            state_bytes = self._cutter.examine(self._request.state, self._request.patterns, self._behind.workers)
            if state_bytes is not None:
                self._report_bound(state_bytes)
        if n > self._advanced:
            rank, size = (self._ranks.rank, self._ranks.size) if self._ranks else (0, 1)
            first = self._advanced == self._resumed
            count_step(self._request.state, n, self._advanced, rank=rank, ranks=size, first=first)
            self._advanced = self._behind.outcomes.completed = n
        return n

    def _all_load(self, attempt: Callable[[], None]) -> None:
        """A generation is loaded by all ranks, or by none: what one of them finds, all step over."""
        assert self._ranks is not None
        topic = self._loading = self._ranks.topic("load")
        try:
            with topic.failing():
                attempt()
            topic.agree(None, lambda _: None)  # guard: all-ranks-load-or-none
        finally:
            self._loading = None

    def _homeless(self, unexpected: list[str]) -> list[str]:
        """What this rank has no place for is somebody else's, as the stages of a pipeline are, or fits nowhere."""
        return self._loading.agree(unexpected, homeless) if self._loading is not None else unexpected

    def _all_fit(self, generation: Generation, wanted_bytes: int) -> bool:
        """Nobody writes into its state before it fits everywhere, and is of one generation.

        Whether the ranks of this machine want more of it than there is, and so read some of it several times.
        """
        if self._loading is None:
            return False
        here = machine()
        wanted = self._loading.agree((generation.root, here, wanted_bytes), _wanted_bytes)
        return bool(wanted[here] > SHARED * generation.bytes)  # guard: shared-content-read-once

    def _examine(self, generation: Generation) -> list[Finding]:
        """All of it is read again; by several ranks, each a part of the files."""
        run, arena = self._behind.run, self._behind.small_arena()
        if not isinstance(run, (Leader, Follower)) or self._ranks is None:
            return reader.read_all(run.tier, generation, arena, self._behind.workers)
        topic = self._loading or self._ranks.topic("examine")
        with topic.failing():
            mine = run.read_own(generation, arena)

        def all_of(told: list[Any]) -> Any:
            found = [one for findings in told for one in findings]
            return found or msgspec.to_builtins(reader.disagreeing(run.tier, generation))

        return msgspec.convert(topic.agree(msgspec.to_builtins(mine), all_of), list[Finding])

    def _mark(self, generation: Generation, findings: list[Finding]) -> None:
        with self._hints():
            self._behind.run.conclude(generation, findings)

    @contextlib.contextmanager
    def _hints(self) -> Iterator[None]:
        """Marks, pointers and announcements: where they cannot be written now, that is told, and the run goes on."""
        try:
            yield
        except (Unavailable, NotWritable) as error:
            self._behind.outcomes.put(error)

    def _surface(self) -> None:
        """Deliver events, then report what failed behind the loop; the first failure is raised if asked to."""
        self._deliver()
        self._note_fence()
        outcomes = self._behind.outcomes
        error = outcomes.report(raises=self._options.on_error == "raise")
        if outcomes.torn_row >= TORN_LIMIT and self._cutter.stop_overlapping():  # guard: repeated-tears-block
            reporting.warning(
                f"{TORN_LIMIT} saves in a row were torn: from now on the state is copied while the loop waits"
            )
        if error is not None:
            raise error

    def _deliver(self) -> None:
        while not self._behind.events.empty():
            event = self._behind.events.get()
            if self._options.on_event is not None:
                self._options.on_event(event)

    def _note_fence(self) -> None:
        """What the loop waited for at the fence is part of what its last save cost."""
        waited = self._cutter.fence.waited_seconds - self._fence_seconds
        if waited and self._last is not None:
            self._fence_seconds += waited
            self._last.stall_seconds += waited
            self._tell("fenced", self._last.step, seconds=waited)

    def _report_bound(self, state_bytes: int) -> None:
        """Report the most that the run takes on its disk. `state_bytes`: of one generation, of all ranks."""
        run = self._behind.run
        total = state_bytes + round(state_bytes * self._spare)
        held = sum(one.bytes for one in run.survey.generations.values())
        disk_space.report_bound(run.tier, self._options.retention, self._options.in_flight, total, held)

    def _tell(self, kind: EventKind, step: int, detail: str = "", seconds: float = 0.0) -> None:
        event = Event(kind=kind, step=step, at_seconds=time.monotonic(), seconds=seconds, bytes=0, detail=detail)
        self._behind.events.put(event)

    def _require_open(self) -> None:
        require(not self._closed, "this checkpointer is closed", "Open a new one.")
        require(self._process == os.getpid(), "this checkpointer was opened in another process", "Open one here.")
        opened, now = self._ranks.size if self._ranks else 1, world_size()
        require(
            now in (opened, 1),
            f"opened by a world of {opened}, and called in a group of {now} ranks",
            "Call torch.distributed.init_process_group() before opening the run.",
        )


def _wanted_bytes(told: list[tuple[str, str, int]]) -> Mapping[str, int]:
    """Of one generation, by machine."""
    if len({root for root, _, _ in told}) > 1:  # guard: ranks-load-one-generation
        raise StepDiffers("ranks were about to load different generations", safe="Nothing was loaded.")
    wanted: Counter[str] = Counter()
    for _, at, size in told:
        wanted[at] += size
    return wanted
