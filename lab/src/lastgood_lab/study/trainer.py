"""The training of one unit: `lastgood run ... -m lastgood_lab.study.trainer UNIT IMAGES RUN`, on each rank.

The loop is an ordinary one under DistributedDataParallel. It fails after the steps that the unit names, one for each
attempt, when all ranks have completed the step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import lastgood
from lastgood.errors import LastgoodError
from lastgood.testing.faulty_files import Fault, FaultyFiles

from . import images
from .networks import network
from .unit import Unit

KILLED = 137


def train(unit: Unit, data: Path, run: str) -> None:
    """Train until the target of the unit, or until the failure of this attempt."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    torch.manual_seed(unit.seed)
    pictures, labels, classes = images.read(data)
    # The buckets of gradients must not change after the first step of an attempt (docs/ranks.md).
    model = DistributedDataParallel(
        network(unit.model, unit.size.width, classes), find_unused_parameters=True, broadcast_buffers=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = lastgood.ResumableSampler(
        len(labels), unit.size.global_batch, unit.seed, rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    audit = lastgood.Audit()
    loader = sampler.loader(TensorDataset(pictures, labels, torch.arange(len(labels))))
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "audit": audit}
    with lastgood.Checkpointer(
        run,
        state,
        cadence=lastgood.Every(steps=unit.save_every),
        retention=lastgood.Keep(last=unit.target),  # all of them: they are compared afterwards
        tuning=lastgood.Tuning(in_flight=unit.size.max_inflight),
    ) as ckpt:
        step, save = ckpt.restore().step, None
        while step < unit.target:
            for inputs, targets, ids in loader:
                audit.observe(*sampler.position, ids)
                loss = F.cross_entropy(model(inputs.float() / 255), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                begun = ckpt.step(step, metrics={"loss": loss})
                save, fails = begun or save, _fails(unit, step)
                flushes = fails and unit.size.flushed
                if save is not None and (flushes or (begun is not None and unit.variant != "ovl")):
                    _wait(unit, save)  # older ones have ended, or count no more
                    if flushes and save.step == step:
                        ckpt.save(step)  # which exists: the call logs that it is durable
                if fails:
                    _fail(unit)
                if step == unit.target:
                    break
    dist.destroy_process_group()


def _wait(unit: Unit, save: lastgood.Save) -> None:
    """Wait until a save has ended. It may have failed where the unit makes writes fail."""
    try:
        save.result()
    except LastgoodError:
        if unit.condition != "errors":
            raise


def _fails(unit: Unit, step: int) -> bool:
    """Whether this attempt fails after this step."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    return unit.failures[attempt : attempt + 1] == (step,)


def _fail(unit: Unit) -> None:
    """Fail as the unit says, once all ranks have completed the step."""
    dist.barrier()
    if unit.condition == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif unit.condition == "hang" and dist.get_rank() == 1:
        threading.Event().wait()  # a signal that asks for stacks does not end it
    elif unit.condition != "hang" and dist.get_rank() == 0:
        os._exit(KILLED)


def main(unit: Unit, data: Path, run: str) -> None:
    """Train a unit, over a file system that fails once in each attempt if that is its condition."""
    with contextlib.ExitStack() as held:
        if unit.condition == "errors" and int(os.environ["RANK"]) == unit.size.ranks - 1:
            files = held.enter_context(FaultyFiles().installed())
            files.inject(Fault("write", "*.safetensors", nth=3))
        train(unit, data, run)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Unit), Path(sys.argv[2]), sys.argv[3])
