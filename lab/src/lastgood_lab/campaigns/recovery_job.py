"""The training that each rank of the campaign recovery.py runs under `lastgood run`, with the faults of its plan.

    lastgood run --nproc-per-node 4 -m lastgood_lab.campaigns.recovery_job FOLDER FIRST

FOLDER has plan.json, and receives the notes of the ranks. FIRST: the number of attempts that earlier supervisors of the
job have made. Judges nothing.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import lastgood
from lastgood.errors import LastgoodError
from lastgood.io import files
from lastgood_lab.campaigns.recovery_faults import (
    RESTORE_CALLS,
    SLOW_STEPS,
    SURVIVED,
    Attempt,
    Calls,
    Injector,
    Notes,
    Plan,
    empty,
)

SAMPLES, BATCH, SAVE_STEPS, CHECK_STEPS = 512, 16, 3, 2
GROUP_SECONDS, TIMEOUT_SECONDS = 20.0, 10.0
"""how long a collective and an agreement about a save may take"""


class Probe:
    """A part of the state whose loading may fail. `injector`: makes it fail."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    def state_dict(self) -> dict[str, int]:
        return {"version": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fault = self._injector.due("restore")
        if fault is not None and fault.kind == "exception":
            self._injector.reach("restore")


class Training:
    """Data parallel training of a small network, with dropout. The samples have ids."""

    def __init__(self, rank: int, size: int, injector: Injector) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))
        # With find_unused_parameters the buckets of gradients stay as they are after the first step (docs/ranks.md).
        self.model = nn.parallel.DistributedDataParallel(network, find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        samples = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
        self.data = torch.utils.data.TensorDataset(samples, torch.arange(SAMPLES) % 4, torch.arange(SAMPLES))
        self.sampler = lastgood.ResumableSampler(SAMPLES, global_batch=BATCH, seed=2, rank=rank, world_size=size)
        self.audit, self._injector = lastgood.Audit(), injector
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "sampler": self.sampler,
            "audit": self.audit,
            "probe": Probe(injector),
        }

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor, event: str | None) -> torch.Tensor:
        """One step. `event`: the phase whose faults happen within it."""
        self.audit.observe(*self.sampler.position, ids)
        self._reach(event, (0.0, 0.33))
        self._injector.in_step()
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        if self._injector.poisoned:
            loss = loss * float("nan")
        self.optimizer.zero_grad()
        loss.backward()
        self._reach(event, (0.33, 0.66))
        self.optimizer.step()
        self._reach(event, (0.66, 1.0))
        self._injector.poisoned = False
        return loss.detach()

    def _reach(self, event: str | None, moment: tuple[float, float]) -> None:
        if event is not None:
            self._injector.reach(event, moment)

    def digest(self) -> str:
        """Of every bit of weights and optimizer state."""
        tensors = [*self.model.state_dict().values()]
        tensors += [one for row in self.optimizer.state.values() for one in row.values()]
        return hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest()


class Schedule:
    """In which steps of an attempt which faults happen. `restored`: the step from which it goes on.

    The first save comes at `first`, the faults two or more steps later: then the supervisor has seen the first save.
    """

    def __init__(self, attempt: Attempt, restored: int, total: int) -> None:
        self._faults = attempt.faults
        self.restored, self.first = restored, restored + SAVE_STEPS - restored % SAVE_STEPS
        self.second = self.first + SAVE_STEPS
        even = self.second + 1 + (self.second + 1) % CHECK_STEPS
        slow_steps = SLOW_STEPS if any(one.kind == "slow" for one in attempt.faults) else 0
        self.last = even + slow_steps if attempt.ends else total

    def event(self, step: int, window: tuple[int, int]) -> str | None:
        """The phase whose faults happen within a step. NaN comes into the loss in a step, whatever its phase."""
        for one in self._faults:
            at = {"restore": self.restored + 1, "step": self.first + 2, "save": self.second, "commit": self.second + 1}
            by_phase = at.get(one.phase, self.last) if one.kind == "nan" else self.first + 2
            due = one.step or by_phase if one.window is None else step if window == (0, one.window) else 0
            if due == step and (one.phase == "step" or one.kind == "nan"):
                return one.phase
        return None


class Loop:
    """The steps of one attempt on this rank."""

    def __init__(
        self,
        training: Training,
        ckpt: lastgood.Checkpointer,
        schedule: Schedule,
        injector: Injector,
        calls: Calls,
        notes: Notes,
    ) -> None:
        self._training, self._ckpt, self._schedule = training, ckpt, schedule
        self._injector, self._calls, self._notes = injector, calls, notes
        self._calls_of_save = 0

    def step(self, step: int, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """One step, with what happens in it and in the save that it begins."""
        injector, schedule = self._injector, self._schedule
        injector.step = step
        event = schedule.event(step, self._training.sampler.position)
        loss = self._training.step(*batch, event)
        faults = [injector.due(phase) for phase in ("save", "commit")]
        due = next((one.phase for one in faults if one is not None and one.kind != "nan"), None)
        if step == schedule.first:
            self._calls.arm("none", 0)
        elif step == schedule.second and due is not None:
            self._calls.arm(due, self._calls_of_save)
        if step <= schedule.second:
            injector.refill()
        save = self._ckpt.step(step, metrics={"loss": loss})
        self._notes.note("step", step=step, loss=float(loss).hex())
        if save is not None and (step != schedule.second or due is None):
            self._await(save)
        if due is not None and step == schedule.second:
            injector.await_strike(due)
        elif due is not None and step > schedule.second:
            injector.reach(due)  # the save made fewer calls than were expected

    def _await(self, save: lastgood.Save) -> None:
        """Wait for a save, so that the next step shows it."""
        try:
            save.committed()
            self._notes.note("saved", step=save.step)
        except LastgoodError as error:
            self._notes.note("not saved", step=save.step, error=f"{type(error).__name__}: {error}"[:300])
        self._calls_of_save = self._calls_of_save or self._calls.disarm()


def train(plan: Plan, attempt: Attempt, injector: Injector, notes: Notes) -> None:
    """The training of this rank, from the rendezvous to the end."""
    with injector.rendezvous():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=GROUP_SECONDS))
    rank, size = dist.get_rank(), dist.get_world_size()
    training, calls = Training(rank, size, injector), Calls(injector)
    vars(files)["os"] = calls
    cadence, sentinel = lastgood.Every(steps=SAVE_STEPS), lastgood.Sentinel(every=CHECK_STEPS)
    group = lastgood.Ranks(patience=TIMEOUT_SECONDS)
    options: dict[str, Any] = {"cadence": cadence, "sentinel": sentinel, "ranks": group}
    with lastgood.Checkpointer(Path(plan.room) / "run", training.state, **options) as ckpt:
        restored = _restored(ckpt, injector, calls)
        notes.note("restored", step=restored)
        if not restored:
            for epoch, window in plan.skipped:
                training.sampler.skip(epoch, window, 1)
        step, schedule = restored, Schedule(attempt, restored, plan.total)
        loop = Loop(training, ckpt, schedule, injector, calls, notes)
        while step < schedule.last:
            for batch in training.sampler.loader(training.data):
                step += 1
                loop.step(step, batch)
                if step == schedule.second + 1 and rank == 0:
                    empty(Path(plan.room), notes.attempt)
                if step == schedule.last:
                    break
    injector.reach("teardown", (0.0, 0.5))
    _finish(training, notes, step)
    injector.reach("teardown", (0.5, 1.0))
    # Not by returning: a DDP model that outlives its group may wait for ever when it is deleted (docs/ranks.md).
    os._exit(SURVIVED if attempt.ends else 0)


def _restored(ckpt: lastgood.Checkpointer, injector: Injector, calls: Calls) -> int:
    """Restore. Returns the step."""
    fault = injector.due("restore")
    if fault is not None and fault.kind not in ("exception", "nan"):
        calls.arm("restore", RESTORE_CALLS)
    step = ckpt.restore().step
    calls.disarm()
    if fault is not None and fault.kind != "nan":
        injector.reach("restore")
    return step


def _finish(training: Training, notes: Notes, step: int) -> None:
    """Compare the samples of all ranks with those that were scheduled, and note what the training has become."""
    audits: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(audits, training.audit)
    report = lastgood.Audit.merge(audits).report(training.sampler)
    skipped = training.sampler.skipped
    notes.note(
        "end", step=step, digest=training.digest(), exact=report.exact, skipped=skipped, samples=report.scheduled
    )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder, first = Path(sys.argv[1]), int(sys.argv[2])
    plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=Plan)
    number, rank = first + int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    attempt = plan.attempts[number] if number < len(plan.attempts) else Attempt(ends=False)
    notes = Notes(folder / "notes.jsonl", number, rank)
    notes.note("start", pid=os.getpid())
    room = Path(plan.room)
    if rank == 0:
        empty(room, number - 1)  # another rank may have filled the disk in this one
    mine = [one for one in attempt.faults if one.rank == rank]
    injector = Injector(mine, notes, int(os.environ["MASTER_PORT"]), room)
    injector.reach("start")
    warnings.simplefilter("ignore")
    train(plan, attempt, injector, notes)


if __name__ == "__main__":
    main()
