"""Invalid arguments are refused by name before anything is changed."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import lastgood
from lastgood import errors
from lastgood.cli import app
from lastgood.io.files import Lock
from lastgood.loop import checkpointer
from lastgood.loop.metrics import numbers
from lastgood.policy.retention import Keep
from lastgood.ranks import torch_store
from lastgood.records import LAYERS

URLS = ["s3:/bucket/run", "gs:///b/run", "hdfs://n/run", "https://h/run", "file://x/run", "SLOTS:///x/run"]


@pytest.mark.parametrize("path", [*URLS, Path("s3://bucket/run"), None, b"run", "", 5, "a\0b"])
def test_every_entry_point_refuses_a_path_that_is_no_directory(tmp_path: Path, monkeypatch, path: object) -> None:
    """s3://bucket/run created a folder `s3:` beside the script, on a disk that was deleted with the machine."""
    monkeypatch.chdir(tmp_path)
    ways = [
        lambda: lastgood.Checkpointer(path, {}),
        lambda: lastgood.open(path),
        lambda: lastgood.save(path, {"n": 1}),
        lambda: lastgood.load(path, {"n": 1}),
        lambda: lastgood.dcp.Writer(path),
        lambda: lastgood.dcp.Reader(path),
    ]
    for way in ways:
        with pytest.raises(errors.Refused, match="path="):
            way()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command", [["ls"], ["verify"], ["show"], ["tune", "--state-bytes", "1MB", "--step-seconds", "1"]]
)
def test_the_command_line_refuses_urls_that_are_no_place(
    tmp_path: Path, monkeypatch, capsys, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main([command[0], "hdfs://n/run", *command[1:]]) == 3
    assert "is a URL" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_tilde_expands_to_the_home_directory(tmp_path: Path, monkeypatch) -> None:
    """~/run created a folder named `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    lastgood.save("~/run", {"n": 1})
    assert lastgood.open(Path("~/run")).generation().step == 0
    assert [one.name for one in tmp_path.iterdir()] == ["run"]
    with pytest.raises(errors.Refused, match="no user ~nobody-of-that-name"):
        lastgood.open("~nobody-of-that-name/run")


WRONG = [
    {"retention": 3},
    {"parity": 12},
    {"parity": "many"},
    {"cadence": 10},
    {"on_event": "print"},
    {"include": "model"},
    {"exclude": [1]},
    {"finite_except": "model.*"},
    {"memory": "1GB"},
    {"memory": 2.5e6},
    {"in_flight": 2.0},
    {"in_flight": True},
    {"writers": 0},
    {"chunk": "8MB"},
    {"overhead": 2},
    {"patience": "10"},
    {"staging": 1},
    {"when_full": None},
    {"digest": None},
    {"scrub": 3600},
    {"preemption": True},
    {"save_on_exit": "no"},
    {"persist": "mmap"},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_an_option_of_the_wrong_kind_is_refused_by_name(tmp_path: Path, wrong: dict) -> None:
    """retention=3 raised AttributeError at the first save, and memory="1GB" raised TypeError."""
    with pytest.raises(errors.Refused, match=next(iter(wrong))):
        lastgood.Checkpointer(tmp_path / "run", {}, **wrong)
    assert not (tmp_path / "run").exists()


NUMBERS = [
    (lastgood.Keep, {"last": "3"}),
    (lastgood.Keep, {"last": 0}),
    (lastgood.Keep, {"every": 2.0}),
    (lastgood.Keep, {"last": np.array([1, 2])}),
    (lastgood.Every, {"steps": "10"}),
    (lastgood.Every, {"steps": torch.tensor([1, 2])}),
    (lastgood.Every, {"seconds": math.nan}),
    (lastgood.Scrub, {"seconds": "1h"}),
    (lastgood.Scrub, {"bytes_per_second": 0}),
    (lastgood.Preemption, {"grace_seconds": "30"}),
    (lastgood.Preemption, {"signals": signal.SIGTERM}),
    (lastgood.Preemption, {"exit_code": "75"}),
]


@pytest.mark.parametrize(("kind", "wrong"), NUMBERS, ids=str)
def test_a_number_of_the_wrong_type_is_refused_by_name_and_value(kind: type, wrong: dict) -> None:
    """Keep(last="3") was refused with "keeps nothing", and Preemption(grace_seconds="30") raised TypeError."""
    ((name, value),) = wrong.items()
    with pytest.raises(errors.Refused, match=re.escape(f"{kind.__name__}({name}={value!r})")):
        kind(**wrong)


def test_invalid_options_are_refused_at_construction_by_name(tmp_path: Path) -> None:
    """rename=[("a", "b")] raised AttributeError, wait("5") raised TypeError, and strict="no" counted as True."""
    lastgood.save(tmp_path / "run", {"n": 1})
    with pytest.raises(errors.Refused, match="step=10000000000000"):
        lastgood.save(tmp_path / "run", {"n": 1}, step=10**13)
    for wrong in ({"strict": "no"}, {"strict": None}, {"rename": [("a", "b")]}, {"rename": {"a": 1}}):
        with pytest.raises(errors.Refused, match=f"{next(iter(wrong))}="):
            lastgood.load(tmp_path / "run", {"n": 1}, **wrong)
    for wrong in (torch.nn.Linear(1, 1), [1]):
        with pytest.raises(errors.Refused, match="state is a"):
            lastgood.load(tmp_path / "run", wrong)
        with pytest.raises(errors.Refused, match="state is a"):
            lastgood.save(tmp_path / "run", wrong)
    with lastgood.Checkpointer(tmp_path / "run", {"n": 1}) as ckpt:
        ckpt.restore()
        with pytest.raises(errors.Refused, match="rename="):
            ckpt.restore(rename=[("a", "b")])
        with pytest.raises(errors.Refused, match="step 10000000000000 is not below"):
            ckpt.step(10**13)
        for call in (ckpt.wait, ckpt.close, ckpt.save(1).result):
            for timeout in ("5", float("inf"), float("nan")):
                with pytest.raises(errors.Refused, match=f"timeout={timeout!r}"):
                    call(timeout)
    with pytest.raises(errors.Refused, match="closed"), ckpt:
        raise AssertionError("the body of a second `with` statement ran on a closed checkpointer")


@pytest.mark.parametrize("layers", [["digest"], [], "digests"])
def test_an_empty_list_of_verification_layers_is_refused(tmp_path: Path, layers: object, capsys) -> None:
    """verify(layers=["digest"]), for "digests", checked nothing and found everything good."""
    lastgood.save(tmp_path, {"n": 1})
    with pytest.raises(errors.Refused, match="layers="):
        lastgood.open(tmp_path).verify(layers=layers)
    without = [text for one in LAYERS for text in ("--without", one)]
    assert app.main(["verify", str(tmp_path), *without]) == 2
    assert "nothing to check" in capsys.readouterr().err


def test_a_restart_time_must_be_a_number(capsys) -> None:
    """`lastgood plan --restart-seconds nan --json` ended in a traceback."""
    known = ["--mtbf-seconds", "1e5", "--stall-seconds", "1", "--state-bytes", "1GB"]
    assert app.main(["plan", *known, "--restart-seconds", "nan", "--json"]) == 2
    assert app.main(["plan", *known, "--restart-seconds", "0", "--json"]) == 0


def test_a_loss_that_requires_grad_is_accepted_as_a_metric(tmp_path: Path) -> None:
    """metrics={"loss": loss}, a common call, made torch warn about a conversion."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers({"loss": torch.ones((), requires_grad=True) * 2}) == {"loss": 2.0}


@pytest.mark.parametrize("wrong", [{"loss": 0.5}, {}, "best", 1, None, torch.ones(2, dtype=torch.bool)], ids=str)
def test_a_milestone_that_is_neither_true_nor_false_is_refused(tmp_path: Path, wrong: object) -> None:
    """`ckpt.save(n, {"loss": loss})`, in the pattern of `step`, made a milestone, which is kept for ever, and dropped
    the metrics without a word."""
    with lastgood.Checkpointer(tmp_path, {"n": 1}, save_on_exit=False) as ckpt:
        with pytest.raises(errors.Refused, match=r"milestone=.*metrics by name: save\(n, metrics="):
            ckpt.save(1, wrong)
        for step, right in enumerate((True, np.bool_(True), torch.tensor(0.1) < 0.5), start=1):
            assert ckpt.save(step, right).result().commit.milestone
        assert not ckpt.save(4, np.bool_(False), {"loss": 0.5}).result().commit.milestone
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1, 2, 3, 4]


def test_numpy_and_torch_scalars_are_accepted_as_numbers(tmp_path: Path) -> None:
    assert lastgood.Every(steps=np.int64(3)).due(3, 0.0)
    lastgood.save(tmp_path, {"n": 1}, step=np.int64(4))
    assert lastgood.load(tmp_path, step=torch.tensor(4)).restored.step == 4


@pytest.mark.parametrize("step", ["5", 5.0, True, "latest", False, 0.0])
def test_a_restore_step_that_is_no_integer_is_refused_with_all_steps(tmp_path: Path, step: object) -> None:
    """restore(step="5") found "no generation of step 5. Steps that are there: 5."."""
    lastgood.save(tmp_path, {"n": 1}, step=5)
    lastgood.save(tmp_path, {"n": 1}, step=10)
    with lastgood.Checkpointer(tmp_path, {"n": 1}) as ckpt:
        ckpt.restore()
        for way in (ckpt.restore, lambda step: lastgood.load(tmp_path, step=step), lastgood.open(tmp_path).generation):
            with pytest.raises(
                errors.NoSuchStep, match=re.escape(f"step={step!r} is neither a whole number")
            ) as refused:
                way(step=step)
            assert refused.value.safe and refused.value.todo == "Steps that are there: 5, 10."
    with pytest.raises(errors.Refused, match=f"step={step!r}"):
        lastgood.save(tmp_path, {"n": 1}, step=step)


@pytest.mark.parametrize("state", [[1], {1: torch.zeros(3)}, None])
def test_a_state_that_is_no_dict_of_names_is_refused(tmp_path: Path, state: object) -> None:
    with pytest.raises(errors.Refused, match="state"):
        lastgood.Checkpointer(tmp_path / "run", state)


@pytest.mark.parametrize(
    "wrong",
    [{"last": True}, {"last": 2.5}, {"every": "10"}, {"milestones": 5}, {"milestones": "5"}, {"best": "loss"}],
    ids=str,
)
def test_a_meaningless_retention_policy_is_refused(wrong: dict) -> None:
    with pytest.raises(errors.Refused, match=next(iter(wrong))):
        Keep(**wrong)


def test_tune_refuses_an_overhead_that_is_no_fraction(tmp_path: Path, capsys) -> None:
    """--overhead 2 was read as 200 %."""
    command = ["tune", str(tmp_path / "run"), "--state-bytes", "1MB", "--step-seconds", "1", "--overhead", "2"]
    assert app.main(command) == 2
    assert "fraction" in capsys.readouterr().err


def test_running_a_notebook_cell_twice_gives_a_helpful_error(tmp_path: Path) -> None:
    """The error advised the user to end another process, which was the user's own process."""
    with (
        lastgood.Checkpointer(tmp_path, {}),
        pytest.raises(errors.RunLocked, match=r"in this process already.*close\(\)"),
    ):
        lastgood.Checkpointer(tmp_path, {})


def test_the_error_names_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    program = "import sys; from lastgood.io.files import Lock; l = Lock(sys.argv[1]); print(flush=True); input()"
    command = [sys.executable, "-c", program, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        with pytest.raises(errors.RunLocked, match=rf"in (process {other.pid}|another process)\..*End that process"):
            lastgood.Checkpointer(tmp_path, {})
        other.stdin.close()
    Lock(str(tmp_path / ".lock")).close()


def test_a_rank_without_a_process_group_is_refused(tmp_path: Path, monkeypatch) -> None:
    """Under torchrun without init_process_group, rank 0's error advised the user to end rank 1; following that
    advice produced two half runs."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(errors.Refused, match=r"rank 1 of 2 .*init_process_group\(\) before opening"):
        lastgood.Checkpointer(tmp_path / "run", {})
    assert not os.path.exists(tmp_path / "run")
    torch_store.require_group({"WORLD_SIZE": "1", "RANK": "0"})


def test_a_checkpointer_older_than_the_process_group_is_refused(tmp_path, monkeypatch) -> None:
    """The checkpointer continued as a world of one: each rank would have saved the whole run by itself."""
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}) as ckpt:
        monkeypatch.setattr(checkpointer, "world_size", lambda: 2)
        for call in (lambda: ckpt.step(1), lambda: ckpt.save(1), ckpt.restore):
            with pytest.raises(errors.Refused, match=r"world of 1, and called in a group of 2 ranks"):
                call()
    assert not lastgood.open(tmp_path).generations()


def test_errors_name_a_dangling_link_and_a_folder_of_other_files(tmp_path: Path) -> None:
    """A dangling link was called a file, and a folder with a .gitignore was refused without a way out."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(errors.NotARun, match=r"a link to .*nowhere, which is not a directory"):
        lastgood.Checkpointer(tmp_path / "link", {})
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.yaml").touch()
    with pytest.raises(errors.NotARun, match=r"config.yaml.*one inside it: .*project/checkpoints"):
        lastgood.Checkpointer(tmp_path / "project", {})
