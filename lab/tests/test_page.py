"""`lastgood report`: one page with the reports of benchmarks and experiments."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    lab, bench = tmp_path / "lab", tmp_path / "bench"
    lab.mkdir()
    bench.mkdir()
    (lab / "report.md").write_text("# Killed & <b>left</b>\n\n| mode | usable |\n|---|---|\n| unsafe | 3 of 4 |\n")
    (lab / "usable.svg").write_text("<svg>lab</svg>")
    (bench / "size-2026-2core.md").write_text("# Size\n\nText.\n")
    (bench / "size-2026-2core-seconds.svg").write_text("<svg>bench</svg>")
    (bench / "other.svg").write_text("<svg>of another bench</svg>")
    return [lab, bench]


def test_a_report_is_one_self_contained_page_with_every_table_and_plot(folders, tmp_path, call_json):
    out = tmp_path / "page.html"
    code, report = call_json("report", *folders, "--out", out)
    text = out.read_text()
    assert code == 0 and report["bytes"] == len(text.encode())
    assert "<td>3 of 4</td>" in text and "Killed &amp; &lt;b&gt;left&lt;/b&gt;" in text, "markup in a report is escaped"
    drawn = [base64.b64decode(one).decode() for one in re.findall(r"base64,([^\"]+)", text)]
    assert drawn == ["<svg>lab</svg>", "<svg>bench</svg>"]
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", text) and "<script" not in text


def test_a_folder_without_a_report_is_refused_and_keeps_the_old_page(folders, tmp_path, call):
    out = tmp_path / "page.html"
    out.write_text("old")
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = call("report", folders[0], empty, "--out", out)
    assert code == 3 and "holds no report" in err and out.read_text() == "old"
    assert call("report", folders[0], "--out", tmp_path / "nowhere" / "page.html")[0] == 3
