"""Markers in the source: each safeguard has a mutant that removes it, each crash gap a row in docs/format.md."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from lastgood_lab.campaigns.mutants import MUTANTS
from lastgood_lab.campaigns.mutants.change import (
    AfterNext,
    Always,
    Change,
    Instead,
    Never,
    Remove,
    Statement,
    Swap,
    Unfit,
    marked_lines,
)

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {path: path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))}
KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+){1,5}")
SAMPLE = """\
def write(file, data):
    # guard: loops
    while data and not file.closed:
        # Short writes are continued.
        data = data[file.write(data) :]  # guard: advances
    file.sync()  # guard: syncs, closes-last
    file.close()
    if data:
        return 1
    elif file.failed:  # guard: reports
        return 2
    return sum([  # guard: spans
        1,
    ])
"""


def marked(kind: str) -> Counter[str]:
    return Counter(name for text in SOURCES.values() for name, _ in marked_lines(text, kind))


def test_each_guard_name_is_unique_and_two_to_six_words() -> None:
    names = marked("guard")
    assert [name for name, count in names.items() if count > 1] == []
    assert [name for name in names if not KEBAB.fullmatch(name)] == []


def test_each_guard_has_a_mutant_and_each_mutant_a_guard() -> None:
    assert set(marked("guard")) == {one.guard for one in MUTANTS}


def test_each_mutant_name_is_unique() -> None:
    assert [name for name, count in Counter(one.name for one in MUTANTS).items() if count > 1] == []


@pytest.mark.slow
def test_each_mutant_changes_its_file_into_other_valid_python() -> None:
    text_of = {name: text for text in SOURCES.values() for name, _ in marked_lines(text)}
    for one in MUTANTS:
        mutated = one.apply(text_of[one.guard])
        assert mutated != text_of[one.guard], one.name
        if isinstance(one.change, (Swap, Instead)):  # the other kinds of change cannot make it invalid
            ast.parse(mutated)


def test_the_gaps_in_the_source_are_those_of_the_format_page() -> None:
    table = (ROOT / "docs" / "format.md").read_text().partition("| gap |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert sorted(marked("gap").elements()) == sorted(rows)


def test_each_guard_that_a_page_names_is_in_the_source() -> None:
    named = {name for page in (ROOT / "docs").rglob("*.md") for name, _ in marked_lines(page.read_text())}
    assert named - set(marked("guard")) == set()


@pytest.mark.parametrize(
    ("guard", "change", "before", "after"),
    [
        ("syncs", Remove(), "file.sync()", "pass"),
        ("loops", Never(), "while data and not file.closed:", "while False:"),
        ("loops", Swap("while", "if"), "while data", "if data"),
        ("reports", Always(), "elif file.failed:", "elif True:"),
        (
            "advances",
            Instead("if data:\n    return"),
            "data = data[file.write(data) :]",
            "if data:\n            return",
        ),
        ("spans", Instead("return 0"), "return sum([  # guard: spans\n        1,\n    ])", "return 0"),
    ],
)
def test_a_change_concerns_the_marked_statement_only(guard: str, change: Change, before: str, after: str) -> None:
    assert change.apply(Statement.of(SAMPLE, guard)) == SAMPLE.replace(before, after)


def test_a_statement_is_moved_behind_the_next_one() -> None:
    moved = AfterNext().apply(Statement.of(SAMPLE, "closes-last"))
    assert moved == SAMPLE.replace("file.close()", "file").replace("file.sync()", "file.close()").replace(
        "    file\n", "    file.sync()\n"
    )


@pytest.mark.parametrize(
    ("guard", "change"),
    [("no-such-guard", Remove()), ("syncs", Never()), ("loops", Swap("data = ", "")), ("advances", Swap("data", "x"))],
)
def test_a_change_that_does_not_fit_is_refused(guard: str, change: Change) -> None:
    with pytest.raises(Unfit):
        change.apply(Statement.of(SAMPLE, guard))
