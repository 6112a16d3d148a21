"""Runs whose only place is a bucket of a real S3 server: saving, restoring, commands, faults, and a second writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lastgood
from harness import reported, reports
from lastgood import errors
from lastgood.cli import app
from lastgood.limits import STORE_READS
from lastgood.records import Extent
from lastgood.run import access
from lastgood.storage import object_store
from lastgood_lab.object_faults import Fault, FaultyProxy, Request
from lastgood_lab.object_server import ObjectServer
from training import Training
from zygote import Zygote

pytestmark = pytest.mark.slow

QUICK = object_store.Deadlines(connect_seconds=2, request_seconds=4, retry_seconds=4, retries=1)
EVERY = lastgood.Every(steps=1)


def train(url: str, total: int, **options: object) -> Training:
    training = Training()
    with lastgood.Checkpointer(url, training.state, cadence=EVERY, **options) as ckpt:
        for step in range(ckpt.restore().step + 1, total + 1):
            training.step()
            if (save := ckpt.step(step)) is not None:
                save.result()
    return training


@pytest.fixture
def proxy(object_server: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    monkeypatch.setattr(object_store, "DEADLINES", QUICK)
    with FaultyProxy(object_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def test_a_run_in_a_bucket_goes_on_exactly_where_it_stopped(bucket, tmp_path):
    uninterrupted = train(str(tmp_path / "run"), 8)
    train(bucket, 5, retention=lastgood.Keep(last=2))
    assert train(bucket, 8, retention=lastgood.Keep(last=2)).weights() == uninterrupted.weights()
    run = lastgood.open(bucket)
    assert run.generations()[-1].step == 8 and run.verify().good
    assert len(run.generations()) <= 4, "retention deletes in a bucket too"
    assert run.tensor("model.weight").flatten().tolist() == uninterrupted.weights()


KILLED = """
import os, sys
import lastgood
sys.path[:0] = {path!r}
from training import Training
training = Training()
ckpt = lastgood.Checkpointer({url!r}, training.state, cadence=lastgood.Every(steps=1))
for step in range(ckpt.restore().step + 1, 100):
    training.step()
    save = ckpt.step(step)
    if step % 4 == 3:
        save.result()
        print(step, flush=True)
"""


def test_a_killed_process_leaves_a_run_that_the_next_one_continues(bucket, tmp_path):
    """Its claim on the run never ends: the next process replaces it without being asked to."""
    script = KILLED.format(path=[str(Path(__file__).parents[1] / "support")], url=bucket)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        durable = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    training = Training()
    with lastgood.Checkpointer(bucket, training.state, cadence=EVERY) as ckpt:
        step = ckpt.restore().step
    uninterrupted = train(str(tmp_path / "run"), step)
    assert step >= durable and training.weights() == uninterrupted.weights()


def test_a_second_checkpointer_replaces_the_first_with_an_error(bucket):
    first, second = Training(), Training()
    told = reported("step 3 was not saved.*opened for writing by another process")
    with told, lastgood.Checkpointer(bucket, first.state, save_on_exit=False) as ckpt:
        first.step()
        ckpt.save(1).result()
        with lastgood.Checkpointer(bucket, second.state) as other:
            assert other.restore().step == 1
            second.step()
            other.save(2).result()
            first.step()
            with pytest.raises(errors.RunReplaced):
                ckpt.save(3).result()
    assert [one.step for one in lastgood.open(bucket).generations()] == [1, 2]


def test_a_late_commit_of_a_replaced_writer_leaves_no_half_generation(bucket, proxy, call):
    """A creation of COMMIT was on its way while another process opened the run, and removed the files of the save as
    those of one that had not ended. COMMIT was created after that: a generation without files, reported as damage."""
    arrived = list[str]()

    def replace(request: Request) -> None:
        if request.method == "PUT" and request.target.endswith("/COMMIT.json") and "gen/000000000002" in request.target:
            arrived.append(request.target)
            proxy.before = None
            train(bucket, 1)

    training = Training()
    with reported("step 2 was not saved"), lastgood.Checkpointer(bucket, training.state, save_on_exit=False) as ckpt:
        training.step()
        ckpt.save(1).result()
        proxy.before = replace
        training.step()
        with pytest.raises(errors.RunReplaced):
            ckpt.save(2).result()
    assert len(arrived) == 1
    assert [one.step for one in lastgood.open(bucket).generations()] == [1]
    assert call("verify", bucket, "--all")[0] == 0


def test_a_store_that_is_down_costs_saves_and_no_step(bucket, proxy):
    training = Training()
    told = reported("step 2 was not saved.*object store")
    with told, lastgood.Checkpointer(bucket, training.state, cadence=EVERY) as ckpt:
        training.step()
        ckpt.save(1).result()
        with proxy.down():
            training.step()
            save = ckpt.save(2)
            save.wait_ended()
            assert isinstance(save.error(), errors.Unavailable)
        training.step()
        ckpt.save(3).result()
    assert lastgood.load(bucket, Training().state).step == 3


def test_a_flipped_bit_in_a_bucket_is_stepped_over(bucket):
    train(bucket, 3)
    newest = lastgood.open(bucket).generation()
    name = f"gen/{newest.step:012d}-{newest.id.incarnation}/r00000.safetensors"
    tier = access._objects(bucket)
    length = tier.length_of(name)
    data = bytearray(length)
    tier.read_into(Extent(blob=name, offset=0, length=length), memoryview(data))
    data[-5] ^= 1
    tier.put(name, bytes(data))
    with reported("stepping over"):
        assert lastgood.load(bucket, Training().state).step == 2


def test_one_tensor_of_a_run_reads_little_more_than_its_bytes(bucket, proxy):
    big = {"big": torch.randn(4 << 20), "small": torch.randn(25_000)}
    lastgood.save(bucket, big)
    run = lastgood.open(bucket)
    proxy.clear()
    assert torch.equal(run.tensor("small"), big["small"])
    received = sum(one.received for one in proxy.requests if one.target.endswith("safetensors"))
    assert received == 100_000


@pytest.mark.parametrize("how", ["restore", "load"])
def test_a_restore_from_a_bucket_has_six_requests_under_way(bucket, proxy, how, monkeypatch):
    """It read one chunk after the other, at half the speed of the store."""
    monkeypatch.setattr(object_store, "DEADLINES", object_store.Deadlines())
    state = {"w": torch.randn(16 << 20)}
    kept = state["w"].clone()
    lastgood.save(bucket, state, step=1)
    changed, under_way, most = threading.Condition(), 0, 0

    def hold(request: Request) -> None:
        nonlocal under_way, most
        if request.target.endswith("safetensors"):
            with changed:
                under_way += 1
                most = max(most, under_way)
                changed.notify_all()
                changed.wait_for(lambda: most == STORE_READS, 2.0)
                under_way -= 1

    state["w"].zero_()
    proxy.before = hold
    if how == "load":
        lastgood.load(bucket, state)
    else:
        with lastgood.Checkpointer(bucket, state) as ckpt:
            ckpt.restore()
    assert torch.equal(state["w"], kept) and most == STORE_READS == 6


def test_every_command_takes_the_url_of_a_bucket(bucket, tmp_path, capsys):
    train(bucket, 4, retention=lastgood.Keep(last=9))  # a busy machine may verify step 4 before step 3, and delete that
    for command in (
        ["ls", bucket],
        ["show", bucket],
        ["verify", bucket, "--all"],
        ["diff", bucket, "3", "4"],
        ["scrub", bucket],
        ["repair", bucket],
        ["gc", bucket, "--keep-last", "1"],
        ["export", bucket, "--to", str(tmp_path / "out.safetensors")],
        ["import", str(tmp_path / "out.safetensors"), bucket, "--step", "9"],
    ):
        code = app.main(command)
        assert code == (7 if command[0] == "diff" else 0), f"{command}: {capsys.readouterr().err}"
    assert [one.step for one in lastgood.open(bucket).generations()] == [4, 9]


def test_a_command_that_changes_a_run_does_not_replace_its_writer_unasked(bucket, capsys):
    training = Training()
    with lastgood.Checkpointer(bucket, training.state) as ckpt:
        training.step()
        ckpt.save(1).result()
        assert app.main(["gc", bucket]) == 3
        assert "--take-over" in capsys.readouterr().err
        assert app.main(["ls", bucket]) == 0
        training.step()
        ckpt.save(2).result()
        ckpt.wait()
        assert app.main(["scrub", bucket, "--take-over"]) == 0
        training.step()
        with pytest.raises(errors.RunReplaced):
            ckpt.save(3).result()


def test_a_folder_of_other_objects_is_refused_and_left_alone(bucket):
    tier = access._objects(bucket)
    tier.put("dataset/part-1", b"data")
    with pytest.raises(errors.NotARun, match="holds other files"):
        lastgood.Checkpointer(bucket, Training().state)
    with pytest.raises(errors.NotARun, match="not a run"):
        lastgood.open(bucket)
    assert {*tier.list("")} == {"dataset"}


def test_an_empty_prefix_is_no_run(bucket):
    with pytest.raises(errors.NotARun, match="there is nothing"):
        lastgood.open(bucket)


@pytest.mark.parametrize("options", [{"write_mode": "unsafe"}, {"persist": "mmap"}])
def test_options_of_disks_are_refused_for_a_bucket(bucket, options):
    with pytest.raises(errors.Refused):
        lastgood.Checkpointer(bucket, Training().state, **options)


def test_parity_rebuilds_a_damaged_object(bucket):
    trained = train(bucket, 2, parity="4+2")
    run = lastgood.open(bucket)
    newest = run.generation()
    name = f"gen/{newest.step:012d}-{newest.id.incarnation}/r00000.safetensors"
    tier = access._objects(bucket)
    length = tier.length_of(name)
    data = bytearray(length)
    tier.read_into(Extent(blob=name, offset=0, length=length), memoryview(data))
    tier.put(name, bytes(data[:5000]) + os.urandom(100) + bytes(data[5100:]))
    assert not run.verify().good
    assert app.main(["repair", bucket]) == 0
    loaded = Training()
    assert lastgood.load(bucket, loaded.state).step == 2 and loaded.weights() == trained.weights()


def test_torch_distributed_checkpoint_saves_to_and_loads_from_a_bucket(bucket):
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.randn(100, 10), "n": 5}
    dcp.save(state, checkpoint_id="step-3", storage_writer=lastgood.dcp.Writer(bucket))
    into = {"w": torch.zeros(100, 10), "n": 0}
    dcp.load(into, checkpoint_id="step-3", storage_reader=lastgood.dcp.Reader(bucket))
    assert torch.equal(into["w"], state["w"]) and into["n"] == 5


@pytest.mark.parametrize("kind", ["lose_reply", "cut_during", "500"])
def test_saves_go_on_while_single_requests_fail(bucket, proxy, kind):
    count = iter(range(10_000))
    proxy.inject(Fault(kind, lambda request: next(count) % 7 == 3))
    with reports():  # whether a save fails depends on which request it is
        trained = train(bucket, 6)
    proxy.inject(None)
    loaded = Training()
    assert lastgood.load(bucket, loaded.state).step == 6 and loaded.weights() == trained.weights()


def test_two_ranks_go_on_in_a_bucket(bucket, tmp_path):
    example, output = Path(__file__).parents[2] / "examples/dcp_drop_in.py", tmp_path / "output.txt"
    with Zygote("sklearn.datasets", "torch._dynamo", "torch.distributed.fsdp") as zygote:
        for steps in ("40", "60"):
            code = zygote.live(example, bucket, output, ranks=2, arguments=["--steps", steps])
            assert code == 0, output.read_text()
    run = lastgood.open(bucket)
    assert run.generation().step == 60 and run.verify(60).good and run.generation().commit.world.ranks == 2
    assert max(one.step for one in run.generations() if one.id.incarnation != run.generation().id.incarnation) == 40
    assert min(one.step for one in run.generations() if one.id.incarnation == run.generation().id.incarnation) > 40
