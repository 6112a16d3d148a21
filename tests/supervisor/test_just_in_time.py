"""When a rank dies under `lastgood run`, a survivor saves the newest step for all ranks: real ranks that are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastgood.format import commit
from lastgood.records import Generation
from lastgood.run import access
from lastgood.supervisor import attempt_log

pytestmark = pytest.mark.slow

SUPERVISOR = [str(Path(sys.executable).with_name("lastgood")), "run", "--preload", "lastgood.loop.checkpointer"]

TRAINING = """
import os, random, signal, sys
import numpy, torch, torch.distributed as dist
import lastgood
from lastgood.run import survivor_save

run, last, troubles = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
random.seed(rank), numpy.random.seed(rank), torch.manual_seed(rank)
layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "losses": []}
kept = lastgood.Keep(last=99)

if f"kill_saving:{attempt}" in troubles:
    survivor_save.write_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
options = {"cadence": lastgood.Every(steps=5), "retention": kept, "just_in_time_seconds": 20}
with lastgood.Checkpointer(run, state, **options) as ckpt:
    usual = lastgood.Checkpointer(run + ".usual", state, cadence=lastgood.Every(steps=1), retention=kept)
    start = ckpt.restore().step
    usual.restore(step=start)
    for n in range(start + 1, last + 1):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4) + numpy.random.rand()).pow(2).mean()
        if f"kill:{attempt}:{rank}:{n}" in troubles:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        state["losses"].append([n, loss.item()])
        save = ckpt.step(n)
        if save is not None:
            save.committed()
        usual.step(n).committed()
    usual.close()
"""


def supervised(folder: Path, *arguments: object, ranks: int) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(TRAINING)
    command = [*SUPERVISOR, "--nproc-per-node", str(ranks), str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def content(run: str, step: int) -> list[Any]:
    """What the ranks have saved of a step: the tensors of all, and the values and the own tensors of each."""
    tier = access.for_reading(run)
    found: list[Generation] = [one for one in commit.survey(tier).generations.values() if one.step == step]
    assert len(found) == 1
    ranks = range(found[0].commit.world.ranks)
    manifests = [commit.read_manifest(tier, found[0], rank) for rank in ranks]
    shared = {(one.name, one.digest) for of in manifests for one in of.pieces if not one.own}
    own = [{(one.name, one.digest) for one in of.pieces if one.own} for of in manifests]
    return [shared, own, [of.values for of in manifests], [of.aliases for of in manifests]]


def test_survivors_save_what_all_ranks_would_have_saved(tmp_path: Path) -> None:
    """The steps since the last save were trained again after each death, though the survivors had their result."""
    run = str(tmp_path / "run")
    done = supervised(tmp_path, run, 14, "kill:0:2:8", "kill:1:0:13", ranks=4)
    assert done.returncode == 0, done.stderr
    attempts = attempt_log.read(access.for_reading(run))
    assert [one.restored_step for one in attempts] == [0, 7, 12]
    assert [one.replayed_steps for one in attempts] == [0, 0, 0]
    assert [one.cause.rank for one in attempts if one.cause is not None] == [2, 0]
    assert "rank 0 has saved step 7 for all ranks" in done.stderr
    assert content(run, 7) == content(f"{run}.usual", 7), "rank 0 has saved, and rank 2 was dead"
    assert content(run, 12) == content(f"{run}.usual", 12), "rank 0 was dead"


def test_a_survivor_that_dies_while_it_saves_leaves_the_last_good_one(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    done = supervised(tmp_path, run, 9, "kill:0:1:8", "kill_saving:0", ranks=2)
    assert done.returncode == 0, done.stderr
    attempts = attempt_log.read(access.for_reading(run))
    assert [one.restored_step for one in attempts] == [0, 5]
