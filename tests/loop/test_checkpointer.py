"""The checkpointer keeps promises 3 to 7 and 9 for a training loop on one process."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from torch import nn

import lastgood
from harness import flip, reported, reports
from lastgood import errors
from lastgood.io import heartbeat
from lastgood.io.files import PosixFile
from lastgood.testing import Call, Fault


def build(seed: int = 0) -> dict[str, object]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.BatchNorm1d(32), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "losses": []}


def train_one_step(state: dict) -> None:
    x = torch.randn(16, 8)
    state["optimizer"].zero_grad()
    loss = state["model"](x).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["schedule"].step()
    state["losses"].append(loss.item())


def run_to(path: Path, total: int, state: dict, **options: object) -> dict:
    # With one save in flight, each save that is due ends as a generation, and none is overtaken.
    options = {"cadence": lastgood.Every(steps=3), "in_flight": 1, **options}
    with lastgood.Checkpointer(path, state, **options) as ckpt:
        for step in range(ckpt.restore().step, total):
            train_one_step(state)
            ckpt.step(step + 1)
    return state


def same_bits(one: dict, other: dict) -> bool:
    weights = zip(one["model"].state_dict().values(), other["model"].state_dict().values(), strict=True)
    return one["losses"] == other["losses"] and all(torch.equal(a, b) for a, b in weights)


def newest_blob(path: Path) -> Path:
    return max((path / "gen").iterdir()) / "r00000.safetensors"


def test_a_stopped_run_continues_bit_for_bit(tmp_path: Path) -> None:
    whole = run_to(tmp_path / "whole", 20, build())
    run_to(tmp_path / "parts", 7, build())
    torch.manual_seed(99)  # a new process may start with any state of its generators
    torch.rand(5)
    parts = run_to(tmp_path / "parts", 20, build(seed=5))
    assert same_bits(whole, parts)


def test_a_damaged_newest_generation_is_skipped_and_kept_as_evidence(tmp_path: Path) -> None:
    whole = run_to(tmp_path / "whole", 12, build())
    run_to(tmp_path / "run", 9, build())
    flip(newest_blob(tmp_path / "run"))
    state = build(seed=3)
    with lastgood.Checkpointer(tmp_path / "run", state, cadence=lastgood.Every(steps=3)) as ckpt:
        with reported("step 9: .*differs from its digest"):
            found = ckpt.restore()
        assert found.step == 6
        assert [step for step, _ in found.stepped_over] == [9]
        for step in range(6, 12):
            train_one_step(state)
            ckpt.step(step + 1)
    assert same_bits(whole, state)
    marks = list((tmp_path / "run" / "gen").glob("000000000009-*/DAMAGED.json"))
    assert len(marks) == 1 and "tensor rng.torch" in marks[0].read_text()


def test_after_a_rewind_restore_never_selects_an_abandoned_step(tmp_path: Path) -> None:
    state = run_to(tmp_path, 12, build(), retention=lastgood.Keep(last=10))
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        assert ckpt.restore(step=6).step == 6
        assert ckpt.latest() == 6
        ckpt.save(9).result()  # step 9 is taken in the abandoned lineage, and free in this one
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        assert ckpt.restore().step == 9
    assert lastgood.load(tmp_path, state).step == 9
    assert (tmp_path / "latest_ok").resolve().name.startswith("000000000009")


def test_a_state_that_was_not_restored_never_continues_a_run(tmp_path: Path) -> None:
    run_to(tmp_path, 3, build())
    with lastgood.Checkpointer(tmp_path, build()) as ckpt, pytest.raises(errors.NotRestored, match="restore"):
        ckpt.save(4)


def test_restore_to_zero_starts_over_and_keeps_old_generations(tmp_path: Path) -> None:
    state = run_to(tmp_path, 6, build())
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        assert ckpt.restore(step=0).step == 0
        ckpt.save(1).result()
    assert lastgood.load(tmp_path, state).step == 1
    assert lastgood.load(tmp_path, state, step=6).step == 6


def test_nothing_good_lists_every_generation_with_its_findings(tmp_path: Path) -> None:
    state = run_to(tmp_path, 9, build())
    for blob in (tmp_path / "gen").glob("*/*.safetensors"):
        flip(blob)
    before = [p.clone() for p in state["model"].parameters()]
    for load in (lambda: lastgood.load(tmp_path, state), lambda: restored(tmp_path, state)):
        with pytest.raises(errors.NothingGood, match=r"(?s)step 9: .*step 6: .*step 3: .*differs"):
            load()
    assert all(torch.equal(a, b) for a, b in zip(before, state["model"].parameters(), strict=True))


def restored(path: Path, state: dict) -> lastgood.Restored:
    with lastgood.Checkpointer(path, state) as ckpt:
        return ckpt.restore()


def test_a_failed_save_is_reported_in_the_loop_and_the_next_one_succeeds(tmp_path: Path, faulty_files) -> None:
    state = build()
    events: list[lastgood.Event] = []
    with lastgood.Checkpointer(tmp_path, state, on_event=events.append) as ckpt:
        ckpt.save(1)
        ckpt.wait()
        faulty_files.inject(Fault("sync", "*.safetensors"))
        save = ckpt.save(2)
        with pytest.raises(errors.TierDown, match="Input/output error"):
            save.result()
        with reported(r"TierDown.*untouched"):
            ckpt.wait()
        faulty_files.clear()
        ckpt.save(2).result()
        ckpt.wait()
        assert ckpt.latest() == 2
    assert sorted(p.name[:12] for p in (tmp_path / "gen").iterdir()) == ["000000000001", "000000000002"]
    assert [event.step for event in events if event.kind == "verified"] == [1, 2]


def test_with_on_error_raise_the_failure_stops_the_loop(tmp_path: Path, faulty_files) -> None:
    faulty_files.inject(Fault("reserve", errno=errno.ENOSPC))
    with (
        pytest.raises(errors.NoSpace, match="Free space"),
        lastgood.Checkpointer(tmp_path, build(), on_error="raise") as ckpt,
    ):
        ckpt.save(1)
        ckpt.wait()


@pytest.mark.parametrize("memory", [1 << 20, 3 << 20])
def test_an_arena_smaller_than_the_state_saves_and_restores_exactly(tmp_path: Path, memory: int) -> None:
    state = {"w": torch.randn(1_500_000), "b": torch.arange(7)}
    with lastgood.Checkpointer(tmp_path, state, memory=memory) as ckpt:
        ckpt.save(1).result()
        ckpt.save(2).result()
    fresh = {"w": torch.zeros(1_500_000), "b": torch.zeros(7, dtype=torch.int64)}
    with lastgood.Checkpointer(tmp_path, fresh, memory=memory) as ckpt:
        assert ckpt.restore().step == 2
    assert torch.equal(fresh["w"], state["w"]) and torch.equal(fresh["b"], state["b"])


def test_a_write_error_while_the_arena_is_full_does_not_block_the_loop(tmp_path: Path, faulty_files) -> None:
    """The copy waits for chunks that only the writer can release, so a failure of the writer must end that wait."""
    with lastgood.Checkpointer(tmp_path, {"w": torch.randn(3_000_000)}, memory=1 << 20) as ckpt:
        faulty_files.inject(Fault("write", "*.safetensors"))
        save = ckpt.save(1)
        with pytest.raises(errors.TierDown):
            save.result(timeout=30)
        faulty_files.clear()
        with reported():
            ckpt.save(1).result(timeout=30)


def test_an_exception_in_the_with_block_is_not_masked_and_saves_nothing(tmp_path: Path) -> None:
    state = build()
    with pytest.raises(ZeroDivisionError), lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1)
        raise ZeroDivisionError
    assert lastgood.load(tmp_path, state).step == 1


def test_an_unstorable_value_is_refused_by_path_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(errors.Unstorable, match=r"extra\.fn"),
        lastgood.Checkpointer(tmp_path, {"extra": {"fn": lambda: 1}}) as ckpt,
    ):
        ckpt.save(1)
    assert not (tmp_path / "gen").exists()


def test_the_name_that_safetensors_reserves_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(errors.Refused, match="__metadata__"),
        lastgood.Checkpointer(tmp_path, {"__metadata__": torch.zeros(3)}) as ckpt,
    ):
        ckpt.save(1)


def test_the_tensor_file_opens_with_safetensors_under_plain_names(tmp_path: Path) -> None:
    state = run_to(tmp_path, 3, build())
    tensors = safetensors.torch.load_file(newest_blob(tmp_path))
    assert torch.equal(tensors["model.0.weight"], state["model"][0].weight)
    assert torch.equal(
        tensors["optimizer.state.0.weight.exp_avg"], state["optimizer"].state[state["model"][0].weight]["exp_avg"]
    )


def test_one_tensor_is_read_and_verified_alone(tmp_path: Path) -> None:
    state = run_to(tmp_path, 3, build())
    run = lastgood.open(tmp_path)
    assert torch.equal(run.tensor("model.3.bias"), state["model"][3].bias)
    assert run.verify(3).good
    assert [one.step for one in run.generations()] == [3]
    with pytest.raises(errors.NoSuchTensor):
        run.tensor("model.nothing")
    with pytest.raises(errors.NoSuchStep):
        run.tensor("model.3.bias", step=4)


def test_save_and_load_once(tmp_path: Path) -> None:
    state = {"w": torch.arange(5.0), "epoch": 3}
    lastgood.save(tmp_path, state)
    state["w"].zero_()
    state["epoch"] = 0
    lastgood.save(tmp_path, {"w": torch.ones(5), "epoch": 9}, step=7)
    assert lastgood.load(tmp_path, state, step=0).step == 0
    assert state["w"].tolist() == [0, 1, 2, 3, 4] and state["epoch"] == 3
    assert lastgood.load(tmp_path, state).step == 7 and state["epoch"] == 9


def test_save_once_at_an_existing_step_supersedes_it(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3)}
    lastgood.save(tmp_path, state)
    lastgood.save(tmp_path, {"w": torch.ones(3)})
    lastgood.load(tmp_path, state)
    assert state["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("loss", [torch.ones(1), "0.5", [0.5]])
def test_a_metric_that_is_no_number_is_refused_at_the_first_step(tmp_path: Path, loss: object) -> None:
    """It was refused when the first save was due, after a thousand steps of which nothing was saved."""
    opened = lastgood.Checkpointer(tmp_path / "run", {"x": torch.ones(2)}, cadence=lastgood.Every(steps=1000))
    with opened as ckpt, pytest.raises(errors.Refused, match="'loss' is"):
        ckpt.step(1, metrics={"loss": loss})


def test_retention_counts_and_milestones_and_metrics(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3)}
    keep = lastgood.Keep(last=2, every=10, milestones=(3,), best=("loss", "min", 1))
    with lastgood.Checkpointer(tmp_path, state, retention=keep) as ckpt:
        for step in range(1, 16):
            ckpt.save(step, milestone=step == 5, metrics={"loss": abs(step - 7)}).result()
            ckpt.wait()
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [3, 5, 7, 10, 14, 15]


def test_steps_that_count_samples_are_kept_for_each_multiple(tmp_path: Path) -> None:
    """With `n += 48` and Keep(every=1000), the only step that was kept was 48,000: the others are no multiples."""
    keep, cadence = lastgood.Keep(last=1, every=1000), lastgood.Every(steps=48)
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, retention=keep, cadence=cadence) as ckpt:
        for n in range(48, 2200, 48):
            ckpt.step(n)
            ckpt.wait()
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1008, 2016, 2160]


@pytest.mark.parametrize(
    ("at_step", "after", "count"), [("valloss", "", 1), ("loss", "val_loss", 0), ("val_loss", "", 0)]
)
def test_a_metric_that_never_comes_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_step: str, after: str, count: int
) -> None:
    """With a typo in the name, every save that was to be kept for its metric was deleted by its age, without a word."""
    keep = lastgood.Keep(last=1, best=("val_loss", "min", 2))
    with lastgood.Checkpointer(
        tmp_path, {"w": torch.zeros(3)}, cadence=lastgood.Every(steps=1), retention=keep
    ) as ckpt:
        for n in range(1, 6):
            ckpt.step(n, metrics={at_step: 1.0})
            if after:
                ckpt.save(n, metrics={after: 1.0})
    assert caplog.text.count("saves has the metric 'val_loss' that Keep(best=...) asks for") == count


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with (
        lastgood.Checkpointer(tmp_path, build()),
        pytest.raises(errors.RunLocked, match="in this process already"),
    ):
        lastgood.Checkpointer(tmp_path, build())
    lastgood.Checkpointer(tmp_path, build()).close()


@pytest.mark.slow
def test_loader_workers_that_outlive_the_trainer_hold_no_lock(tmp_path: Path) -> None:
    program = f"""
        import os, sys, time, torch, lastgood
        ckpt = lastgood.Checkpointer({str(tmp_path)!r}, {{"w": torch.zeros(3)}})
        ckpt.save(1).result()
        if os.fork() == 0:
            os.close(1)
            sys.stdin.read()  # a worker that lives until its pipe closes
            os._exit(0)
        print("ready", flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
        worker = psutil.Process(trainer.pid).children()[0]
        os.kill(trainer.pid, signal.SIGKILL)
        psutil.Process(trainer.pid).wait(10)
        assert worker.is_running()
        lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}).close()
        worker.kill()


@pytest.mark.slow
def test_hundreds_of_saves_leak_no_memory_threads_or_files(tmp_path: Path) -> None:
    state = {"w": torch.zeros(20_000)}
    me = psutil.Process()
    with lastgood.Checkpointer(tmp_path, state) as ckpt:

        def saves(first: int, count: int) -> tuple[int, int, int]:
            for step in range(first, first + count):
                ckpt.save(step)
            ckpt.wait()
            return me.num_fds(), me.num_threads(), me.memory_info().rss

        fds, threads, memory = saves(1, 100)
        later_fds, later_threads, later_memory = saves(101, 300)
    assert (later_fds, later_threads) == (fds, threads)
    assert later_memory - memory < 4 << 20
    assert len(list((tmp_path / "gen").iterdir())) == 3


@pytest.mark.parametrize("last", [1, 5])
def test_a_burst_of_saves_is_durable_and_disk_use_stays_bounded(tmp_path: Path, last: int) -> None:
    """The bound once grew with the backlog that was allowed: there were eleven generations where eight were
    promised."""
    state = {"w": torch.zeros(100_000)}
    most = 0
    with lastgood.Checkpointer(tmp_path, state, retention=lastgood.Keep(last=last), in_flight=1) as ckpt:
        saves = []
        for step in range(1, 60):
            saves.append(ckpt.save(step))
            most = max(most, len(list(tmp_path.glob("gen/*"))))
        assert [save.result().step for save in saves] == list(range(1, 60))
    assert most <= last + 1 + 2


def test_save_returns_when_the_copy_is_complete(tmp_path: Path, monkeypatch) -> None:
    gate = threading.Event()
    real = PosixFile.sync

    def sync(self: PosixFile) -> None:
        if self._path.endswith(".safetensors"):
            gate.wait(30)
        real(self)

    state = {"w": torch.zeros(1000)}
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        monkeypatch.setattr(PosixFile, "sync", sync)
        save = ckpt.save(1)
        assert save.staged() and not save.durable()
        state["w"].fill_(7)  # the loop continues, but the save contains the state at the time of the call
        with pytest.raises(errors.TimedOut):
            save.result(timeout=0)
        gate.set()
        save.result()
    lastgood.load(tmp_path, state)
    assert state["w"].eq(0).all()


def test_a_step_is_not_saved_twice(tmp_path: Path) -> None:
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}) as ckpt:
        assert ckpt.save(5) is ckpt.save(5)
        with pytest.raises(errors.StepTaken, match="restore"):
            ckpt.save(4)


def test_events_report_each_stage_of_a_save(tmp_path: Path) -> None:
    events: list[lastgood.Event] = []
    keep = lastgood.Keep(last=1)
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, retention=keep, on_event=events.append) as ckpt:
        ckpt.save(1)
        ckpt.wait()
        ckpt.save(2)
        ckpt.wait()
    assert [(event.kind, event.step) for event in events] == [
        ("staged", 1),
        ("written", 1),
        ("durable", 1),
        ("verified", 1),
        ("staged", 2),
        ("written", 2),
        ("durable", 2),
        ("verified", 2),
        ("deleted", 1),
    ]


@pytest.mark.parametrize(
    "options",
    [{"digest": "crc32"}, {"write_mode": "fast"}, {"on_error": "ignore"}, {"memory": 10}],
)
def test_invalid_options_are_refused_before_anything_is_changed(tmp_path: Path, options: dict) -> None:
    with pytest.raises(errors.Refused):
        lastgood.Checkpointer(tmp_path / "run", {}, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("digest", ["blake3", "sha256"])
@pytest.mark.parametrize("write_mode", ["atomic_nodirsync", "unsafe"])
def test_every_digest_and_write_mode_round_trips(tmp_path: Path, digest: str, write_mode: str) -> None:
    state = {"w": torch.randn(1000)}
    with lastgood.Checkpointer(tmp_path, state, digest=digest, write_mode=write_mode) as ckpt:
        ckpt.save(1).result()
    want = state["w"].clone()
    state["w"].zero_()
    assert lastgood.load(tmp_path, state).generation.root.startswith(digest)
    assert torch.equal(state["w"], want)
    flip(newest_blob(tmp_path))
    with pytest.raises(errors.NothingGood):
        lastgood.load(tmp_path, state)


def test_a_forked_trainer_cannot_write_and_does_no_harm(tmp_path: Path) -> None:
    """A forked child once saved a step; the parent's save found the name taken and deleted the child's generation."""
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}) as ckpt:
        ckpt.save(1).result()
        child = os.fork()
        if child == 0:
            try:
                ckpt.save(2)
            except errors.Refused:
                ckpt.close()
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        ckpt.save(2).result()
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1, 2]


def test_a_transient_system_error_never_skips_the_newest_generation(tmp_path: Path, faulty_files) -> None:
    """A moment with too many open files once made the run continue from an older step, and retention deleted the
    newer one."""
    state = run_to(tmp_path, 6, build())
    faulty_files.inject(Fault("open read", "*/000000000006-*.safetensors", errno.EMFILE))
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        with pytest.raises(errors.TierDown, match="Too many open files"):
            ckpt.restore()
        faulty_files.clear()
        assert ckpt.restore().step == 6


def test_a_bit_flip_in_a_single_read_is_not_damage(tmp_path: Path, monkeypatch) -> None:
    """A fault of memory or cable in a single read once marked an intact generation as damaged for ever."""
    state = run_to(tmp_path, 6, build())
    real = PosixFile.read_into
    faults = iter([True])

    def flipping(self: PosixFile, mv: memoryview, offset: int) -> int:
        count = real(self, mv, offset)
        if "000000000006" in self._path and len(mv) > 5000 and next(faults, False):
            mv[5000] ^= 1
        return count

    monkeypatch.setattr(PosixFile, "read_into", flipping)
    with reported("step 6 is good, and was misread at first: .*differs from its own digest. Check"):
        assert restored(tmp_path, state).step == 6
    assert not list(tmp_path.glob("gen/*/DAMAGED.json"))


def test_an_unreadable_generation_is_skipped_and_not_marked(tmp_path: Path, faulty_files) -> None:
    """One EIO during the verification once marked an acknowledged generation as damaged for ever."""
    state = run_to(tmp_path, 6, build())
    faulty_files.inject(Fault("read", "*/000000000006-*.safetensors"))
    with reported("step 6: .*cannot be read"):
        assert restored(tmp_path, state).step == 3
    faulty_files.clear()
    assert not list(tmp_path.glob("gen/*/DAMAGED.json"))
    assert lastgood.load(tmp_path, state, step=6).step == 6


def test_a_damaged_requested_step_is_never_replaced_by_an_abandoned_one(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3)}
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step).result()
        ckpt.restore(step=1)
        state["w"].fill_(30)
        ckpt.save(3).result()
        ckpt.wait()
    newest = max((tmp_path / "gen").glob("000000000003-*"), key=lambda one: one.stat().st_ctime)
    flip(newest / "r00000.safetensors")
    with pytest.raises(errors.Damaged):
        lastgood.load(tmp_path, state, step=3)


def test_every_sampler_advances_once_per_step(tmp_path: Path) -> None:
    """The cursor of a sampler in a nested dict, or in a loop that calls save() and not step(), once stayed at zero."""
    first, second = (lastgood.ResumableSampler(100, 10, seed=1) for _ in range(2))
    state = {"data": {"order": first, "again": first}, "other": [second]}
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        batches = zip(first, second, strict=True)
        next(batches)
        ckpt.save(1)
        next(batches)
        ckpt.save(2, metrics={"loss": 1.0})
        ckpt.step(2)
        next(batches)
        ckpt.step(3)
    assert first.position == second.position == (0, 3)


def test_a_resume_past_damage_works_on_a_full_disk(tmp_path: Path, faulty_files) -> None:
    state = run_to(tmp_path, 6, build())
    flip(newest_blob(tmp_path))

    def full(call: Call) -> None:
        if call.operation == "write" and "incarnations" not in call.path:
            raise OSError(errno.ENOSPC, "No space left on device")

    faulty_files.before = full
    with reported():
        assert restored(tmp_path, state).step == 3


@pytest.mark.slow
def test_a_script_that_never_closes_saves_and_reports_failures(tmp_path: Path) -> None:
    """Saves that were still queued when a script ended were lost without a report."""
    program = f"""
        import lastgood, torch
        full = lastgood.Checkpointer({str(tmp_path / "full")!r}, {{"w": torch.zeros(3)}})
        full.save(1).result()
        ckpt = lastgood.Checkpointer({str(tmp_path / "run")!r}, {{"w": torch.zeros(2_000_000)}})
        from lastgood.io.files import PosixFile
        real = PosixFile.reserve
        def reserve(self, length):
            if self._path.startswith({str(tmp_path / "full")!r}):
                raise OSError(28, "No space left on device")
            real(self, length)
        PosixFile.reserve = reserve
        full.save(2)
        ckpt.save(3)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert "NoSpace" in done.stderr
    assert lastgood.open(tmp_path / "full").generation().step == 1
    assert lastgood.open(tmp_path / "run").generation().step == 3


def test_a_save_from_a_signal_handler_during_a_copy_is_refused(tmp_path: Path) -> None:
    refusals: list[str] = []
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3_000_000)}, memory=1 << 20) as ckpt:

        def handler(*_: object) -> None:
            try:
                ckpt.save(2)
            except errors.Refused as error:
                refusals.append(error.what)

        before = signal.signal(signal.SIGALRM, handler)
        try:
            begin = ckpt._pipeline.start

            def start(*args: object) -> None:
                begin(*args)
                signal.raise_signal(signal.SIGALRM)

            ckpt._pipeline.start = start  # type: ignore[method-assign]
            ckpt.save(1).result(timeout=30)
        finally:
            signal.signal(signal.SIGALRM, before)
    assert refusals == ["a save was asked for while the state is copied"]


def test_a_failing_event_callback_masks_no_exception(tmp_path: Path) -> None:
    def broken(_: lastgood.Event) -> None:
        raise ValueError("a logger's bug")

    with (
        pytest.raises(ZeroDivisionError),
        lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, on_event=broken) as ckpt,
    ):
        ckpt.save(1)
        raise ZeroDivisionError


def test_reading_a_run_changes_nothing_in_its_directory(tmp_path: Path) -> None:
    state = run_to(tmp_path, 3, build())
    before = os.stat(tmp_path).st_mtime_ns
    lastgood.load(tmp_path, state)
    assert lastgood.open(tmp_path).verify(3).good
    assert os.stat(tmp_path).st_mtime_ns == before


@pytest.mark.parametrize("step", [3.0, "3", None])
def test_a_step_that_is_no_integer_is_refused(tmp_path: Path, step: object) -> None:
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}) as ckpt, pytest.raises(errors.Refused, match="whole"):
        ckpt.save(step)


def test_a_committed_save_is_shown_to_the_supervisor_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was shown at the end of the next step: a job whose ranks died in an evaluation after the save counted as one
    without progress, and `lastgood run` gave it up."""
    page = str(tmp_path / "page")
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)
    with lastgood.Checkpointer(tmp_path / "run", {"weight": torch.zeros(3)}, cadence=lastgood.Every(steps=2)) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        save = ckpt.step(2)
        assert save is not None
        save.result()
        assert heartbeat.read(page).saved_step == 2


def test_a_checkpointer_that_its_state_leads_back_to_is_collected(tmp_path: Path) -> None:
    """What shows committed saves to the supervisor held the state: a run that was never closed stayed locked."""

    class Part:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, data: dict[str, int]) -> None: ...

    part = Part()
    part.owner = ckpt = lastgood.Checkpointer(tmp_path / "run", {"part": part})  # type: ignore[attr-defined]
    ckpt.restore()
    gone = weakref.ref(part)
    del part, ckpt
    gc.collect()
    assert gone() is None
    lastgood.Checkpointer(tmp_path / "run", {"part": Part()}).close()


def test_a_loop_that_only_saves_shows_its_steps_to_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a call of `step` a healthy job seemed to be in its first step for ever, and was ended as hung after an
    hour. A save of the step that was just completed is no second step."""
    page = str(tmp_path / "page")
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)
    with lastgood.Checkpointer(tmp_path / "run", {"weight": torch.zeros(3)}) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        ckpt.save(1)
        assert heartbeat.read(page).longest_seconds == 0.0
        ckpt.save(2)
        assert heartbeat.read(page).step == 2 and heartbeat.read(page).longest_seconds > 0.0


@pytest.mark.parametrize(
    ("option", "times"),
    [({"sentinel": lastgood.Sentinel()}, 1), ({"durable_within_seconds": 900.0}, 1), ({}, 0)],
)
def test_options_without_effect_are_reported_where_a_loop_only_saves(tmp_path: Path, option: dict, times: int) -> None:
    """A Sentinel looked at no loss of such a loop, without a word."""
    with reports() as texts, lastgood.Checkpointer(tmp_path / "run", {"weight": torch.zeros(3)}, **option) as ckpt:
        for n in (1, 1, 2, 3):
            ckpt.save(n, metrics={"loss": 1.0})
    named = [one for one in texts if "calls save() and never step()" in one]
    assert len(named) == times and all(f"{name}=" in named[0] for name in option)


def test_a_save_before_the_first_step_is_no_loop_that_only_saves(tmp_path: Path) -> None:
    options = {"sentinel": lastgood.Sentinel(every=1), "cadence": lastgood.Every(steps=10)}
    with reports() as texts, lastgood.Checkpointer(tmp_path / "run", {"weight": torch.zeros(3)}, **options) as ckpt:
        ckpt.save(0)
        ckpt.step(1, metrics={"loss": 1.0})
        ckpt.save(1)
    assert not any("never step()" in one for one in texts)


def test_events_behind_one_whose_callback_raises_come_later(tmp_path: Path) -> None:
    """A change that took all events from the queue before the first call lost those behind it."""
    seen: list[str] = []

    def note(event: lastgood.Event) -> None:
        seen.append(event.kind)
        if len(seen) == 1:
            raise ZeroDivisionError

    with lastgood.Checkpointer(tmp_path / "run", {"weight": torch.zeros(3)}, on_event=note) as ckpt:
        ckpt.save(1).result()
        with pytest.raises(ZeroDivisionError):
            ckpt.wait()
        ckpt.wait()
        assert seen.index("durable") > 0
