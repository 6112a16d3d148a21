"""`lastgood run --records DIR`: logs of steps, saves and attempts."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import lastgood
from commands import Call
from harness import reports
from lastgood.data.trained import multiset_hash, trained_ids
from lastgood.errors import Refused
from lastgood.io import heartbeat
from lastgood.policy.blame import Ended
from lastgood.policy.membership import Spares
from lastgood.run import job_logs, side_records
from lastgood.run.job_logs import Lines, SaveLine
from lastgood.supervisor import arguments, attempt_log, attempt_records, job_summary, merged
from lastgood.supervisor.attempt import Lived
from lastgood.supervisor.placement import NodeInfo, OneNode
from lastgood.supervisor.supervise import Supervisor

TRAINING = """
import os, signal, sys
import torch, torch.distributed as dist
import lastgood

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
sampler = lastgood.ResumableSampler(40, global_batch=8, seed=3, rank=rank, world_size=2)
state = {"model": model, "optimizer": optimizer, "sampler": sampler, "audit": lastgood.Audit()}
data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.arange(40))
with lastgood.Checkpointer(sys.argv[1], state, cadence=lastgood.Every(steps=4)) as ckpt:
    n = ckpt.restore().step
    while n < 13:
        for rows, ids in sampler.loader(data):
            if (attempt, n) == (0, 9):
                dist.barrier()  # until both have logged step 9: a rank that was slow was ended before it had
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            state["audit"].observe(*sampler.position, ids)
            loss = model(rows).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            n += 1
            save = ckpt.step(n, metrics={"loss": float("nan") if n == 2 else loss})
            if save is not None:
                save.committed()
            if n == 13:
                break
"""


@pytest.mark.slow
def test_logs_show_each_step_save_and_attempt_up_to_a_kill(tmp_path: Path) -> None:
    script, logs = tmp_path / "train.py", tmp_path / "logs"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "lastgood", "run", "--nproc-per-node", "2", "--records", str(logs)]
    done = subprocess.run([*command, str(script), str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    steps = {(rank, one.attempt, one.global_step): one for rank in (0, 1) for one in job_logs.steps(logs, rank)}
    assert [n for rank, attempt, n in steps if (rank, attempt) == (1, 0)] == [*range(1, 10)], "up to the kill"
    assert [n for rank, attempt, n in steps if (rank, attempt) == (1, 1)] == [*range(9, 14)]
    assert steps[0, 0, 2].loss is None and steps[0, 0, 9].loss == steps[0, 1, 9].loss
    sampler = lastgood.ResumableSampler(40, global_batch=8, seed=3)
    for n in range(1, 14):
        mine = [steps[rank, n > 8, n] for rank in (0, 1)]
        epoch, window = divmod(n - 1, 5)
        assert {(one.epoch, one.cursor_step, one.sample_ids_count) for one in mine} == {(epoch, window, 4)}
        merged = sum(int(one.sample_ids_hash or "", 16) for one in mine) % 2**64
        assert merged == multiset_hash(sampler.order(epoch)[window])

    saves = [(one.attempt, one.kind, one.step) for one in job_logs.saves(logs)]
    first, second = ([(kind, step) for at, kind, step in saves if at == attempt] for attempt in (0, 1))
    # Rank 0 loses its connection to the rank that is killed: it may close its run before it is ended too.
    assert [one for one in first if one[0] != "closed"] == [("restored", 0), ("durable", 4), ("durable", 8)]
    assert second == [("restored", 8), ("durable", 12), ("durable", 13), ("closed", 13)]
    one = next(one for one in job_logs.saves(logs) if one.step == 12)
    assert min(one.write_seconds, one.snapshot_seconds, one.enqueue_seconds, one.seconds, one.bytes) > 0
    assert one.stall_seconds > one.enqueue_seconds, "the loop has waited for its end too"

    found = job_summary.opened(logs)
    assert [one.restored_step for one in found.attempts] == [0, 8] and found.restarts == 1
    cause = found.attempts[0].cause
    assert cause is not None and (cause.rank, cause.what) == (1, "SIGKILL") and found.end


def test_a_wait_that_is_known_late_is_logged_with_its_save(tmp_path: Path, monkeypatch) -> None:
    """The wait at the fence is counted at the next call of the loop. A save that had ended by then had none in its
    line, so that it counted as a wait for the writing."""
    heartbeat.create(str(tmp_path / "page"))
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path / "page"))
    monkeypatch.setenv(job_logs.VARIABLE, str(tmp_path))
    with lastgood.Checkpointer(tmp_path / "run", {"weight": torch.zeros(3)}, cadence=lastgood.Every(steps=1)) as ckpt:
        ckpt._reports.emit("waited", 1, seconds=0.5)
        save = ckpt.step(1)
        assert save is not None
        save.result()
        ckpt._planner.fence.waited_seconds += 0.25
        ckpt.wait()
        (line,) = (one for one in job_logs.saves(str(tmp_path)) if one.kind == "durable")
    assert (line.fence_seconds, line.backpressure_seconds) == (0.25, 0.5)


def test_bad_directories_for_logs_are_refused_before_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    with pytest.raises(Refused, match="file"):
        job_summary.opened(file)
    other = tmp_path / job_summary.NAME
    other.write_text("{}x")
    with pytest.raises(Refused, match="new directory"):
        job_summary.opened(tmp_path)


def test_a_log_that_cannot_be_written_ends_and_training_goes_on() -> None:
    """A full disk must not end a training that only logs to it."""
    line = SaveLine(kind="closed", attempt=0, step=1, at_seconds=0.0, stall_seconds=0.0)
    with reports() as texts:
        log = Lines(Path("/dev/full"))
        log.add(line)
        log.add(line)
    assert len(texts) == 1 and "No space left" in texts[0]


def test_lines_that_were_cut_off_are_left_out(tmp_path: Path) -> None:
    line, log = SaveLine(kind="closed", attempt=0, step=7, at_seconds=0.0, stall_seconds=0.0), tmp_path / job_logs.SAVES
    log.write_bytes(msgspec.json.encode(line)[:30] + b"\n" + msgspec.json.encode(line) + b"\n")
    assert job_logs.saves(tmp_path) == [line]


def test_ids_of_a_step_come_from_the_audit_else_from_the_order() -> None:
    sampler = lastgood.ResumableSampler(24, global_batch=4, seed=1, rank=1, world_size=2)
    expected = sampler.order(0)[2:4, 2:].reshape(-1)
    assert np.array_equal(trained_ids([], sampler, 0, 2, 2), expected)
    audit = lastgood.Audit()
    for window in (1, 2, 2, 3):
        audit.observe(0, window, torch.tensor([window, 20 + window]))
    audit.state_dict()  # which joins the observations
    audit.observe(0, 3, [9])
    assert trained_ids([audit], sampler, 0, 2, 2).tolist() == [2, 22, 2, 22, 3, 23, 9]
    assert trained_ids([audit], sampler, 0, 4, 1).tolist() == [], "not observed"
    sampler.skip(0, 5, 1)
    expected = np.concatenate([sampler.order(0)[4, 2:], sampler.order(1)[0, 2:]])
    assert np.array_equal(trained_ids([], sampler, 0, 4, 3), expected), "of a step over the end of an epoch"


def test_ids_of_ranks_with_unequal_parts_are_those_of_the_window() -> None:
    """The ids of three ranks that divide 64 samples were those of 21, 21 and 21: one sample was in no log."""
    samplers = [
        lastgood.ResumableSampler(128, global_batch=64, seed=1, rank=rank, world_size=3, largest_batch=8)
        for rank in range(3)
    ]
    found = [trained_ids([], one, 0, 1, 1) for one in samplers]
    assert [len(one) for one in found] == [22, 21, 21]
    assert np.array_equal(np.concatenate(found), samplers[0].order(0)[1])


def test_a_hash_of_ids_is_the_sum_of_those_of_its_parts() -> None:
    ids = np.array([5, 3, 2**40, 3])
    assert multiset_hash(ids) == (multiset_hash(ids[:2]) + multiset_hash(ids[2:])) % 2**64
    assert multiset_hash(ids) == multiset_hash(ids[::-1]) != multiset_hash(ids[:3])


def test_a_node_that_writes_the_summary_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--records was on a slow file system: the other nodes took the one that had decided for lost, while it wrote."""
    shown, written = threading.Event(), list[bool]()

    class Watched(OneNode):
        def touch(self) -> None:
            shown.set()

    def slowly(*_: object) -> None:
        shown.clear()
        written.append(shown.wait(5.0))

    monkeypatch.setattr(attempt_records, "TOUCH_SECONDS", 0.01)
    monkeypatch.setattr(job_summary, "add", slowly)
    job = arguments.parsed(["--records", str(tmp_path), "--no-python", "true"], {})
    nodes = Watched(NodeInfo(host="", ranks=1, node_rank=None, address=""), job.master)
    heartbeat.create(str(tmp_path / "page"))
    lived = Lived(0.0, over=1.0, ended=[Ended(0, 1.0, 0)], progress=[heartbeat.read(str(tmp_path / "page"))])
    report = merged.Report(host="", asked=False, lived=lived)
    assert Supervisor(job, [], print)._decided(nodes, {0: report}, 0.0, 0.0).act == "end"
    assert written == [True]


def test_attempts_shows_the_spare_nodes_where_some_were_expected(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = str(tmp_path / "run")
    lastgood.save(run, {"w": torch.zeros(1)}, step=1)
    empty = {"host": "h", "command": [], "ranks": 2, "nodes": 2, "restored_step": 0, "phases": {}, "cause": None}
    for number, spares in enumerate([None, Spares(waiting=0, expected=1), Spares(waiting=None, expected=1)]):
        with side_records.opened(run) as tier:
            numbers = dict.fromkeys(["number", "last_step", "replayed_steps"], 0) | {"began_at": 0.0, "seconds": 1.0}
            one = {"format": 1, "job": "x", "answer": f"answer {number}", "spares": spares} | empty | numbers
            attempt_log.append(tier, msgspec.convert(msgspec.to_builtins(one), attempt_log.Attempt))
        shown = call("attempts", run)[1]
        assert ("spares" in shown) == (number > 0)
    assert "0 of 1" in shown and "? of 1" in shown
