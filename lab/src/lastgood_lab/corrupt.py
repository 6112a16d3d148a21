"""`lastgood lab corrupt`: changes committed bytes, and records which layer detects it and what a restore loads.

The state is the group of files of the study that `crash.py` describes: a small model, its optimizer and the random
number generators, 192 KB. Each trial copies a run with two verified generations and damages the newest in one way. It
records whether a byte changed, which layers of the guard detect that (each by itself), which generation a restore
loads, whether the loaded state equals the saved one bit for bit, and whether every file has its old content again.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lastgood.errors import NothingGood
from lastgood.format import commit, layout, parity_layout
from lastgood.io.reed_solomon import Code
from lastgood.limits import PAGE_BYTES
from lastgood.loop.checkpointer import Checkpointer
from lastgood.policy.restore import lineage
from lastgood.policy.retention import Keep
from lastgood.records import LAYERS
from lastgood.run import access
from lastgood.run.reader import RunReader

from . import trials
from .journal import Journal
from .report import Progress, Report, Table
from .trials import Options, Row, Share, error_bars, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA, MANIFEST = layout.blob_name(0), layout.manifest_name(0)
OLDER, NEWER = 10, 20
PARITIES = ("none", "10+2")
SECTOR_BYTES = 512
CLEAN = 3
"""The factor for the number of trials without damage: false positives are rarer than any other outcome."""


# ---- damage --------------------------------------------------------------------------------------------------


def _bitflip(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _zerorange(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    length = min(chance.randint(1, 16_384), len(data) - start)
    data[start : start + length] = bytes(length)


def _truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def _garbage(data: bytearray, chance: random.Random) -> None:
    """Overwrite one page with random bytes, like a page that was written to the wrong place."""
    start = chance.randrange(max(1, len(data) // PAGE_BYTES)) * PAGE_BYTES
    data[start : start + PAGE_BYTES] = chance.randbytes(len(data[start : start + PAGE_BYTES]))


def _swap(data: bytearray, chance: random.Random) -> None:
    one, two = (at * SECTOR_BYTES for at in chance.sample(range(len(data) // SECTOR_BYTES), 2))
    held = data[one : one + SECTOR_BYTES]
    data[one : one + SECTOR_BYTES] = data[two : two + SECTOR_BYTES]
    data[two : two + SECTOR_BYTES] = held


def _append(data: bytearray, chance: random.Random) -> None:
    data += chance.randbytes(chance.randint(1, 8192))


def _in(name: str, how: Callable[[bytearray, random.Random], None]) -> Callable[[Path, random.Random], None]:
    def damage(folder: Path, chance: random.Random) -> None:
        data = bytearray((folder / name).read_bytes())
        how(data, chance)
        (folder / name).write_bytes(data)

    return damage


def _lose(name: str) -> Callable[[Path, random.Random], None]:
    return lambda folder, _: (folder / name).unlink()


def _stale(folder: Path, _: random.Random) -> None:
    (older,) = folder.parent.glob(f"{OLDER:012d}-*")
    shutil.copyfile(older / DATA, folder / DATA)


KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "none": lambda *_: None,
    "bitflip": _in(DATA, _bitflip),
    "zerorange": _in(DATA, _zerorange),
    "truncate": _in(DATA, _truncate),
    "garbage page": _in(DATA, _garbage),
    "swapped blocks": _in(DATA, _swap),
    "appended tail": _in(DATA, _append),
    "stale version": _stale,
    "lost file": _lose(DATA),
    "bitflip in manifest": _in(MANIFEST, _bitflip),
    "truncated manifest": _in(MANIFEST, _truncate),
    "lost manifest": _lose(MANIFEST),
    "bitflip in commit": _in(layout.COMMIT, _bitflip),
    "lost commit": _lose(layout.COMMIT),
    "bitflip in pointer": _in(f"../../{layout.POINTER}", _bitflip),
}


# ---- one trial -----------------------------------------------------------------------------------------------


def group(seed: int) -> dict[str, Any]:
    """The state that is saved: model and optimizer. A Checkpointer adds the random number generators by itself."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 60))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def _options(parity: str) -> dict[str, Any]:
    return {"retention": Keep(last=9), "parity": None if parity == "none" else parity}


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    held = [one for entry in state["optimizer"].state.values() for one in entry.values()]
    return [*state["model"].parameters(), *held]


def advance(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 64)).sum().backward()
    state["optimizer"].step()


class _Base:
    """A run for each kind of parity, and the tensors of its generations."""

    def __init__(self, root: Path) -> None:
        self.root, self.saved = root, dict[int, list[torch.Tensor]]()
        for parity in PARITIES:
            state = group(0)
            with Checkpointer(root / parity, state, **_options(parity)) as ckpt:
                for step in (OLDER, NEWER):
                    advance(state)
                    self.saved[step] = [one.detach().clone() for one in [*tensors_of(state), torch.get_rng_state()]]
                    ckpt.save(step)
                    ckpt.wait()
            torch.manual_seed(1)  # a later restore has to bring back other generator states than these


_base: list[_Base] = []
"""The runs that the trials of this process copy; `begin` adds them before the first trial."""


def begin(root: Path) -> None:
    """Make the runs that the trials of this process copy."""
    torch.set_num_threads(1)
    _base.append(_Base(Path(tempfile.mkdtemp(dir=root))))


def one(key: Row) -> Row:
    """Run one trial and return its outcome."""
    base, chance = _base[-1], random.Random(str(sorted(key.items())))
    with tempfile.TemporaryDirectory(dir=base.root) as working:
        root = Path(shutil.copytree(base.root / key["parity"], Path(working) / "run", symlinks=True))
        (folder,) = root.glob(f"gen/{NEWER:012d}-*")
        before = _contents(folder)
        KINDS[key["kind"]](folder, chance)
        changed = _contents(folder) != before
        layers = _fired(root)
        state = group(1)
        try:
            with Checkpointer(root, state, **_options(key["parity"])) as ckpt:
                step = ckpt.restore().step
        except NothingGood:
            step = -1
        found = [*tensors_of(state), torch.get_rng_state()]
        right = step > 0 and all(map(torch.equal, found, base.saved[step]))
        after = _contents(folder)
        return {
            "changed": changed,
            "detected": bool(layers),
            **{layer: layer in layers for layer in LAYERS},
            "pointer": "pointer" in layers,
            "restored": step,
            "wrong": step > 0 and not right,
            "whole": all(after.get(name) == data for name, data in before.items() if "VERIFIED" not in name),
        }


def _contents(folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return found | {layout.POINTER: (folder.parent.parent / layout.POINTER).read_bytes()}


def _fired(root: Path) -> set[str]:
    """The layers that detect damage of the newest generation; "pointer" if the pointer is damaged."""
    reader = RunReader(access.for_reading(root))
    survey = commit.survey(reader.tier)
    if lineage(survey).lost:
        return {"structure"}
    found = {one.layer for one in reader.verify(NEWER).findings}
    return found | ({"pointer"} if survey.pointer is None else set())


# ---- all trials ----------------------------------------------------------------------------------------------


def run(options: Options, progress: Progress) -> list[Row]:
    Code(*parity_layout.parsed(PARITIES[1]))  # raises before any trial if no parity library is installed
    keys = [
        {"kind": kind, "parity": parity, "trial": trial, "seed": options.seed}
        for parity in PARITIES
        for kind in KINDS
        for trial in range(options.trials * (CLEAN if kind == "none" else 1))
    ]
    journal = Journal(options.out / "trials.jsonl")
    with tempfile.TemporaryDirectory(prefix="lastgood-corrupt-", dir=trials.memory()) as root:
        return trials.run(keys, one, journal, options.jobs, progress, begin, (Path(root),))


def report(rows: Sequence[Row], options: Options) -> Report:
    tables = []
    for parity in PARITIES:
        lines = []
        for kind in KINDS:
            mine = [row for row in rows if (row["kind"], row["parity"]) == (kind, parity)]
            hit = [row for row in mine if row["changed"]]
            lines.append(
                [
                    kind,
                    f"{len(hit):,} of {len(mine):,}",
                    share(hit, itemgetter("detected")).as_text() if hit else "-",
                    *(_percent(share(hit, itemgetter(layer))) for layer in (*LAYERS, "pointer")),
                    _percent(share(hit, lambda row: row["restored"] == NEWER and row["whole"])),
                    _percent(share(hit, lambda row: row["restored"] == OLDER)),
                    str(sum(row["wrong"] for row in mine)),
                ]
            )
        head = [
            "damage",
            "changed a byte",
            "detected (Wilson 95 %)",
            *LAYERS,
            "pointer",
            "newest restored, whole",
            "rolled back",
        ]
        tables.append(Table(f"Parity: {parity}", [*head, "wrong loads"], lines))
    clean = [row for row in rows if not row["changed"]]
    return Report(
        name="corrupt",
        title="Corruption: which layer detects it, and what a restore loads",
        about="Each trial damages the newest of two verified generations in one way. The columns of layers give the "
        "per cent of the trials with a changed byte that this layer detects by itself.",
        tables=tables,
        rows=rows,
        notes=[
            f"False positives in trials without a changed byte: {share(clean, itemgetter('detected')).as_text()}.",
            f"Wrong loads over all trials: {share(rows, itemgetter('wrong')).as_text()}.",
            "A zeroed range that was zero before changes no byte, so that nothing is there to detect, and it does not "
            "count as missed. (The study counted one such range of 400 as missed.)",
            "Intervals are Wilson's; the study's are Clopper-Pearson.",
        ],
        figures={"detection": lambda: _figure(rows)},
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of summary.json."""
    hit = [row for row in rows if row["changed"]]
    return {
        "trials": len(rows),
        "wrong_loads": share(rows, itemgetter("wrong")).record(),
        "detected": share(hit, itemgetter("detected")).record(),
        "false_positives": share([row for row in rows if not row["changed"]], itemgetter("detected")).record(),
        "by_kind": {
            f"{kind}, parity {parity}": {
                name: share([row for row in hit if (row["kind"], row["parity"]) == (kind, parity)], of).record()
                for name, of in _SHARES.items()
            }
            for parity in PARITIES
            for kind in KINDS
            if kind != "none"
        },
    }


_SHARES: dict[str, Callable[[Any], object]] = {
    "detected": itemgetter("detected"),
    "newest_restored_whole": lambda row: row["restored"] == NEWER and row["whole"],
    "rolled_back": lambda row: row["restored"] == OLDER,
    **{layer: itemgetter(layer) for layer in LAYERS},
}


def _percent(one: Share) -> str:
    return f"{100 * one.value:.1f}" if one.total else "-"


def _figure(rows: Sequence[Row]) -> Figure:
    """Draw detection by layer and kind, as in the study's figure 5, with confidence intervals."""
    from .figures import panels

    kinds = [kind for kind in KINDS if kind != "none"]
    figure, (axes,) = panels(1, columns=1, wide=9.0, high=4.0)
    wide = 0.8 / len(LAYERS)
    for at, layer in enumerate(LAYERS):
        shares = [
            share([row for row in rows if row["kind"] == kind and row["changed"]], itemgetter(layer)) for kind in kinds
        ]
        points = [place + at * wide for place in range(len(kinds))]
        heights = [one.value for one in shares]
        axes.bar(points, heights, wide, yerr=error_bars(shares), label=layer, error_kw={"linewidth": 0.6})
    axes.set_xticks([place + 0.4 - wide / 2 for place in range(len(kinds))], kinds, rotation=35, ha="right")
    axes.set_ylabel("share of trials that fired")
    axes.legend(ncols=len(LAYERS), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure
