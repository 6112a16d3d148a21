"""Traces and policies that `lastgood bench goodput` refuses, because its table would be of something else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lastgood.errors import Refused
from lastgood_lab import goodput
from lastgood_lab.policies import POLICIES
from lastgood_lab.replay import KNOWN, Costs, parse, published

pytestmark = pytest.mark.slow

GIVEN = ["--intervals", 10, "--step-seconds", 1]
COSTS = Costs("GPM", 10, 1.0, 0.0, 0.0, 0.0)


def samples(path: Path, *alive: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(",Time,GPUs\n" + "".join(f"{at},{60 * at},{one}\n" for at, one in enumerate(alive)))
    return path


def test_two_traces_of_the_same_name_are_refused(bench: Any, tmp_path: Path) -> None:
    """The rows of both had one name, so the report had one table, with the heading of a and the values of b."""
    out, one, other = (
        tmp_path / "out",
        samples(tmp_path / "a/spot.csv", 8, 7, 7),
        samples(tmp_path / "b/spot.csv", 8, 8),
    )
    code, _, err = bench("goodput", "--out", out, *GIVEN, "--trace", one, "--trace", other)
    assert code == 3 and f"{one} and {other} have the same name" in err and not list(out.iterdir())
    other = other.rename(other.with_name("calm.csv"))
    code, text, err = bench("goodput", "--out", out, *GIVEN, "--trace", one, "--trace", other, "--json")
    assert code == 0, err
    failures = {(row["trace"], row["failures"]) for row in json.loads(text)["rows"] if row["count"] == "drops only"}
    assert failures == {("spot", 1), ("calm", 0)}


def test_the_same_trace_twice_is_refused_before_it_is_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.csv"
    with pytest.raises(Refused, match="the same name, missing"):
        goodput.run(goodput.Options(tmp_path, [missing, missing], given=[COSTS]), pytest.fail)


@pytest.mark.parametrize(
    ("given", "meant"), [("checkfreq", "CheckFreq"), ("gpm", "GPM"), ("Traditional", "traditional")]
)
def test_an_unknown_policy_is_refused_with_the_known_names(bench: Any, tmp_path: Path, given: str, meant: str) -> None:
    """`--policy checkfreq` was computed with the formula of PCcheck, under the name checkfreq."""
    out, trace = tmp_path / "out", samples(tmp_path / "spot.csv", 8, 7, 7)
    code, _, err = bench("goodput", "--out", out, *GIVEN, "--trace", trace, "--policy", given)
    assert code == 3 and f"Did you mean {meant}?" in err and "lastgood-slots" in err and not out.exists()


def test_every_policy_of_the_benchmarks_has_a_formula() -> None:
    assert set(KNOWN) == {*POLICIES, "ideal"}
    for policy in KNOWN:
        assert published(0, 100.0, dataclasses.replace(COSTS, policy=policy)) == 1.0


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("0,add,a\n0,Add,b\n9000,remove,a\n", "line 2: 'Add' is neither add nor remove"),
        ("0,add,a\n\n0,added,b\n9000,remove,a\n", "line 3: 'added' is neither"),
        ("0,Add,a\n0,add,b\n", "line 1: '0,Add,a' begins neither"),
        ("0,add,a\nsoon,remove,a\n", "line 2: 'soon' is no time"),
        ("0,add,a\n9000,remove\n", "line 2: 2 fields"),
        ("0,add,a\n0,add,b\n", "it lasts 0 s"),
        (",Time,GPUs\n0,0,8\n1,nan,7\n", "line 3: 'nan' is no time"),
        (",Time,GPUs\n0,0,8\n1,60,7.5\n", "line 3: '7.5' is no number of GPUs"),
        (",Time,GPUs\n0,0,8\n1,60,-1\n", "line 3: '-1' is no number of GPUs"),
        (",Time,GPUs\n0,0,8\n1\n", "line 3: 1 fields"),
        (",Time,GPUs\n0,0,8\n1,60,0\n", "it lasts 0 s"),
        (",Time,GPUs\n0,0," + 200_000 * "8", "line 2: field larger than"),
        (",Time,GPUs\n0,0,8\n1,60,7\n2,30,6\n", "line 4: 30 s come after 60 s"),
        (",Time,GPUs\n", "it has no samples"),
        (",Time,GPUs\n0,0,0\n1,60,0\n", "it has no samples"),
        ("\n", "it has no lines"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, text: str, what: str) -> None:
    """`Add` and `added` counted as removals; a trace without a sample ended in an IndexError; a time could be NaN."""
    with pytest.raises(ValueError) as raised:
        parse(text)
    assert what in str(raised.value)
    (tmp_path / "spot.csv").write_text(text)
    with pytest.raises(Refused, match="is no trace"):
        goodput.read(tmp_path / "spot.csv")


def test_blank_lines_of_a_trace_are_skipped(tmp_path: Path) -> None:
    """The trace was read without them, but the line that sums it up ended in an IndexError."""
    path = tmp_path / "spot.csv"
    path.write_text("\n,Time,GPUs\n0,0,8\n\n1,60,4\n2,120,4\n\n")
    assert "1 drops" in (text := goodput.trace_summary(path, goodput.read(path))) and text.endswith("tear-down: 3")
