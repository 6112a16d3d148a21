"""Sentinel: training that diverges is noticed within a few steps, and does not go on from what it has become.

    each step        loss and gradient norm are kept                    on their device, no synchronization
    every few steps  finite, and no spike? MAX over the ranks           one small all-reduce
    on a hit         advice for restores; a generation for people; TrainingDiverged on all ranks at the same step

In a single process, what is on a CUDA device is copied to the host behind the loop, and read at the next step, so that
the device has work while the host waits; before a save and at the end it is read at once. Several ranks compare at
once: what follows must come at the same step on all of them.

The next restore, in this process or another one, goes back to the newest generation before the first bad step, and
leaves out the batches from that step on (run/advice.py). Retention keeps one of the steps that were compared, so that
there is such a generation however often saves are made. Everything here runs on the training thread.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from msgspec.structs import replace

from .. import reporting
from ..coordination.single_rank import AnyRanks
from ..errors import LastgoodError, Refused, TrainingDiverged
from ..format import layout
from ..io.heartbeat import Position
from ..limits import STEP_LIMIT
from ..policy.cadence import Every
from ..policy.restore import choose
from ..ranks.torch_store import among_ranks, device_of_group
from ..records import GenerationId
from ..run import advice, side_records
from ..run.advice import Advice, Skip
from ..run.pipeline import Pipeline
from ..units import plural
from . import suspects
from .beat import Beat
from .metrics import number, whole
from .options import Options
from .progress import Progress
from .saver import Saver
from .sentinel_options import Sentinel

WARM_STEPS = 20
"""A spike is looked for once so many steps have given a mean, after each start."""
OVERFLOWS = 100
"""So many norms in a row that are not finite are the search of a GradScaler for its scale; it halves it each time, and
after more of them it is zero, and nothing is trained."""
DECAY = 0.98
"""of the running mean of each value"""


class DivergenceCheck:
    """The sentinel of one `Checkpointer`. `url`: of the run's durable place, which receives the advice.

    Without `options.sentinel` nothing is looked at, and every method returns at once.
    """

    def __init__(
        self,
        options: Options,
        url: str,
        pipeline: Pipeline,
        saver: Saver,
        progress: Progress,
        ranks: AnyRanks,
        beat: Beat,
    ) -> None:
        self._options, self._url, self._pipeline, self._saver = options.sentinel, url, pipeline, saver
        self._progress, self._ranks, self._beat = progress, ranks, beat
        self._pending: tuple[_Values, dict[int, Position]] | None = None
        """what is to be compared once a device has copied it: metrics, and the windows that their steps have trained"""
        self._at_end: Exception | None = None
        self._found = list[Advice]()
        """at the coordinator: what is known of the steps that have diverged, also of those that are not left out"""
        self.restart()
        slots_alone = pipeline.run.tier.newest_only and not options.tiers
        if options.sentinel and slots_alone and ranks.size > 1 and ranks.is_coordinator:
            _report_late(options.sentinel, options.cadence)

    def restart(self) -> None:
        """The state was restored, or nothing was trained yet: what was seen before counts no more."""
        self._seen, self._last = self._nothing_seen(), self._progress.step
        self._trained = dict[int, Position]()
        """step -> the windows that it has trained, since the last comparison"""
        self._pending = None
        if self._options is not None:
            self._pipeline.places.note_compared(self._last)

    def _nothing_seen(self) -> _Seen:
        """What was seen of the metrics, before the first step. Without a Sentinel no scaler is looked for."""
        return _Seen(self._options, scaled=self._options is not None and self._progress.scales_loss())

    def check(self, n: int, metrics: Mapping[str, Any] | None, at_once: bool) -> None:
        """Look at the metrics of step `n`. `at_once`: whether the loop is about to end.

        Raises TrainingDiverged, on all ranks at the same step; Refused where a metric is missing or no number.
        """
        if self._options is None:
            return
        try:
            self._seen.add(n, whole(metrics) or {})
        except KeyError as missing:
            raise Refused(
                f"step({n}) without metrics[{missing}], which the sentinel looks at",
                safe="Nothing was touched.",
                todo="Give it in each step: step(n, metrics={'loss': loss}), or name other metrics in Sentinel(...).",
            ) from None
        if (trained := self._progress.trained) is not None:
            self._trained[n] = trained
        before, self._last = self._last, n
        # At the same steps after each restart. Of several ranks each may learn at another step that the loop is to end.
        if n // self._options.every > before // self._options.every or (at_once and self._ranks.size == 1):
            self.settle()
            self._take()
            at_once |= self._pending is not None and (self._pending[0].copied is None or among_ranks())
        elif self._pending is not None:
            at_once = True
        if at_once:
            self.settle()

    def before_save(self) -> None:
        """Compare what is pending; in slots, which keep no older generation, all steps, if there is one rank: of
        several each may have a save due at another step. Raises what `check` raises."""
        self.settle()
        alone = self._options is not None and self._ranks.size == 1
        if alone and self._pipeline.run.tier.newest_only:  # guard: compared-before-saved-to-slots
            self._take()
            self.settle()

    def _take(self) -> None:
        """Take the metrics of the steps so far, to be compared."""
        self._pending, self._trained = (self._seen.taken(), self._trained), {}

    def settle(self) -> None:
        """Compare what is pending: a step later, before a save, and at the end. Raises what `check` raises."""
        if self._pending is None:
            return
        (values, trained), self._pending = self._pending, None
        first = _earliest(self._seen.first_bad(values))
        if first is not None:
            self._trained = {**trained, **self._trained}
            with self._beat.saving():
                self._stop(self._progress.step, first)
        if values.rows:
            self._pipeline.places.note_compared(values.rows[-1][0])  # guard: compared-steps-noted

    def finish(self) -> None:
        """At a normal end of the loop: compare the last steps too, fewer than `every`. All ranks call it, and agree
        through their store, where a rank that does not come is an error. Raises what `check` raises."""
        self.settle()
        if self._options is None:
            return
        mine = self._seen.first_bad(self._seen.taken())
        first = self._ranks.topic("diverged at the end").agree(mine, _least)  # guard: last-steps-compared
        if first is not None:
            with self._beat.saving():
                self._stop(self._progress.step, first)

    def end(self) -> None:
        """When the run is closed, and no exception ends the loop: as `finish`, for one rank; several end a comparison
        that is under way. What it raises, also a device that has failed, is raised by `report`, once the run is
        closed."""
        try:
            if sys.exc_info()[0] is not None:
                return
            if self._ranks.size == 1:
                self.finish()
            else:
                self.settle()
        except Exception as error:  # noqa: BLE001 - `report` raises it
            self._at_end = error  # guard: failed-comparison-closes-run

    def report(self) -> None:
        """Raise what `end` has found."""
        if self._at_end is not None:
            raise self._at_end

    def _stop(self, n: int, first: int) -> NoReturn:
        """Write advice, keep the state for people, and raise TrainingDiverged."""
        self._pipeline.wait()  # guard: saves-in-flight-are-suspect
        if self._pipeline.run.known.incarnation is None:  # nothing was saved or restored: the advice needs its name
            self._pipeline.run.begin(None)
        mine = self._seen.described(first)
        what = self._ranks.topic("diverged").agree(mine, _joined)
        # The advice first: if the process dies in between, no restore takes the state that is saved then.
        topic = self._ranks.topic("diverged advice")
        alone = len(self._progress.samplers) == 1  # on all ranks, or restores leave nothing out
        todo, left_out, for_ever, base = topic.agree(
            alone, lambda posts: (*self._advised(n, first, what, all(posts)), self._base(first))
        )
        kept = self._kept(n, for_ever and not self._pipeline.run.tier.newest_only)
        self._mark_suspects()
        if not left_out:
            self._beat.diverged(base)  # guard: diverged-step-is-no-progress, shown-step-was-saved
        # Who catches the error and leaves the `with` does not receive it again.
        self._seen = self._nothing_seen()
        raise TrainingDiverged(f"training has diverged: {what}", safe=f"{kept}{_SAFE}", todo=todo)

    def _kept(self, n: int, for_ever: bool) -> str:
        """Save the state as it is, for people. Returns what was done."""
        last = self._saver.last
        had = last is not None and last.step == n and not last.failed()
        done, failed = f"Step {n} was saved as it is, for people", "The state was not saved"
        if had:
            done, failed = f"Step {n} had been saved already", f"Step {n} had been saved already, and may be deleted"
        try:
            if had and last is not None:
                self._pipeline.pin_and_label(last, for_ever, {}).result()  # guard: saved-step-kept-for-people
            elif (save := self._saver.save(n, for_ever, {}, must=True)) is not None:
                save.result()
            self._pipeline.wait()
        except LastgoodError as error:
            return f"{failed} ({type(error).__name__}: {error.what}). "
        return f"{done}. "

    def _mark_suspects(self) -> None:
        """Mark what has diverged, at the coordinator: until the next restore others would take it for good."""
        try:
            over = suspects.start_over(self._pipeline, self._found)
            kept = suspects.set_aside(self._pipeline, self._found, over)  # guard: suspects-marked-at-once
        except LastgoodError as error:
            reporting.threat(f"what has diverged has no mark, which only restores of the newest step know: {error}")
            return
        for one in kept:
            reporting.threat(f"{one.suspect} is suspect, and nothing good was saved before it: restores take it")

    def _diverged(self, n: int, first: int) -> list[GenerationId]:
        """What may hold what has diverged, with that of step `n`, which is saved for people."""
        known = self._pipeline.run.known
        if known.incarnation is None:
            return []
        mine = [at for at in known.view.generations if at.incarnation == known.incarnation.id]
        next_one = GenerationId(step=n, incarnation=known.incarnation.id)
        return [*(at for at in mine if at.step >= first), next_one]

    def _advised(self, n: int, first: int, what: str, alone: bool) -> tuple[str, bool, bool]:
        """Write the advice, at the coordinator. `alone`: whether each rank has one sampler. Returns the remedy for the
        user, whether batches are left out, and whether the state is kept for ever: not if the same step fails again."""
        assert self._options is not None
        diverged, saved = self._diverged(n, first), self._saver.first_step
        from_start = not self._progress.restored_generation and (saved is None or saved >= first)
        try:
            with side_records.opened(self._url) as tier:
                earlier = [one for one in advice.read(tier) if one.by == "sentinel"]
                times = len({one.at for one in earlier})
                permitted = times < self._options.at_most  # guard: skips-of-sentinel-bounded
                self._found = self._pieces(n, first, what, diverged, from_start and permitted)
                skips = [one for one in self._found if one.skip is not None and permitted and alone]
                for one in (*(one for one in self._found if one.suspect is not None), *skips):
                    advice.append(tier, one)
        except LastgoodError as error:
            reporting.threat(f"the advice for the next restore was not written: {error}")
            self._found = self._pieces(n, first, what, diverged, False)  # guard: suspects-marked-without-advice
            return f"Restore a step before {first}: restore(step=...).", False, False
        is_new = first not in {one.step for one in earlier}
        if not permitted:
            remedy = f"This is time {times + 1} (Sentinel.at_most), and no more batches are left out: look at the data."
            return remedy, False, is_new
        again, back = "Start the process again: it begins at step 0", "restore() goes back to before step"
        where = again if from_start else f"{back} {first}"
        if not skips:
            unknown = "it is not known with which batches these steps were trained"
            why = unknown if alone else "the state does not hold exactly one ResumableSampler"
            remedy = f"{where}, and trains the same batches again, because {why}: look at the data."
            return remedy, False, is_new
        return f"{where}, and leaves its batches out: `lastgood run` calls for it.", True, is_new

    def _base(self, first: int) -> int:
        """The step of the generation to which a restore goes back that takes none from `first` on; 0: there is none."""
        candidates = choose(self._pipeline.run.known.view, None).candidates
        return max((at.step for at in candidates if at.step < first), default=0)

    def _pieces(self, n: int, first: int, what: str, diverged: list[GenerationId], from_start: bool) -> list[Advice]:
        why = f"training diverged: {what}"
        made = Advice(format=layout.FORMAT, by="sentinel", at=time.time(), step=first, why=why, from_start=from_start)
        found = [replace(made, suspect=one) for one in diverged]
        for step, trained in self._trained.items():
            if first <= step <= n:
                for epoch, windows, ids in self._progress.samples(trained):
                    left_out = Skip(epoch=epoch, first=windows.start, count=len(windows), samples=ids)
                    found.append(replace(made, skip=left_out))
        return found


_SAFE = "Generations from before are untouched."


def _report_late(options: Sentinel, cadence: Every | Literal["auto"]) -> None:
    """Report saves to slots of several ranks whose steps are not compared before, because they replace older ones."""
    steps = None if cadence == "auto" or cadence.seconds is not None else cadence.steps
    if options.every > 1 and (steps is None or steps % options.every):  # guard: late-comparison-in-slots-reported
        reporting.threat(
            f"slots keep the newest save only, and this Sentinel compares every {options.every} steps: a save in "
            f"between may replace the last good state by one that has diverged. Give cadence=Every(steps="
            f"{options.every}), or a multiple of it, or put the run into a directory"
        )


class _Values(NamedTuple):
    """Metrics of some steps. `rows`: step -> its metrics: numbers, or None for one that is in `host`, in this order.

    `host`: what was on a device; None: nothing was. `copied`: reached once it is filled; None: it is.
    """

    rows: list[tuple[int, list[float | None]]]
    host: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None

    def numbers(self) -> Iterator[tuple[int, list[float]]]:
        """Step -> its metrics. Waits for the device."""
        if self.copied is not None:
            self.copied.synchronize()
        found = iter(() if self.host is None else self.host.tolist())
        for n, row in self.rows:
            yield n, [next(found) if one is None else one for one in row]


class _Seen:
    """The metrics of the steps since the last comparison, and the running mean of each. Rank by rank.

    `scaled`: whether a GradScaler scales the loss: it takes a norm that is not finite for a sign that its scale is too
    large, and leaves that update out.
    """

    def __init__(self, options: Sentinel | None, scaled: bool) -> None:
        self._names, self._spike = (options.names, options.spike) if options else ([], None)
        norm = options.grad_norm if options and scaled else None
        self._overflow = [name == norm for name in self._names]
        self._rows = list[tuple[int, list[float | None]]]()
        self._on_device = list[torch.Tensor]()
        self._overflows = 0
        """so many steps in a row had a norm that is not finite"""
        self._means, self._count = [0.0] * len(self._names), 0
        self._bad: tuple[int, str] | None = None

    def add(self, n: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of a step; none of them if one is missing, for which KeyError is raised, or no number, for
        which Refused is.

        A tensor on a device is copied there: a later step may overwrite it.
        """
        row, on_device = list[float | None](), list[torch.Tensor]()
        for name in self._names:
            if name not in metrics or metrics[name] is None:  # a mapping may have a default
                raise KeyError(name)
            metric = metrics[name]
            if isinstance(metric, torch.Tensor) and not (metric.is_cpu or metric.shape or metric.is_complex()):
                on_device.append(metric.detach().to(torch.float32, copy=True))
                row.append(None)
            else:
                row.append(number(name, metric))  # guard: metric-of-a-wrong-kind-refused
        self._rows.append((n, row))
        self._on_device += on_device

    def taken(self) -> _Values:
        """What was kept since the last call, on its way to the host. Does not wait for a device."""
        rows, self._rows = self._rows, []
        kept, self._on_device = self._on_device, []
        if not kept:
            return _Values(rows)
        device = kept[0].device
        gathered = torch.stack([one.to(device, non_blocking=True) for one in kept])
        if device.type != "cuda":
            return _Values(rows, gathered.cpu())
        host = torch.empty(len(kept), dtype=gathered.dtype, device="cpu", pin_memory=True)
        host.copy_(gathered, non_blocking=True)
        return _Values(rows, host, torch.cuda.current_stream(device).record_event())

    def first_bad(self, values: _Values) -> int | None:
        """The first bad step of this rank; None if there is none. Waits until `values` are on the host."""
        for n, numbers in values.numbers():
            overflows = [may and not math.isfinite(one) for may, one in zip(self._overflow, numbers, strict=True)]
            judged = [mean if out else one for out, one, mean in zip(overflows, numbers, self._means, strict=True)]
            self._overflows = self._overflows + 1 if any(overflows) else 0
            judged = judged if self._overflows <= OVERFLOWS else numbers  # guard: overflows-end
            if self._bad is None and self._is_bad(judged):
                means = [f" (mean {mean:.6g})" if self._count else "" for mean in self._means]
                pairs = zip(self._names, numbers, means, strict=True)
                listed = ", ".join(f"{name} {value:.6g}{mean}" for name, value, mean in pairs)
                self._bad = n, f"step {n}: {listed}"
            elif not any(overflows):  # guard: overflow-is-no-hit
                old = DECAY if self._count else 0.0
                self._means = [old * mean + (1 - old) * now for mean, now in zip(self._means, numbers, strict=True)]
                self._count += 1
        return None if self._bad is None else self._bad[0]

    def described(self, first: int) -> str:
        """What was bad on this rank at the step `first`; empty if it was another rank."""
        return self._bad[1] if self._bad is not None and self._bad[0] == first else ""

    def _is_bad(self, values: list[float]) -> bool:
        if not all(map(math.isfinite, values)):  # guard: non-finite-metric-found
            return True
        if self._spike is None or self._count < WARM_STEPS:
            return False
        pairs = zip(values, self._means, strict=True)
        return any(value > mean + (self._spike - 1) * abs(mean) for value, mean in pairs)  # guard: spike-found


def _earliest(first: int | None) -> int | None:
    """The first bad step of any rank; None if there is none. All ranks call it."""
    if not among_ranks():
        return first
    early = torch.tensor(STEP_LIMIT - first if first is not None else 0, device=device_of_group())
    dist.all_reduce(early, dist.ReduceOp.MAX)  # guard: ranks-agree-on-divergence
    found = int(early.item())
    return STEP_LIMIT - found if found else None


def _least(posts: list[int | None]) -> int | None:
    return min((one for one in posts if one is not None), default=None)


def _joined(posts: list[str]) -> str:
    found = [f"rank {rank}, {text}" for rank, text in enumerate(posts) if text]
    more = f"; and {plural(len(found) - 1, 'more rank')}" if len(found) > 1 else ""
    # Gradients are summed over the ranks: the rank with the bad batch has a bad loss as well.
    return max(found, key=lambda one: one.count("nan") + one.count("inf")) + more
