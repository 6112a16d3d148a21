"""The policy file of `lastgood run`: what it may say, and that a mistake in it starts nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lastgood.errors import NotInstalled, Refused
from lastgood.supervisor.arguments import parsed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('started')")
    return tmp_path


def test_each_long_option_is_a_key_with_the_value_of_its_flag(folder: Path) -> None:
    text = "hang-timeout: 7.5\nremedies: [back]\npreload: a, b\nmax-restarts: 10\nhang-factor: 3\nnproc_per_node: 2\n"
    text += "cause-restarts: [hang=5, SIGKILL=2, Exception=1]\n"
    (folder / "lastgood.yaml").write_text(text)
    job = parsed(["train.py"], {})
    assert (job.limits.least_seconds, job.limits.times, job.ranks, job.preload) == (7.5, 3.0, 2, ("a", "b"))
    assert (job.budget.remedies, job.budget.restarts) == (("back",), 10)
    assert job.budget.of_causes == {"hang": 5, "SIGKILL": 2, "Exception": 1}


def test_a_flag_replaces_a_variable_which_replaces_the_file(folder: Path) -> None:
    (folder / "lastgood.yaml").write_text("max-restarts: 1\nwithout-progress: 4\nhang-timeout: 5\nspawn: true\n")
    environ = {"PET_MAX_RESTARTS": "2", "PET_WITHOUT_PROGRESS": "6", "PET_SPAWN": "0"}
    job = parsed(["--without-progress", "8", "train.py"], environ)
    assert (job.budget.restarts, job.budget.without_progress, job.limits.least_seconds) == (2, 8, 5.0)
    assert not job.spawn and job.notes == ["policy from lastgood.yaml: --hang-timeout 5"]


def test_a_policy_of_another_name_is_read_in_place_of_the_one_here(folder: Path) -> None:
    (folder / "lastgood.yaml").write_text("max-restarts: 1")
    (folder / "other.yaml").write_text("max-restarts: 2")
    assert parsed(["train.py"], {"PET_POLICY": "other.yaml"}).budget.restarts == 2
    assert parsed(["--policy", "/dev/null", "train.py"], {}).budget.restarts is None


def test_a_link_to_no_policy_is_refused_and_a_home_is_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link whose file was not mounted was no policy, without a word. `~` made a folder of this name."""
    (folder / "lastgood.yaml").symlink_to("gone.yaml")
    with pytest.raises(Refused, match="cannot be read"):
        parsed(["train.py"], {})
    monkeypatch.setenv("HOME", str(folder))
    (folder / "gone.yaml").write_text("log-dir: ~/logs")
    assert parsed(["train.py"], {}).log_dir == folder / "logs"


def test_a_policy_that_cannot_be_read_is_answered_by_where_it_was_named(folder: Path) -> None:
    """Of the file that is read without --policy, and of one that PET_POLICY names, it said: Correct --policy."""
    (folder / "lastgood.yaml").mkdir()
    with pytest.raises(Refused) as found:
        parsed(["train.py"], {})
    assert found.value.todo == "Make it readable; --policy /dev/null does without it."
    with pytest.raises(Refused) as found:
        parsed(["--policy", "none.yaml", "train.py"], {})
    assert found.value.todo == "Correct --policy."
    with pytest.raises(Refused) as found:
        parsed(["train.py"], {"PET_POLICY": "none.yaml"})
    assert found.value.todo == "Correct PET_POLICY."


def test_texts_that_yaml_takes_for_dates_or_switches_stay_texts(folder: Path) -> None:
    """`rdzv-id: 2026-11-26` and `role: on` were refused: does not take timestamp, does not take true or false."""
    (folder / "lastgood.yaml").write_text("rdzv-id: 2026-11-26\nrole: on\nlog-dir: 2026\npreload: [yes, json]\n")
    job = parsed(["train.py"], {})
    assert (job.run_id, job.role, job.log_dir) == ("2026-11-26", "on", folder / "2026")
    assert job.preload == ("yes", "json")


@pytest.mark.parametrize(
    ("text", "says", "todo"),
    [
        ("spawn: true\nhang-timout: 3\n", "lastgood.yaml:2: unknown key hang-timout", "Did you mean hang-timeout?"),
        ("policy: x\n", ":1: unknown key policy", ""),
        ("remedies: [back,\n  skipp]\n", "'skipp' is no remedy. Did you mean skip", ""),
        ("\nmax-restarts: many\n", ":2: max-restarts: 'many' is not a whole number", ""),
        ("max-restarts: true\n", "max-restarts: does not take true", ""),
        ("max-restarts: 2026-11-26\n", "max-restarts: does not take a date", ""),
        ("role: null\n", "role: has no value", ""),
        ("records: off\n", "records: does not take true", ""),
        ("start-method: on\n", "start-method: does not take true", ""),
        ("max-restarts:\n", "max-restarts: has no value", ""),
        ("max-restarts: [1]\n", "max-restarts: does not take a list", ""),
        ("hang-timeout: .inf\n", "hang-timeout: '.inf' is not a number of seconds", ""),
        ("hang-timeout: 60s\n", "hang-timeout: '60s' is not a number of seconds", ""),
        ("spawn: maybe\n", "spawn: takes true or false", ""),
        ("start-method: thread\n", "start-method: 'thread'", ""),
        ("nnodes: 1;4\n", "--nnodes 1;4", ""),
        ("spares: -1\n", "spares: '-1' is not a whole number of at least 0", ""),
        ("spares: 1\n", "--spares 1 with one node", "Give --nnodes too"),
        ("role: !!python/name:os.system ''\n", "role: does not take python/name", ""),
        ("role: a\nnproc-per-node: 1\nnproc_per_node: 2\n", ":3: nproc_per_node stands there twice", ""),
        ("- spawn\n", "a policy file is a mapping", ""),
        ("a: [b\n", "no YAML", ""),
        ("\x01", "no YAML", ""),
        ("preload: json\nspawn: true\n", "contradict", ""),
    ],
)
def test_a_mistake_in_a_policy_is_refused_with_its_line(folder: Path, text: str, says: str, todo: str) -> None:
    """`1:4` was read as the number 64, and of two equal keys the last one counted."""
    (folder / "lastgood.yaml").write_text(text)
    with pytest.raises(Refused) as found:
        parsed(["train.py"], {})
    assert says in found.value.what and todo in found.value.todo and found.value.safe == "Nothing was started."


def test_a_policy_with_the_other_ending_is_not_passed_over(folder: Path) -> None:
    (folder / "lastgood.yml").write_text("max-restarts: 1")
    with pytest.raises(Refused, match=r"lastgood\.yml is not read"):
        parsed(["train.py"], {})
    assert parsed(["--policy", "lastgood.yml", "train.py"], {}).budget.restarts == 1


def test_a_policy_without_the_package_for_it_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lastgood.yaml").write_text("max-restarts: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(NotInstalled, match=r"pip install 'lastgood\[cli\]'"):
        parsed(["train.py"], {})


@pytest.mark.slow
def test_a_typo_in_a_policy_starts_nothing_and_has_the_code_of_refusals(folder: Path) -> None:
    (folder / "lastgood.yaml").write_text("hang-timout: 60")
    lastgood = str(Path(sys.executable).with_name("lastgood"))
    done = subprocess.run([lastgood, "run", "--spawn", "train.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (Refused.exit_code, "")
    assert done.stderr.splitlines()[0] == "lastgood: lastgood.yaml:1: unknown key hang-timout"
