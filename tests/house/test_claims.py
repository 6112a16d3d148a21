"""The statements of the documents about campaigns, promises and events agree with the reports and the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lastgood_lab import provenance
from lastgood_lab.campaigns import reports

ROOT = Path(__file__).resolve().parents[2]

REPORTS = sorted(path for path in (ROOT / "lab" / "reports").glob("*.json") if "verdicts" not in path.name)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "decisions").glob("*.md"))]
LINK = re.compile(r"lab/reports/([\w-]+)\.md")
COMMIT = re.compile(r"\bcommit:? [0-9a-f]{7}\b")
OLDER = "older code"


def campaign_of(stem: str) -> str:
    """The campaign of this report: `syscalls` for `syscalls-slots`."""
    return next(name for name in sorted(reports.PROVED, key=len, reverse=True) if stem.startswith(name))


def is_of_this_code(stem: str) -> bool:
    facts = json.loads((ROOT / "lab" / "reports" / f"{stem}.json").read_text())
    return facts.get("proved_digest") == provenance.digest(reports.PROVED[campaign_of(stem)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_cites_a_campaign_with_its_commit_and_its_age(page: Path) -> None:
    """Reports of older code were cited without a date, as if today's code had been tested. The log is exempt: its
    entries have dates."""
    if page.name == "log.md":
        return
    for line in page.read_text().splitlines():
        for stem in LINK.findall(line):
            commit = json.loads((ROOT / "lab" / "reports" / f"{stem}.json").read_text())["commit"][:7]
            assert commit in line, f"{page.name} cites {stem} without its commit, {commit}"
            assert is_of_this_code(stem) != (OLDER in line), f'{page.name}: is {stem} of "{OLDER}"?'


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_every_campaign_report_names_the_sources_it_covers(path: Path) -> None:
    assert COMMIT.search(path.with_suffix(".md").read_text())
    assert re.match(r"[0-9a-f]{7}", json.loads(path.read_text())["commit"])


def test_every_figure_names_the_sources_it_covers() -> None:
    figures = [*(ROOT / "benchmarks" / "results").glob("*.md"), *(ROOT / "benchmarks" / "lab").glob("*/report.md")]
    assert figures
    assert [path.name for path in figures if not COMMIT.search(path.read_text())] == []


def test_a_changed_source_changes_the_digest_that_reports_carry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "run"
    room.mkdir()
    (room / "writer.py").write_text("one = 1\n")
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    before = provenance.digest(["run"])
    (room / "writer.py").write_text("one = 2\n")
    assert provenance.digest(["run"]) != before
    (room / "writer.py").write_text('"""Text."""\n\none = 1  # a comment\n"""what it is"""\n')
    assert provenance.digest(["run"]) == before, "a report's digest does not cover docstrings and comments"


def test_how_we_know_numbers_the_promises_as_the_readme_does() -> None:
    """Promise 5 was "exact resume" on one page and "one consistent cut" on the other."""
    readme = re.findall(r"^(\d)\. \*\*([\w ]+?)\.?\*\*", (ROOT / "README.md").read_text(), re.M)
    known = re.findall(r"^\| (\d)\. ([\w ]+?) \|", (ROOT / "docs" / "how-we-know.md").read_text(), re.M)
    assert len(readme) == 9
    assert known == readme
