"""A job whose store of the nodes moves: `--rdzv-endpoint` names several nodes, and the one that holds it is lost."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import until
from lastgood.policy.recovery import PREEMPTED
from lastgood.run import access
from lastgood.supervisor import attempt_log
from lastgood_lab import namespaces
from several import COMMAND, Nodes

pytestmark = pytest.mark.slow

TRAINING = """
import os, signal
import torch, torch.distributed as dist
import lastgood

attempt, node = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["LASTGOOD_NODE"]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def lose_node():
    os.kill(os.getppid(), signal.SIGKILL)  # the supervisor; the ranks, the membership and the store end with it
    signal.pause()


class LostInRestore:
    def state_dict(self):
        return {"nothing": 0}

    def load_state_dict(self, state):
        if (attempt, node) == (1, "b"):
            lose_node()


torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.AdamW(model.parameters())
sampler, audit = lastgood.ResumableSampler(144, global_batch=12, seed=0, rank=rank, world_size=world), lastgood.Audit()
state = {"model": model, "optimizer": optimizer, "sampler": sampler, "audit": audit, "lost": LostInRestore()}
with lastgood.Checkpointer("run", state, cadence=lastgood.Every(steps=3)) as ckpt:
    n = ckpt.restore().step
    for ids in sampler.loader(torch.arange(144)):
        audit.observe(*sampler.position, ids)
        if (attempt, node, n) == (0, "a", 7):
            lose_node()
        optimizer.zero_grad()
        model(ids.float()[:, None]).mean().backward()
        optimizer.step()
        n += 1
        save = ckpt.step(n)
        if save is not None:
            save.committed()
audits = [None] * world
dist.all_gather_object(audits, audit)
report = lastgood.Audit.merge(audits).report(sampler)
if rank == 0:
    print("samples:", report.scheduled, report.exact, flush=True)
dist.barrier()
"""


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    made = Nodes(tmp_path, request.param, stores=3)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("nodes", ["2:3"], indirect=True)
def test_without_the_node_of_the_store_the_others_go_on_at_the_next(nodes: Nodes) -> None:
    started = [nodes.start(name) for name in "abc"]
    nodes.newest(3)
    nodes.lose("a")
    assert {one["node"] for one in nodes.seen(nodes.newest(2), 2)} == {"b", "c"}
    nodes.touch("done")
    assert [one.wait(60) for one in started[1:]] == [0, 0]
    reports = nodes.log("b") + nodes.log("c")
    assert f"(a): lost with the store of the nodes, which is at {nodes.endpoints[1]} now" in reports
    assert "frame #" not in reports


@pytest.mark.long
@pytest.mark.parametrize("nodes", ["2:3"], indirect=True)
def test_the_others_go_on_after_the_node_of_the_store_was_asked_to_end(nodes: Nodes) -> None:
    """A spot notice, say. The two that were left took each other for two nodes of which one is lost, and ended."""
    nodes.last_call_seconds = 10  # the store ends while they wait for more nodes
    started = [nodes.start(name) for name in "abc"]
    nodes.newest(3)
    started[0].send_signal(signal.SIGTERM)
    assert started[0].wait(60) == PREEMPTED
    assert {one["node"] for one in nodes.seen(nodes.newest(2), 2)} == {"b", "c"}
    nodes.touch("done")
    assert [one.wait(60) for one in started[1:]] == [0, 0], nodes.log("b")


def end_together(nodes: Nodes, before: int, apart: int) -> None:
    """Wait until all three nodes train. `before`: the last attempt in which they did; in `apart` only two did."""
    for one in range(before + 1, nodes.newest(3)):
        seen = nodes.seen(one, 2)
        assert [rank["WORLD_SIZE"] for rank in seen] == ["2", "2"]
        assert one != apart or {rank["node"] for rank in seen} == {"b", "c"}
    nodes.touch("done")


@pytest.mark.long
@pytest.mark.parametrize("nodes", ["1:2"], indirect=True)
def test_one_of_two_nodes_is_no_majority_and_ends(nodes: Nodes) -> None:
    nodes.start("a")
    second = nodes.start("b")
    attempt = nodes.newest(2)
    nodes.lose("a")
    assert second.wait(60) == 5
    assert nodes.newest(2) == attempt


@pytest.mark.long
def test_a_node_whose_link_is_cut_trains_only_with_the_others(tmp_path: Path) -> None:
    """It holds the store, which answers it all the time. It goes to the store of the others once the link is mended."""
    if lacks := namespaces.missing():
        pytest.skip(lacks)
    with namespaces.Network(3) as network:
        nodes = Nodes(tmp_path, "1:3", stores=3, network=network)
        try:
            started = [nodes.start(name) for name in "abc"]
            attempt = nodes.newest(3)
            network.cut(0)
            apart = nodes.newest(2)
            until(lambda: "waits for more nodes of the job" in nodes.log("a"))
            network.mend(0)
            end_together(nodes, attempt, apart)
            assert [one.wait(60) for one in started] == [0] * 3
        finally:
            nodes.end()


@pytest.mark.long
def test_each_sample_is_trained_once_when_nodes_of_the_store_are_lost(tmp_path: Path) -> None:
    """The first one in a step, the next one while it restores."""
    command = [*COMMAND[:-1], "--preload", "lastgood.loop.checkpointer"]
    nodes = Nodes(tmp_path, "2:4", stores=3, script=TRAINING, command=command)
    nodes.last_call_seconds = 15  # all four begin together
    try:
        started = [nodes.start(name) for name in "abcd"]
        assert [one.wait(200) for one in started[2:]] == [0, 0]
    finally:
        nodes.end()
    assert "samples: 144 True" in nodes.log("c") + nodes.log("d")
    causes = [one.cause.what for one in attempt_log.read(access.for_reading(str(tmp_path / "run"))) if one.cause]
    for what, name, at in zip(causes, "ab", (1, 2), strict=True):  # on a busy machine its silence may be noticed first
        lost = f"lost with the store of the nodes, which is at {re.escape(nodes.endpoints[at])} now"
        assert re.search(rf"\({name}\): (?:{lost}|no sign of life)", what), causes


@pytest.mark.parametrize("nodes", ["2"], indirect=True)
def test_a_signal_to_all_processes_leaves_the_stores_to_the_ranks(nodes: Nodes) -> None:
    """The store died of it, and the ranks that were saving were killed: their nodes had to find another store."""
    nodes.silent_seconds = 30
    started = [nodes.start(one, "--nproc-per-node", "1") for one in "ab"]
    nodes.seen(0, 2)
    for one in "ab":
        nodes.send(one, signal.SIGTERM)
    assert [one.wait(60) for one in started] == [PREEMPTED, PREEMPTED]
