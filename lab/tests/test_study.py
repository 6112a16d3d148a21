"""The recovery study: a seeded slice under the real `lastgood run`, and its gates and tables."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import msgspec
import pytest

from lastgood.errors import Refused
from lastgood_lab.study import findings, matrix, runs, tables
from lastgood_lab.study.findings import Found, Seen
from lastgood_lab.study.matrix import Compared, Options
from lastgood_lab.study.unit import Size, Unit, sized, units

TINY = Size(scale=50, ranks=2, global_batch=8, width=4, side=8)
replace = msgspec.structs.replace


@pytest.mark.slow
def test_a_unit_with_failures_ends_as_its_reference_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 steps, a save in each, rank 0 exits after steps 8 and 24. What is changed in the logs fails its gate."""
    reference, _, unit = units("digits-resnet18-base", 0, TINY)
    seen, judged = list[Seen](), findings.found
    monkeypatch.setattr(findings, "found", lambda unit, one: (seen.append(one), judged(unit, one))[1])
    calm, found = runs.lived(reference, tmp_path), runs.lived(unit, tmp_path)
    monkeypatch.undo()
    assert (calm.reached, calm.checked, calm.agreed, calm.restarts) == ("", "", "", 0)
    assert (found.reached, found.checked, found.agreed, found.restarts) == ("", "", "", 2)
    assert len(found.losses) == 32 and found.losses == calm.losses
    distances = runs.distances(unit, reference, tmp_path)
    assert runs.differing_buffers(unit, reference, tmp_path) == 0
    assert distances[32] == 0.0 and set(distances.values()) == {0.0}
    assert sum(found.parts.values()) == pytest.approx(found.wall) and found.parts["recovery"] > 0
    assert runs.completed(unit, tmp_path) == found

    one = seen[1]
    last = replace(one.steps[1][-1], sample_ids_hash="0" * 16)
    wrong = replace(one, steps=[one.steps[0], [*one.steps[1][:-1], last]])
    assert "other samples" in findings.found(unit, wrong).checked
    assert findings.found(unit, replace(one, audit="duplicates")).checked == "duplicates"
    assert "last steps" in findings.found(unit, replace(one, steps=[one.steps[0], one.steps[1][:-1]])).reached
    newer = [replace(line, step=9) if (line.kind, line.step) == ("durable", 8) else line for line in one.saves]
    assert "although step 9 was durable" in findings.found(unit, replace(one, saves=newer)).agreed
    assert "failures" in findings.found(replace(unit, schedule="late"), one).agreed


def found(unit: Unit, wall: float, write: float) -> Found:
    parts = dict.fromkeys(tables.PARTS, 0.0) | {"write": write}
    return Found(unit=unit, wall=wall, goodput=100 / wall, stall=write, parts=parts, losses=[1.0])


def rows(folder: Path) -> list[Compared]:
    made = []
    for seed, wall in enumerate((11.0, 12.0)):
        (folder / "digits-resnet18-base").mkdir(exist_ok=True)
        for unit in units("digits-resnet18-base", seed, TINY):
            values = {"ref": (10.0, 2.0), "blk": (1.1 * wall, 2.0), "ovl": (wall, 0.5)}[unit.variant]
            one = Compared(found=found(unit, *values), status="completed", loss_difference=0.0, distances={})
            made.append(one)
    return made


def test_tables_show_gains_with_intervals_beside_published_ones(tmp_path: Path) -> None:
    made = rows(tmp_path)
    gates = tables.write(made, Options(out=tmp_path, seeds=2, size=TINY), "lastgood lab recovery")
    assert not any(gates.values())
    text = (tmp_path / "analysis.md").read_text()
    assert "+10.00 ± 0.00" in text and "1.9931" in text and "75.0 ± 0.0" in text and "56.5" in text
    for table in ("Table 2", "Table 5", "Table 6", "Table 7", "Table 8", "Figure 1"):
        assert table in text
    with (tmp_path / "manifest.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["completed"] * 6
    with (tmp_path / "summary.csv").open() as file:
        assert [row["gain_percent"] for row in csv.DictReader(file)] == ["10.0"]
    record = json.loads((tmp_path / "digits-resnet18-base/publishable.json").read_text())
    assert len(record["units"]) == 6 and record["summary"]["seeds"] == 2
    assert (tmp_path / "figure-4-stall.png").exists()


def test_a_failed_unit_fails_its_gate_and_leaves_its_suite_out(tmp_path: Path) -> None:
    made = rows(tmp_path)
    made[2] = replace(made[2], status="failed", found=replace(made[2].found, reached="exit code 9"))
    gates = tables.write(made, Options(out=tmp_path, seeds=2, size=TINY), "lastgood lab recovery")
    assert gates["target"] == ["digits-resnet18-base ovl-seed0: exit code 9"] and len(tables.triples(made)) == 1


def test_completed_units_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(out=tmp_path, seeds=1, only=["digits-resnet18-base"], size=TINY)
    (tmp_path / "digits-resnet18-base").mkdir()
    path = tmp_path / "digits-resnet18-base/compared-seed0.json"
    path.write_bytes(msgspec.json.encode(rows(tmp_path)[:3]))
    again = list[Unit]()
    monkeypatch.setattr(runs, "lived", lambda unit, *_: again.append(unit) or Found(unit=unit, reached="not run"))
    assert [one.status for one in matrix.run(options, print)] == ["skipped_exists"] * 3
    assert not again
    other = Options(out=tmp_path, seeds=1, only=options.only, size=replace(TINY, width=5))
    assert [one.status for one in matrix.run(other, print)] == ["failed"] * 3 and len(again) == 3, "another study"


def test_sizes_are_read_by_name_and_typos_are_refused() -> None:
    assert sized("scale=5,flushed=0", cifar=True) == Size(scale=5, side=32, flushed=False)
    assert sized("", cifar=False) == Size()
    for text, match in (("widht=4", "Did you mean width"), ("scale=x", "scale=x"), ("ranks=0", "ranks=0")):
        with pytest.raises(Refused, match=match):
            sized(text, cifar=False)


def test_what_cannot_be_meant_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for options in (
        Options(out=tmp_path, only=["digits-resnet18"]),
        Options(out=tmp_path, size=Size(scale=3)),
        Options(out=tmp_path, size=Size(scale=10, every=25)),
        Options(out=tmp_path, size=Size(ranks=3)),
        Options(out=tmp_path, cifar=tmp_path),
    ):
        with pytest.raises(Refused, match=r"suite|scale|every|ranks|cifar10"):
            matrix.run(options, print)
    assert not [*tmp_path.iterdir()]
