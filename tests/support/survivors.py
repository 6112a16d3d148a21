"""A training script whose ranks are killed, and what is compared after a survivor has saved for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lastgood.format import commit
from lastgood.records import Generation
from lastgood.run import access
from lastgood.supervisor.placement import free_port

COMMAND = [str(Path(sys.executable).with_name("lastgood")), "run", "--preload", "lastgood.loop.checkpointer"]

TRAINING = """
import os, random, signal, sys, threading
import numpy, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import lastgood
from lastgood.run import node_disks, survivor_save

kind, run, last, troubles = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
dist.init_process_group("gloo")
rank, size, attempt = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
saved = 0
random.seed(rank), numpy.random.seed(rank), torch.manual_seed(0)
layers = torch.nn.Linear(4, 9), torch.nn.BatchNorm1d(9), torch.nn.Dropout(0.5), torch.nn.Linear(9, 5)
model = torch.nn.Sequential(*layers)
torch.manual_seed(rank)
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    shape = (2, size // 2) if kind == "hsdp" else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape):])
    fully_shard(model[0], mesh=mesh), fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "losses": []}
kept = lastgood.Keep(last=99)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


if f"kill_saving:{attempt}" in troubles:
    survivor_save.HeldWriter.write = die
served = node_disks.NodeFiles.served


def busy(files, request, stop):
    if request["call"] == "delete" and f"no_deletions:{attempt}:{rank}:{saved}" in troubles:
        threading.Event().wait()
    return served(files, request, stop)


node_disks.NodeFiles.served = busy
options = {"cadence": lastgood.Every(steps=5), "retention": kept, "just_in_time_seconds": 20}
if tier := os.environ.get("TEST_FIRST_TIER"):
    options["tiers"] = [lastgood.Tier(tier, cadence=lastgood.Every(steps=3))]
with lastgood.Checkpointer(run, state, **options) as ckpt:
    usual = lastgood.Checkpointer(run + ".usual", state, cadence=lastgood.Every(steps=1), retention=kept)
    start = ckpt.restore().step
    usual.restore(step=start)
    for n in range(start + 1, last + 1):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4) + numpy.random.rand()).pow(2).mean()
        if f"kill:{attempt}:{rank}:{n}" in troubles:
            die()
        loss.backward()
        optimizer.step()
        if f"kill_late:{attempt}:{rank}:{n}" in troubles:
            die()
        dist.all_reduce(loss.detach().clone())
        state["losses"].append([n, loss.item()])
        save = ckpt.step(n)
        if save is not None:
            save.committed()
            saved = n
        usual.step(n).committed()
    usual.close()
"""


def supervised(folder: Path, *arguments: object, ranks: int) -> subprocess.CompletedProcess[str]:
    """Train on the ranks of one node. `arguments`: of the script: "ddp", "hsdp" or "fsdp", the run, the last step, and
    troubles."""
    script = folder / "train.py"
    script.write_text(TRAINING)
    command = [*COMMAND, "--nproc-per-node", str(ranks), str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def supervised_nodes(folder: Path, *arguments: object, nodes: int, ranks: int) -> list[str]:
    """The same on several nodes, each a supervisor of this machine, which all end with 0. Returns what each has written
    to stderr."""
    script, port = folder / "train.py", free_port("127.0.0.1")
    script.write_text(TRAINING)
    started = list[subprocess.Popen[bytes]]()
    for node in range(nodes):
        # No node is lost here: a machine that is busy for some seconds must not look like one.
        conf = f"is_host={'false' if node else 'true'},last_call_timeout=1,keep_alive_max_attempt=30"
        place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf]
        options = ["--nnodes", str(nodes), *place, "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
        with open(folder / f"node-{node}.log", "wb") as log:
            environment = {**os.environ, "LASTGOOD_NODE": f"node{node}"}
            command = [*COMMAND, *options, str(script), *map(str, arguments)]
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        codes = [one.wait(300) for one in started]
    finally:
        for one in started:
            one.kill()
    logs = [(folder / f"node-{node}.log").read_text() for node in range(nodes)]
    assert codes == [0] * nodes, logs
    return logs


def content(run: str, step: int) -> list[Any]:
    """What each rank restores of a step: its tensors, of which some are its own, and its values."""
    tier = access.for_reading(run)
    found: list[Generation] = [one for one in commit.survey(tier).generations.values() if one.step == step]
    assert len(found) == 1
    ranks = range(found[0].commit.world.ranks)
    manifests = [commit.read_manifest(tier, found[0], rank) for rank in ranks]
    shared = {one.key: one.digest for of in manifests for one in of.pieces if not one.own}
    tensors = [shared | {one.key: one.digest for one in of.pieces if one.own} for of in manifests]
    return [tensors, [of.values for of in manifests], [of.aliases for of in manifests]]
