"""Paths as users type them: URLs, slots, `~` and `$HOME` are expanded or refused, and never become folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import lastgood
from lastgood import errors
from lastgood.cli import app
from lastgood.run import access, paths, peer_security

MISTYPED = {
    "s3:/bucket/run": "Write s3://bucket/run .in small letters, as text, and with two",
    "S3://bucket/run": "Write s3://bucket/run",
    "s3a://bucket/run": "Write s3://bucket/run",
    "s3:///bucket": "Write s3://bucket",
    "s3://": "Write s3://BUCKET/RUN",
    "gs:/b": "Write gs://b",
    "s3://bucket//run": "'' cannot be part of a name",
    "s3://bucket/../run": "'..' cannot be part of a name",
    "s3://bucket/run?region=x": "cannot be part of a name.*no [?]",
    "s3://bucket/$NOWHERE/run": r"'\$NOWHERE' cannot be part of a name.*variable",
    "s3://bucket/run\n": "cannot be part of a name.*white space",
    "s3//bucket/run": "Write s3://bucket/run",
    "S3//bucket/run": "Write s3://bucket/run",
    "s3:bucket/run": "Write s3://bucket/run",
    "gs//b": "Write gs://b",
    "htps://bucket/run": "not that of a place for runs.*s3://, gs://, az:// or slots:///",
    "memory://": "names no run.*Give the home, and tiers=.*lastgood tiers",
    "memory:run": "names no run",
    "Memory:///run": "names no run",
    "hdfs://nodes/run": "is a URL.*mounted.*or ./hdfs://nodes/run",
    "https://bucket.s3.amazonaws.com/run": "is a URL",
    "file:/data/run": "is a URL.*Give /data/run",
    "slots:run": "Write slots:///.*/run",
    "slots:/data/run": "Write slots:///data/run",
    "SLOTS:///data/run": "Write slots:///data/run .in small letters",
    "$NOWHERE/run": r"the environment variable \$NOWHERE, which was not expanded.*os.path.expandvars",
    "${HOME}/run": r"the environment variable \$\{HOME\}",
    "slots://$HOME/run": r"the environment variable \$HOME",
    "run\n": "white space",
}


@pytest.mark.parametrize("path", MISTYPED)
def test_a_mistyped_path_is_refused_with_the_correct_spelling(tmp_path: Path, monkeypatch, path: str) -> None:
    """A folder named `s3:`, `slots:run` or `$HOME` was created beside the script, and held the run."""
    monkeypatch.chdir(tmp_path)
    for way in (
        lambda: lastgood.Checkpointer(path, {}),
        lambda: lastgood.load(path),
        lambda: lastgood.dcp.Writer(path),
    ):
        with pytest.raises(errors.Refused, match=f"(?s)path=.*{MISTYPED[path]}"):
            way()
    assert not [*tmp_path.iterdir()]


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory was made, and then UnicodeEncodeError raised."""
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    for path in (odd, f"slots://{odd}", odd / "below"):
        with pytest.raises(errors.Refused, match="not UTF-8"):
            lastgood.Checkpointer(path, {})
    assert [*tmp_path.iterdir()] == []
    odd.mkdir()
    monkeypatch.chdir(odd)
    with pytest.raises(errors.Refused, match="not UTF-8"):
        lastgood.Checkpointer("run", {})
    assert [*odd.iterdir()] == []


def test_a_slots_path_mangled_by_pathlib_is_refused_with_the_correct_one() -> None:
    with pytest.raises(errors.Refused, match=r"Write slots:///data/run .*as text"):
        lastgood.open(Path("slots:///data/run"))


def test_an_existing_folder_with_a_dollar_in_its_name_still_opens(tmp_path: Path, monkeypatch) -> None:
    """Earlier versions may have created a run in a folder named `$HOME`."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("$HOME")
    lastgood.save("$HOME/run", {"n": 1})
    assert lastgood.load("$HOME/run")["n"] == 1
    assert lastgood.open(tmp_path / "$HOME" / "run").generation().step == 0
    with pytest.raises(errors.Refused, match=r"\$USER"):
        lastgood.save("$HOME/$USER", {"n": 1})


def test_an_existing_folder_with_the_name_of_a_scheme_still_opens(tmp_path: Path, monkeypatch) -> None:
    """`s3//bucket/run` made a folder `s3` beside the script, and `s3:bucket/run` a folder `s3:bucket`."""
    monkeypatch.chdir(tmp_path)
    for name in ("s3", "s3:bucket"):
        os.mkdir(name)
    assert paths.parsed("s3//run").root == str(tmp_path / "s3/run")
    assert paths.parsed("s3:bucket/run").root == str(tmp_path / "s3:bucket/run")


@pytest.mark.parametrize("path", ["slots", "Slots", "run:1", "a$/b$", "100$", "T10:30", "./s3:/bucket", "s3/bucket"])
def test_names_with_colons_and_dollars_that_are_no_variables_are_accepted(
    tmp_path: Path, monkeypatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.parsed(path) == (str(tmp_path / path), "directory")


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("s3://bucket/runs/gpt-2/", ("s3://bucket/runs/gpt-2", "objects")),
        ("gs://bucket", ("gs://bucket", "objects")),
        ("az://container/a b", ("az://container/a b", "objects")),
        ("file:///data/run", ("/data/run", "directory")),
        ("slots:///data/run", ("/data/run", "slots")),
    ],
)
def test_a_url_names_a_place(path: str, place: tuple[str, str]) -> None:
    assert paths.parsed(path) == place


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> Path:
    """A run in the home directory, which is the working directory as well."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    lastgood.save(tmp_path / "run", {"w": torch.ones(4)})
    return tmp_path / "run"


@pytest.mark.parametrize(
    "target", ["s3://b/m.pt", "s3:/b/m.safetensors", "s3://b/model", "slots:///x/m.pt", "$HOME/m.pt"]
)
def test_command_line_files_follow_the_rules_for_paths(run: Path, capsys, target: str) -> None:
    """`lastgood export RUN --to s3://bucket/model.pt` tried to write to a folder named `s3:`."""
    for command in (["export", str(run), "--to", target], ["import", target, str(run / "other")]):
        assert app.main(command) == 3
        assert "URL" in (text := capsys.readouterr().err) or "not expanded" in text
    assert [one.name for one in run.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("command", ["ls", "verify", "show", "gc", "scrub", "repair"])
def test_every_command_refuses_an_unexpanded_variable(run: Path, capsys, command: str) -> None:
    assert app.main([command, "$HOME/run"]) == 3
    assert "$HOME, which was not expanded" in capsys.readouterr().err


def test_a_tilde_is_the_home_directory_in_export_and_import(run: Path, capsys) -> None:
    """bash does not expand the tilde of `--to=~/model.pt`."""
    assert app.main(["export", "~/run", "--to=~/model.safetensors"]) == 0
    assert app.main(["import", "~/model.safetensors", "~/again", "--json"]) == 0
    assert f'"place": "{run.parent}/again"' in capsys.readouterr().out
    assert sorted(one.name for one in run.parent.iterdir()) == ["again", "model.safetensors", "run"]


def test_a_path_beside_above_or_inside_runs_names_them(run: Path) -> None:
    """`lastgood ls runs/a/gen` and `lastgood ls runs` only said that the path is to be checked."""
    inside, beside = f"It is a part of the run {run}.", f"Check the path. Runs in {run.parent}: {run}."
    asked = {run / "gen": inside, run / "gen" / "none": inside, run.parent: beside, run.with_name("none"): beside}
    for path, todo in asked.items():
        with pytest.raises(errors.NotARun) as raised:
            access.for_reading(path)
        assert raised.value.todo == todo
    with pytest.raises(errors.NotARun, match=r"Check the path\.$"):
        access.for_reading(run.parent / "none" / "none")


def test_a_new_run_among_the_files_of_a_run_is_refused(run: Path, call) -> None:
    """`Checkpointer("runs/gpt/gen")` was answered: give a new directory, for example one inside it. That made a run
    among the generations of the run."""
    before = sorted(run.rglob("*"))
    (run.parent / "link").symlink_to(run / "gen")
    for place in (run / "gen", run / "gen/a/b", run.parent / "link" / "new", f"slots://{run}/incarnations/new"):
        with pytest.raises(errors.NotARun, match=rf"lies in the run {run},.* a directory outside of it") as raised:
            lastgood.Checkpointer(place, {})
        assert raised.value.safe == "Nothing was touched."
    with pytest.raises(errors.NotARun, match=f"lies in the run {run}"):
        lastgood.save(run / "gen" / "new", {"n": 1})
    lastgood.save(run.parent / "other", {"n": 1})
    assert call("copy", str(run.parent / "other"), str(run / "gen" / "new"))[0] == 3
    assert sorted(run.rglob("*")) == before
    lastgood.save(run / "best", {"n": 1})
    assert lastgood.open(run / "best").generations() and lastgood.open(run).generations()


def test_a_relative_path_in_a_deleted_folder_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    """`lastgood ls runs/gpt` in a shell whose folder was deleted ended with a FileNotFoundError and a traceback."""
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    for path in ("runs/gpt", "slots://runs/gpt", "slots:runs/gpt"):
        with pytest.raises(errors.Refused, match=r"folder does not exist any more.*give the absolute path"):
            paths.parsed(path)
    with pytest.raises(errors.Refused, match=r"folder does not exist any more.*give the absolute path"):
        peer_security.own_certificates(dict.fromkeys(peer_security.VARIABLES, "node.pem"))
    lastgood.save(tmp_path / "run", {"n": 1})
    for command in (["ls", "runs/gpt"], ["export", f"{tmp_path}/run", "--to", "model.safetensors"]):
        assert app.main(command) == 3
        assert "the current folder does not exist any more" in capsys.readouterr().err
    assert paths.parsed(tmp_path / "run").root == str(tmp_path / "run")
