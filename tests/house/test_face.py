"""The public names and the tree of errors are fixed: each change to them affects every user."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

import lastgood
from lastgood import errors
from lastgood.loop.options import EarlierKeywords, Options


def test_the_public_names_are_exactly_these_and_each_exists() -> None:
    assert sorted(lastgood.__all__) == [
        "Audit",
        "Checkpointer",
        "Event",
        "Every",
        "Finding",
        "Generation",
        "Keep",
        "Loaded",
        "Preempted",
        "Preemption",
        "Ranks",
        "Restored",
        "ResumableSampler",
        "Run",
        "Save",
        "Scrub",
        "Sentinel",
        "Tier",
        "Tuning",
        "Verdict",
        "dcp",
        "errors",
        "load",
        "open",
        "save",
    ]
    for name in lastgood.__all__:
        assert getattr(lastgood, name) is not None


@pytest.mark.parametrize(
    ("face", "signature"),
    [
        (
            lastgood.Checkpointer,
            "path state * cadence retention include exclude on_error on_event parity scrub finite_also finite_except "
            "preemption sentinel save_on_exit durable_within_seconds tuning ranks tiers earlier",
        ),
        (
            lastgood.Tuning,
            "* memory in_flight writers chunk staging torn_check when_full overhead mtbf write_mode digest persist",
        ),
        (lastgood.Ranks, "* patience just_in_time_seconds"),
        (lastgood.Tier, "url * cadence retention parity copies spread shared"),
        (lastgood.Checkpointer.restore, "self step strict rename"),
        (lastgood.Checkpointer.step, "self n metrics"),
        (lastgood.Checkpointer.save, "self n milestone metrics"),
        (lastgood.Checkpointer.wait, "self timeout"),
        (lastgood.Checkpointer.close, "self timeout"),
        (lastgood.Checkpointer.latest, "self"),
        (lastgood.Checkpointer.fence, "self"),
        (lastgood.Save.result, "self timeout"),
        (lastgood.Save.durable, "self survives"),
        (
            lastgood.ResumableSampler,
            "dataset_size global_batch seed rank world_size shuffle batches_per_step largest_batch",
        ),
        (lastgood.Keep, "last every milestones best"),
        (lastgood.Every, "steps seconds"),
        (lastgood.save, "path state step include exclude finite_also finite_except"),
        (lastgood.load, "path state step strict rename include exclude"),
        (lastgood.open, "path"),
        (lastgood.Run.tensor, "self name step"),
        (lastgood.Run.verify, "self step layers"),
        (lastgood.Run.generation, "self step"),
    ],
)
def test_the_public_functions_accept_exactly_these_arguments(face: object, signature: str) -> None:
    parameters = inspect.signature(face).parameters.values()
    names = []
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(one.name)
    assert " ".join(names) == signature


def test_reading_a_run_does_not_import_torch() -> None:
    program = "import sys, lastgood, lastgood.cli.app, lastgood.run.writer; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_documented_error_tree_matches_the_classes() -> None:
    drawing = (errors.__doc__ or "").split("LastgoodError", 1)[1].rsplit("Anything else", 1)[0]
    for branch in drawing.replace("`-", "|-").split("|- ")[1:]:
        parent, *rest = branch.split()
        children = {word for word in rest if isinstance(getattr(errors, word, None), type)}
        assert children == {one.__name__ for one in getattr(errors, parent).__subclasses__()}, parent


@pytest.mark.parametrize("kind", [one for one in vars(errors).values() if inspect.isclass(one)])
def test_every_error_states_its_retry_rule_and_exit_code(kind: type) -> None:
    if kind is errors.LastgoodWarning:
        return
    assert issubclass(kind, errors.LastgoodError)
    branches = {
        errors.Refused: (3, False),
        errors.Damaged: (4, False),
        errors.Unavailable: (5, True),
        errors.Diverged: (6, False),
        errors.Unfit: (8, False),
    }
    expected = [rule for branch, rule in branches.items() if issubclass(kind, branch)] or [(1, False)]
    assert [(kind.exit_code, kind.retry)] == expected


def test_each_field_of_tuning_and_ranks_is_a_keyword_of_its_own(tmp_path) -> None:
    """Scripts written for version 0.1.0 pass `in_flight=3`, not `tuning=Tuning(in_flight=3)`."""
    grouped = [one.name for group in (lastgood.Tuning, lastgood.Ranks) for one in dataclasses.fields(group)]
    assert grouped == list(EarlierKeywords.__annotations__)
    options = Options().with_keywords({"in_flight": 3, "patience": 7.0})
    assert (options.tuning.in_flight, options.ranks.patience) == (3, 7.0)
    with pytest.raises(TypeError, match="'in_fligth'; did you mean 'in_flight'"):
        lastgood.Checkpointer(tmp_path / "run", {}, in_fligth=3)
    with pytest.raises(TypeError, match="'mtbf_seconds'; did you mean 'mtbf'"):
        lastgood.Checkpointer(tmp_path / "run", {}, mtbf_seconds=3600)
    with pytest.raises(errors.Refused, match="in_flight is given twice"):
        lastgood.Checkpointer(tmp_path / "run", {}, tuning=lastgood.Tuning(in_flight=4), in_flight=3)
    assert not (tmp_path / "run").exists()
