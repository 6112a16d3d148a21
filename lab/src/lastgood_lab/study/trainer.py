"""The training of one unit: `lastgood run ... -m lastgood_lab.study.trainer UNIT IMAGES RUN`, on each rank.

The loop is an ordinary one under DistributedDataParallel, for any number of ranks. Faults come after the steps that the
unit names, one in each attempt (faults.py).
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import lastgood
from lastgood.errors import LastgoodError

from . import faults, images
from .networks import network
from .unit import Unit

TO_DIRECTORY = 4
"""Of the saves in memory every fourth one goes to the directory too."""


def train(unit: Unit, data: Path, run: str) -> None:
    """Train until the target of the unit, or until the failure of this attempt."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(unit.seed)
    pictures, labels, classes = images.read(data)
    # The buckets of gradients must not change after the first step of an attempt (docs/ranks.md).
    model = DistributedDataParallel(
        network(unit.model, unit.size.width, classes), find_unused_parameters=True, broadcast_buffers=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler, audit = _sampler(unit, len(labels)), lastgood.Audit()
    loader = sampler.loader(TensorDataset(pictures, labels, torch.arange(len(labels))))
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "audit": audit}
    with opened(unit, run, state) as ckpt:
        step, loss = ckpt.restore().step, torch.zeros(())
        if step == 0 and unit.variant == "ref":
            for epoch, window in unit.left_out(sampler.steps_per_epoch):
                sampler.skip(epoch, window, 1)
        faults.begin(unit)
        saves = Saves(unit, ckpt)
        while step < unit.target:
            for inputs, targets, ids in loader:
                audit.observe(*sampler.position, ids)
                with contextlib.nullcontext() if loader.completes_step else model.no_sync():
                    part = F.cross_entropy(model(inputs.float() / 255), targets) * loader.weight
                    if faults.poisons(unit, step):
                        part = part * float("nan")
                    part.backward()
                loss += part.detach()
                if not loader.completes_step:
                    continue
                time.sleep(unit.size.device_ms / 1000)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                saves.completed(step, loss)
                loss = torch.zeros(())
                if step == unit.target:
                    break


def _sampler(unit: Unit, samples: int) -> lastgood.ResumableSampler:
    """The order of the samples. On fewer ranks than the unit has, each trains several batches of the same size."""
    rank, world, size = dist.get_rank(), dist.get_world_size(), unit.size
    largest = size.global_batch // size.ranks
    return lastgood.ResumableSampler(
        samples, size.global_batch, unit.seed, rank=rank, world_size=world, largest_batch=largest
    )


def opened(unit: Unit, run: str, state: dict[str, object]) -> lastgood.Checkpointer:
    """The run of the unit, on its storage."""
    every, tiers = unit.save_every, list[lastgood.Tier]()
    if unit.in_memory:
        copies = 2 if unit.storage == "peers" else 1
        tiers = [lastgood.Tier("memory://", cadence=lastgood.Every(steps=every), copies=copies)]
        every *= TO_DIRECTORY
    return lastgood.Checkpointer(
        run,
        state,
        cadence=lastgood.Every(steps=every),
        retention=lastgood.Keep(last=unit.target),  # all of them: they are compared afterwards
        tuning=lastgood.Tuning(in_flight=unit.size.max_inflight),
        tiers=tiers,
        sentinel=lastgood.Sentinel(every=1) if unit.rules.poisons else None,
    )


class Saves:
    """The saves of one attempt, and the fault that comes after one of its steps."""

    def __init__(self, unit: Unit, ckpt: lastgood.Checkpointer) -> None:
        self._unit, self._ckpt = unit, ckpt
        self._newest: lastgood.Save | None = None

    def completed(self, step: int, loss: torch.Tensor) -> None:
        """A step is completed: save it if that is due, wait as the variant does, and fail if that is due."""
        unit = self._unit
        begun = self._ckpt.step(step, metrics={"loss": loss})
        self._newest, fails = begun or self._newest, faults.due(unit, step)
        flushes = fails and unit.flushed
        if self._newest is not None and (flushes or (begun is not None and unit.variant != "ovl")):
            self._wait(self._newest)  # older ones have ended, or count no more
            if flushes and self._newest.step == step:
                self._ckpt.save(step)  # which exists: the call logs that it is durable
            if flushes and unit.storage == "peers":
                self._ckpt.wait()  # until other nodes have copies
        if fails:
            faults.happen(unit)

    def _wait(self, save: lastgood.Save) -> None:
        """Wait until a save has ended. It may have failed where the unit makes writes fail."""
        try:
            save.result()
        except LastgoodError:
            if self._unit.condition != "errors":
                raise


def main(unit: Unit, data: Path, run: str) -> None:
    """Train a unit, on the file system that its condition has."""
    with faults.files(unit):
        dist.init_process_group("gloo")
        train(unit, data, run)  # which lets go of the model, so that it is not the last owner of the group
        dist.destroy_process_group()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Unit), Path(sys.argv[2]), sys.argv[3])
