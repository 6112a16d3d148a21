"""The checkpointer: the one object in the training loop. Assembles the parts of this room; starts no thread itself: the
training thread makes a snapshot and goes on, and run/pipeline.py does the rest behind it.

    saver.py       a save: place, plan, start                restore.py    around a restore; load.py loads
    schedule.py    when a save is due                        progress.py   which steps are completed
    ending.py      the last save and the closing line        reports.py    events and failures of other threads
    beat.py        what a supervisor sees                    step_log.py    logs for who studies a run
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from .. import reporting
from ..coordination.single_rank import SingleRank
from ..errors import TimedOut
from ..events import Event
from ..io import heartbeat
from ..policy.arguments import require, require_seconds
from ..policy.cadence import Every
from ..policy.retention import KEEP, Keep
from ..policy.scrub import Scrub
from ..ranks.replica_check import Replicas
from ..ranks.torch_store import among_ranks, join_group, require_group, world_size
from ..run import access, paths, replay_request
from ..run.pipeline import Pipeline
from ..run.save_handle import Save
from ..run.watched import Sources
from ..state.live_check import require_live
from ..state.patterns import Patterns
from . import just_in_time, replaying, step_log
from .adaptive_interval import known_failures
from .beat import Beat
from .ending import Ending, refresh
from .load import LoadRequest, Restored, report
from .metrics import numbers
from .options import CADENCE, EarlierKeywords, OnError, Options, Ranks, Tuning, check_state
from .preemption import EndRequest, Preempted, Preemption
from .progress import Progress
from .reports import Reports
from .restore import Followed, Restorer
from .save_planner import SavePlanner, require_no_flat_parameters
from .saver import Saver
from .sentinel import DivergenceCheck
from .sentinel_options import Sentinel
from .tiers import Tier

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Checkpointer:
    """Saves the complete training state while training goes on, and restores the newest good generation.

    `path`: the directory of the run, which is made if it does not exist; or "slots:///..." to keep only the newest
    generation, overwritten in place.
    `state`: name -> module, optimizer, scheduler, scaler, sampler, loader, tensor, number, string, dict or list, read
    at every save: the result of a state_dict() is refused. The states of random number generators are saved too.
    `cadence`: when `step()` saves: Every(steps=...), Every(seconds=...), or "auto", as often as `Tuning.overhead`
    allows, or so that failures cost the least time (`Tuning.mtbf`); default Every(seconds=300).
    `retention`: which generations are kept; default Keep(last=3).
    `include`, `exclude`: name patterns (fnmatch) of what is saved, and of what is not; default (): everything is saved.
    A pattern that matches no name is refused at the first step.
    `on_error`: what happens when a save fails in the background: "warn" (default) reports it and training goes on,
    "raise" raises it from the next call. `on_event`: called with each Event (docs/events.md), on the training thread;
    default None. `parity`: "10+2" writes a fifth more, so that any two of twelve parts of a verified generation can be
    lost and are rebuilt; default None: no parity. `scrub`: Scrub(...) reads old generations again from time to time, in
    all places of the run; default None: never.
    `finite_also`, `finite_except`: name patterns of further tensors that must not hold NaN or infinity, and of those
    that may; default (). Parameters of modules and the state of optimizers whose step can be hooked must not: a
    generation whose tensors do is restored only if its step is asked for.
    `preemption`: Preemption(...): after a signal, `step()` makes a last save and raises Preempted; default None: no
    signal is handled.
    `sentinel`: Sentinel(...): `step()` raises TrainingDiverged, on all ranks at the same step, when a metric is not
    finite or leaps; the next `restore()` goes back to before it and leaves the batches out; default None: nothing is
    looked at.
    `save_on_exit`: whether leaving the `with` without an exception saves the newest step that `step()` or `save()` was
    called with, unless it is saved, and waits for it; default True.
    `durable_within_seconds`: `step()` raises NothingDurable when no save has become durable for this many seconds,
    whatever `on_error` says; default None: no limit.
    `tiers`: further places of the run, Tier(...), above `path`, the durable one; saves are committed in the
    first one and copied to the others behind the loop; default (): `path` is the only place (docs/places.md).
    `tuning`: Tuning(...): memory, threads and the disk. `ranks`: Ranks(...): the timeout between ranks. Each field of
    these two may also be given as a keyword argument of its own.

    In a process group, every rank opens the same path and makes the same calls. Each writes its own part of a
    generation; a save that fails on one rank fails on all. Raises Refused, NotARun, NotWritable, RunLocked: nothing has
    been touched then. Raises Unavailable if the disk fails, and RankFailed if another rank does not come.

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
        sentinel: Sentinel | None = None,
        save_on_exit: bool = True,
        durable_within_seconds: float | None = None,
        tuning: Tuning | None = None,
        ranks: Ranks | None = None,
        tiers: Sequence[Tier] = (),
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
            sentinel=sentinel,
            save_on_exit=save_on_exit,
            durable_within_seconds=durable_within_seconds,
            tuning=tuning if tuning is not None else Tuning(),
            ranks=ranks if ranks is not None else Ranks(),
            tiers=tiers,
        )
        self._options, self._replay = options.with_keywords(earlier), replay_request.from_environment()
        if self._replay is not None:
            path, self._options = replaying.copy_of(self._replay, path), replaying.adapted(self._options)
        self._open(path, state)

    def _open(self, path: str | os.PathLike[str], state: MutableMapping[str, Any]) -> None:
        """Check the options, the state and the place against each other, then open the run."""
        options = self._options
        require_live(state)  # guard: state-dict-snapshots-refused
        require_group()
        several = among_ranks()
        places = options.places(path)
        options.check_place(access.in_slots(places[0].path))
        patterns = Patterns(options.include, options.exclude, options.finite_also, options.finite_except)
        include, exclude = tuple(options.include), tuple(options.exclude)
        self._request = request = LoadRequest(state, include=include, exclude=exclude, patterns=patterns)
        if several:
            require_no_flat_parameters(state)
        self._process, self._closed = os.getpid(), False
        url = paths.parsed(path).url  # the same on ranks with other working directories
        group = join_group(url, options.ranks.patience) if several else None
        self._ranks = ranks = group or SingleRank()
        self._pipeline = pipeline = Pipeline(places[0].path, options.of_run(places), ranks)
        with contextlib.ExitStack() as failed:
            failed.callback(pipeline.close)
            replicas = Replicas(group, options.tuning.digest, options.tuning.in_flight) if group else None
            self._planner = planner = SavePlanner(options, pipeline, replicas)
            failures = known_failures(options, url, ranks, pipeline.outcomes)
            planner.exempt(state)
            self._reports = reports = Reports(options, pipeline, planner, ranks)
            self._progress = progress = Progress(request, ranks, pipeline.outcomes, planner.fence)
            self._saver = saver = Saver(request, options, pipeline, planner, ranks, reports, failures)
            self._beat = beat = Beat(heartbeat.own(run=url), progress)
            pipeline.outcomes.committed = beat.saved_step.committed  # guard: saved-step-shown-at-once
            failed.callback(beat.released)  # guard: failed-opening-releases-all
            self._log = reports.log = step_log.opened(request.state, ranks, progress, beat) if beat.is_shown else None
            self._divergence = DivergenceCheck(options, url, pipeline, saver, progress, ranks, beat)
            end_request = EndRequest(options.preemption) if options.preemption else None
            self._ending = Ending(pipeline, saver, progress, ranks, self._divergence, end_request, beat)
            failed.callback(self._ending.close)
            self._restorer = Restorer(request, url, pipeline, planner, ranks, saver, progress, reports)
            self._just_in_time = just_in_time.opened(state, url, options, pipeline, planner, ranks, beat)
            beat.opened(url)
            planner.fence.waiting = beat.saving
            failed.pop_all()

    # ---- the loop ------------------------------------------------------------------------------------------

    def restore(
        self, step: int | None = None, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> Restored:
        """Load the newest good generation of the lineage, or that of `step`, into the live state.

        `step`: the step to restore; default None: the newest. If nothing was ever committed, the run starts from the
        beginning, and `.step` of the result is 0. `restore(step=0)` without a generation of step 0 starts over.
        `restore(step=N)` rewinds this process. The first save after it makes the rewind durable: later restores choose
        a step after N of the old branch only if they ask for it. Until then, the next process resumes as if there had
        been no rewind. Without `step`, what `lastgood run` and a Sentinel have learned about the run is followed:
        suspect generations are stepped over, and batches left out (docs/recovery.md).
        `strict`: whether any difference between state and generation is an error; with False, what does not fit is
        skipped and listed in `.skipped`; default True. `rename`: stored name -> live name; a pair of prefixes, which
        end in ".", renames everything below them; default None.
        Raises Refused, StateMismatch, NoSuchStep, Damaged, NothingGood, Unavailable: the live state is untouched then.
        Raises HalfLoaded if it is not: nothing is saved until a restore succeeds.

            start = ckpt.restore().step
        """
        self._require_open()
        if self._just_in_time is not None:
            self._just_in_time.restart()
        restorer = self._restorer
        with self._beat.restoring():
            topic = self._ranks.topic("restore", across_restores=True)
            with topic.failing():
                self._pipeline.wait(on_nodes=False)
                self._surface()
                advice = restorer.followed_advice(topic) if step is None else Followed()
                restorer.run.mend_known(step, topic)
                restorer.run.share_survey(topic)
        with self._beat.restoring():  # a new phase: the time without progress that it may take begins anew
            request = replace(self._request, step=step, strict=strict, rename=rename)
            try:
                restorer.run.sources = Sources()
                found = restorer.loaded(request, advice)
            except Exception:
                restorer.run.protect()  # guard: failed-restore-makes-copies
                raise
            finally:
                restorer.run.release()
            found = replace(found, repaired=restorer.run.repaired(), sources=restorer.run.sources.found())
            restorer.continue_from(found, advice)
        self._divergence.restart()
        self._beat.restored(found.step, found.generation)
        if self._log is not None:
            self._log.restored(found.step, found.seconds)
        report(found, "resumed from", self._ranks.is_coordinator)
        self._reports.deliver()
        return found

    def step(self, n: int, metrics: Mapping[str, Any] | None = None) -> Save | None:
        """Call after each optimizer step. Starts a save if one is due, and returns its handle; otherwise None.

        `n`: the number of completed optimizer steps; it must not descend. `metrics`: as for `save`; stored only if a
        save is due; default None. Does not wait for the disk, unless `when_full="wait"` and all places are in use.
        The first call raises what every save would: NotRestored, Unstorable with all that cannot be stored, Refused for
        a name pattern that matches nothing. Each call reports or raises what failed in the background since the last
        one, as `on_error` says. Raises Preempted after a signal of `preemption`, once a last save is durable or cannot
        be; TrainingDiverged as `sentinel` says; NothingDurable as `durable_within_seconds` says; InFlightFull as
        `when_full` says; StepTaken if `n` is smaller than before; Refused after `close()`.

            ckpt.step(step, metrics={"loss": loss})
        """
        self._reports.stepped = True
        n = self._advance(n, metrics)
        self._progress.report_behind()
        if self._log is not None:
            self._log.step(n, metrics)
        self._divergence.check(n, metrics, at_once=self.preempted)
        if self._saver.announcements is not None and self._saver.expects_announcements:
            with self._reports.deferring_problems():
                self._saver.announcements.poll(n, self.preempted)
                self._saver.schedule.announce(n, time.monotonic())
        self._ending.end_if_requested(n)
        self._surface()
        self._pipeline.outcomes.require_durable(n, self._options.durable_within_seconds)
        if not self._saver.due(n, time.monotonic()):
            return None
        self._divergence.before_save()
        with self._beat.saving():
            save = self._saver.save(n, False, numbers(metrics), must=False)
            replaying.after_step(self._replay, n, save, self._pipeline)
        if save is not None:
            save.waiting = self._beat.saving
        return save

    def save(self, n: int, milestone: bool = False, metrics: Mapping[str, Any] | None = None) -> Save:
        """Save now. Returns as soon as training may go on; `Save.result()` waits until the save is durable.

        `n`: the number of completed optimizer steps. `milestone`: True or False, whether the generation is kept for
        ever; default False. `metrics`: name -> number, for Keep(best=...); NaN, infinity and None are left out; default
        None: none.
        A step that is durable or under way is not saved twice: its Save is returned, or, if a milestone or metrics are
        added, one that ends when these are durable too. The same holds for the step that `restore()` has loaded, if
        nothing but random numbers has changed since (one process only). If what was saved cannot be read now, the Save
        has ended with the error. No newer save replaces this one, except in slots, which keep the newest only.
        Raises what `step` raises, and StepTaken for a step before the last one, or if the parameters or the state of
        optimizers have changed, on any rank, since this step was saved.

            ckpt.save(step, milestone=True).result()  # waits until it is durable
        """
        self._saver.require_milestone(milestone)
        n, found = self._advance(n, metrics), numbers(metrics)
        self._surface()
        self._reports.save_called(n)
        self._divergence.before_save()
        with self._beat.saving():
            save = self._saver.existing(n, bool(milestone), found)
            if save is None:
                self._progress.report_update()
                save = self._saver.save(n, bool(milestone), found, must=True)
            assert save is not None, "a save that must be made was skipped"
            replaying.after_step(self._replay, n, save, self._pipeline)
        save.waiting = self._beat.saving
        return save

    def fence(self) -> None:
        """Call before the loop changes parameters or the state of optimizers anywhere but in `optimizer.step()`.

        Waits until the copy of the last save has read the tensors; returns at once if no copy is under way.
        """
        self._planner.fence.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save has ended, and until new generations are verified and old ones deleted.

        `timeout`: in seconds; default None: no limit. Raises TimedOut after it, and what `on_error` says.
        """
        require_seconds(timeout)
        with self._beat.saving():
            self._pipeline.wait(timeout)
        self._surface()

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Around a part of the loop that makes no steps, such as an evaluation, for `lastgood run` (docs/recovery.md).

        `name`: of the part, for reports. A rank that shows no step for much longer than its steps take is taken for
        hung and started again. In the block it has an hour the first time, and then 20 times as long as the longest
        block of this name took, at least a minute. Does nothing without `lastgood run`. Raises Refused for no name.

            with ckpt.phase("eval"):
                evaluate(model)
        """
        return self._beat.phase(name)

    def latest(self) -> int | None:
        """The step of the newest verified generation of the lineage; None if there is none."""
        refresh(self._pipeline)
        return self._pipeline.upkeep.latest

    @property
    def preempted(self) -> bool:
        """Whether a signal of `preemption` has requested the end, for loops that end by themselves.

        The next `step()` raises Preempted; with several ranks, a later one does, at the same step on all of them.
        """
        return self._ending.preempted

    def close(self, timeout: float | None = None) -> None:
        """Wait for saves in flight, then release the run. Makes no save; reports what is not durable.

        `timeout`: in seconds; default None: no limit. After it, saves under way are cancelled at their next chunk, the
        lock is released when the last of their threads has ended, and TimedOut is raised. Reports or raises what
        failed, as `on_error` says. A second call does nothing.
        """
        if self._process != os.getpid() or self._closed:
            return  # a fork of the process that has the run open; or closed before
        require_seconds(timeout)
        self._beat.can_save_just_in_time(0.0)
        self._divergence.end()
        self._release(timeout)
        try:
            self._surface()
            self._divergence.report()
        finally:
            self._pipeline.reported()
            self._ending.report()
            if self._log is not None:
                self._log.close()

    def __enter__(self) -> Checkpointer:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._beat.ended()
            try:
                if not self._closed and self._process == os.getpid():
                    self._divergence.finish()
                    if self._options.save_on_exit:
                        with self._beat.saving():
                            self._ending.save_newest()  # guard: newest-step-saved-on-exit
            finally:
                self.close()
            return
        survivor, owned = self._just_in_time, not self._closed and self._process == os.getpid()
        try:
            if kind is not Preempted:  # guard: preempted-rank-serves-the-others
                self._pipeline.places.leave()
            if survivor is not None and owned and survivor.wanted(error):
                self._leave(survivor)
            else:
                self.close(self._ending.timeout_seconds())
        except Exception as second:  # noqa: BLE001 - reported, so that the exception of the loop is the one that is raised
            reporting.threat(f"while leaving: {type(second).__name__}: {second}")

    # ---- steps ---------------------------------------------------------------------------------------------

    def _release(self, timeout: float | None, survives: bool = False) -> None:
        """Release the run, once saves in flight have ended, or are cancelled after `timeout`. Raises TimedOut then."""
        self._closed = self._pipeline.outcomes.was_closed = True
        self._beat.released()
        try:
            self._pipeline.close(timeout, survives)
        except BaseException:
            self._planner.fence.close()  # not the memory: a thread may still copy into it
            raise
        self._planner.close()
        self._ending.close()

    def _leave(self, survivor: just_in_time.JustInTime) -> None:
        """Leave the `with` as a rank that has survived another one. What was in flight is reported if it is lost."""
        self._pipeline.places.stop()  # a copy waits for all ranks, of which one is dead
        with contextlib.suppress(TimedOut):
            self._release(just_in_time.CLOSE_SECONDS, survives=True)
        if not survivor.save():
            self._surface()
            self._ending.report()
        self._pipeline.reported()

    def _advance(self, n: int, metrics: Mapping[str, Any] | None) -> int:
        """Check that step `n` may follow, record that it is completed, and return it as an int."""
        self._progress.called = True
        self._require_open()
        self._saver.require_idle()
        n = self._progress.checked(n)
        self._saver.examine(metrics)
        self._progress.advance(n)
        if self._just_in_time is not None:
            self._just_in_time.note(n)
        self._beat.step(n)
        return n

    def _surface(self) -> None:
        self._saver.note_fence()
        self._reports.surface()

    def _require_open(self) -> None:
        require(not self._closed, "this checkpointer is closed", "Open a new one.")
        require(self._process == os.getpid(), "this checkpointer was opened in another process", "Open one here.")
        opened, now = self._ranks.size, world_size()
        require(
            now in (opened, 1),
            f"opened by a world of {opened}, and called in a group of {now} ranks",
            "Call torch.distributed.init_process_group() before opening the run.",
        )
