"""The training script of demo/recovery.py: data parallel, on scikit-learn's digits, under `lastgood run`.

    lastgood run --nproc-per-node 4 demo/recovery_train.py runs/digits --steps 106 --lives lives.jsonl

It is a training script as a user would write it, with two additions for the demo: it notes when each rank has opened
and restored the run, and one of its losses becomes NaN if somebody leaves a file for it. It restarts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from train import Digits, network

import lastgood

BATCH = 128
POISONED_RANK = 1


class Notes:
    """Lines of JSON about this rank in a file that all ranks share; each line is one write."""

    def __init__(self, file: Path) -> None:
        self._file = file
        names = {"attempt": "TORCHELASTIC_RESTART_COUNT", "rank": "RANK", "local": "LOCAL_RANK"}
        self._me = {name: int(os.environ[variable]) for name, variable in names.items()}
        self._me |= {"pid": os.getpid(), "node": os.environ.get("LASTGOOD_NODE", "")}

    def add(self, what: str, **more: object) -> None:
        with open(self._file, "a", buffering=1) as file:
            file.write(json.dumps({"what": what, "at": time.monotonic(), **self._me, **more}) + "\n")


def poisoned(file: Path, rank: int) -> bool:
    """Whether a loss is to become NaN now: once for each time that the file was made."""
    if rank != POISONED_RANK or not file.exists():
        return False
    file.unlink()
    return True


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("run", help="directory of the run")
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--save-every", type=int, default=12, help="steps (default: %(default)s)")
    options.add_argument("--lives", type=Path, required=True, help="file that gets the notes of the ranks")
    options.add_argument(
        "--leave-out", default="[]", help="JSON: [epoch, window] of batches to leave out from the start"
    )
    args = options.parse_args()

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    notes = Notes(args.lives)

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = Digits()
    sampler = lastgood.ResumableSampler(len(digits), global_batch=BATCH, seed=0, rank=rank, world_size=world)
    for epoch, window in json.loads(args.leave_out):
        sampler.skip(epoch, window, 1)
    # find_unused_parameters keeps the buckets of gradients as they are after a restart (docs/ranks.md).
    model = nn.parallel.DistributedDataParallel(network(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    audit = lastgood.Audit()
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "audit": audit}

    cadence, sentinel = lastgood.Every(steps=args.save_every), lastgood.Sentinel(every=2)
    with lastgood.Checkpointer(args.run, state, cadence=cadence, sentinel=sentinel) as ckpt:
        notes.add("opened")
        restored = ckpt.restore().step
        notes.add("restored", step=restored)
        batches = chain.from_iterable(repeat(sampler.loader(digits)))  # epoch after epoch
        for step in range(restored + 1, args.steps + 1):
            images, labels, ids = next(batches)
            audit.observe(*sampler.position, ids)
            loss = F.cross_entropy(model(images), labels)
            if poisoned(args.lives.with_suffix(".nan"), rank):
                loss = loss * float("nan")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(step, metrics={"loss": loss.detach()})

    note_audit(notes, audit, sampler)
    dist.barrier()
    dist.destroy_process_group()


def note_audit(notes: Notes, audit: lastgood.Audit, sampler: lastgood.ResumableSampler) -> None:
    """Rank 0 notes what the audits of all ranks say at the end."""
    audits: list[lastgood.Audit | None] = [None] * dist.get_world_size()
    dist.all_gather_object(audits, audit)
    report = lastgood.Audit.merge(audits).report(sampler)
    if dist.get_rank() == 0:
        notes.add(
            "finished",
            scheduled=report.scheduled,
            observed=report.observed,
            exact=report.exact,
            left_out=sampler.skipped,
            samples_left_out=len(report.skipped),
        )


if __name__ == "__main__":
    main()
