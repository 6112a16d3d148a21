"""`lastgood diff`: which tensors and values of two generations differ, and by how much. Needs no torch.

Every byte that is read is verified; nothing is changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..format import layout
from ..limits import CHUNK_BYTES
from ..policy.reshard import Tensor
from ..policy.survival import listed
from ..run import access, read_places
from ..run.content import Content
from ..run.watched import Watched
from .answer import DIFFERS, Answer
from .arguments import Json, Run, step_of
from .selection import pick
from .terminal import clean, progress
from .texts import natural, new_table, plural, shape_text
from .value_tree import is_place, leaves_of, value_text

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_Side = tuple[Content, Tensor]
"""a generation, and a tensor of it"""


def diff(
    run: Run,
    step1: Annotated[str, typer.Argument(metavar="STEP1", parser=step_of, show_default=False)],
    step2: Annotated[str, typer.Argument(metavar="STEP2", parser=step_of, show_default=False)],
    as_json: Json = False,
) -> Answer:
    """Which tensors and values differ between two generations, and how much. Exit code 7 when any does."""
    places = read_places.found(access.for_reading(run))
    one, two = pick(places.survey, step1), pick(places.survey, step2)
    with progress("comparing", one.bytes + two.bytes) as count_bytes:
        contents = [Content(Watched(places.tier_of(at.id), count_bytes), at) for at in (one, two)]
        data = {"place": places.place, **compared(*contents)}
    return Answer(data, compared_view(data), 0 if data["same"] else DIFFERS)


def compared(one: Content, two: Content) -> dict[str, Any]:
    """Compare every tensor and every value of two generations. Tensors with equal content digests are not read.

    Of all ranks where both generations have equally many; else of rank 0 alone, where ranks hold content of their own.
    A difference that not all ranks have names those that have it, as `ranks`.
    """
    ranks = range(len(one.manifests) if len(one.manifests) == len(two.manifests) else 1)
    ours, theirs = one.names(), two.names()
    rows = []
    for name in sorted(ours.keys() | theirs.keys(), key=natural):
        if name in one.aliases and one.aliases.get(name) == two.aliases.get(name):
            continue  # an alias in both: compared under the name that it is stored under
        a, b = ours.get(name), theirs.get(name)
        row: dict[str, Any] = {"name": name}
        if a is None or b is None:
            row["status"] = "only in the second" if a is None else "only in the first"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            row |= {"status": "other type or shape", "first": [a.dtype, a.shape], "second": [b.dtype, b.shape]}
        elif one.algorithm == two.algorithm and one.digest(name) == two.digest(name):
            row["status"] = "same"
        else:
            x, y = one.tensor(name)[1], two.tensor(name)[1]
            found = differences(x, y, a.dtype)
            row |= {"status": "differs" if found["differing"] else "same", "dtype": a.dtype, "shape": a.shape, **found}
        rows.append(row)
        if a is not None and b is not None and "first" not in row:
            rows += _own_rows(name, (one, a), (two, b), ranks)
    changed = _changed(one, two, ranks)
    same = not changed and all(row["status"] == "same" for row in rows)
    return {"same": same, "tensors": rows, "values": changed}


def _own_rows(name: str, one: _Side, two: _Side, ranks: range) -> list[dict[str, Any]]:
    """A row for each rank that holds content of its own under this name, and differs there. Both have one type and
    shape."""
    rows = []
    for rank, box in sorted(one[1].own.keys() | two[1].own.keys()):
        if rank not in ranks:
            continue
        row: dict[str, Any] = {"name": name, "ranks": [rank]}
        pieces = [
            tensor.own.get((rank, box)) or next((piece for piece in tensor.stored if piece.box == box), None)
            for _, tensor in (one, two)
        ]
        if pieces[0] is None or pieces[1] is None:  # the others are divided in another way
            rows.append(row | {"status": "only in the second" if pieces[0] is None else "only in the first"})
            continue
        if one[0].algorithm == two[0].algorithm and pieces[0].piece.digest == pieces[1].piece.digest:
            continue
        found = differences(one[0].piece(pieces[0]), two[0].piece(pieces[1]), one[1].dtype)
        if found["differing"]:
            rows.append(row | {"status": "differs", "dtype": one[1].dtype, "shape": box.shape, **found})
    return rows


def _changed(one: Content, two: Content, ranks: range) -> list[dict[str, Any]]:
    """The values that differ, each change once, with the ranks that have it unless all have."""
    found = dict[bytes, tuple[dict[str, Any], list[int]]]()
    for rank in ranks:
        if _encoded(one.values(rank)) == _encoded(two.values(rank)):
            continue
        before, after = _leaves(one, rank), _leaves(two, rank)
        for path in dict.fromkeys([*before, *after]):
            if path in before and path in after and _encoded(before[path]) == _encoded(after[path]):
                continue
            first = {"first": before[path]} if path in before else {}
            change = {"path": path} | first | ({"second": after[path]} if path in after else {})
            found.setdefault(msgspec.json.encode(change), (change, []))[1].append(rank)
    return [change | ({"ranks": having} if len(having) < len(ranks) else {}) for change, having in found.values()]


def compared_view(data: Mapping[str, Any]) -> RenderableType:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in data["tensors"]:
        groups.setdefault(row["status"], []).append(row)
    parts: list[RenderableType] = []
    table = new_table(
        "tensor", "type", "differing", "of", "max abs", "rel L2", right=("differing", "of", "max abs", "rel L2")
    )
    for row in groups.get("differs", []):
        far = [
            f"{row[key]:.3g}" if isinstance(row[key], float) else row[key]
            for key in ("max_abs", "relative_l2")
            if key in row
        ]
        table.add_row(
            clean(row["name"]) + on_ranks(row), row["dtype"], f"{row['differing']:,}", f"{row['elements']:,}", *far
        )
    if table.row_count:
        parts += [table, Text()]
    for status in ("other type or shape", "only in the first", "only in the second"):
        for row in groups.get(status, []):
            sides = [f"{row[side][0]} {shape_text(row[side][1])}" for side in ("first", "second") if side in row]
            parts.append(
                Text(f"{clean(row['name'])}{on_ranks(row)}: {status}" + (f" ({' -> '.join(sides)})" if sides else ""))
            )
    for row in data["values"]:
        sides = [value_text(row[side]) if side in row else "absent" for side in ("first", "second")]
        parts.append(Text(f"{clean(row['path'])}{on_ranks(row)}: {' -> '.join(sides)}"))
    statuses = {row["name"]: row["status"] for row in data["tensors"]}  # a row of a rank follows that of its tensor
    counts = ", ".join(
        f"{count:,} {status.replace('differs', 'differ')}"
        for status, count in sorted(Counter(statuses.values()).items(), key=lambda one: one[0] != "same")
    )
    end = f"{plural(len(statuses), 'tensor')}" + (f": {counts}" if counts else "")
    end += f"; {plural(len(data['values']), 'value')} changed" if data["values"] else "; values are the same"
    return Group(*parts, Text(end, style="bold"))


def on_ranks(row: Mapping[str, Any]) -> str:
    """Which ranks have a difference, as the end of its name; empty: all have it."""
    return f" on {listed(row['ranks'])}" if "ranks" in row else ""


def _leaves(content: Content, rank: int) -> dict[str, Any]:
    leaves = leaves_of(content.values(rank))
    return {path: leaf for path, leaf in leaves if path and (leaf == {} or not is_place(leaf))}


def _encoded(value: Any) -> bytes:
    """A stored value as its JSON, in which 1, 1.0 and True differ, and 0.0 and -0.0 too; `==` takes them as equal."""
    return msgspec.json.encode(value, order="sorted")


def differences(first: bytearray, second: bytearray, dtype: str) -> dict[str, Any]:
    """Count the elements of two tensors of the same type and length whose stored bits differ.

    If numpy has numbers of this type: also `max_abs`, max |a - b|, and `relative_l2`, |a - b| / |a|. One that is not
    finite is given as text, "inf" or "nan".
    """
    import numpy as np

    unit = layout.DTYPES[dtype][0] // 8
    numeric = _decoded(np.zeros(unit, np.uint8), dtype) is not None
    differing, most, squares, norm = 0, 0.0, 0.0, 0.0
    block = CHUNK_BYTES // unit * unit
    with np.errstate(all="ignore"):
        for start in range(0, len(first), block):
            a = np.frombuffer(first, np.uint8)[start : start + block]
            b = np.frombuffer(second, np.uint8)[start : start + block]
            changed = (a != b).reshape(-1, unit).any(axis=1)
            differing += int(changed.sum())
            if not numeric:
                continue
            x, y = _decoded(a, dtype), _decoded(b, dtype)
            assert x is not None and y is not None
            norm += float(np.square(np.abs(x.astype(_wide(x)))).sum())
            gap = _gap(x[changed], y[changed])
            most = max(most, float(gap.max(initial=0.0)), key=lambda v: math.inf if math.isnan(v) else v)
            squares += float(np.square(gap).sum())
    if not numeric:
        return {"elements": len(first) // unit, "differing": differing}
    relative = math.sqrt(squares) / math.sqrt(norm) if norm else math.inf if squares else 0.0
    return {
        "elements": len(first) // unit,
        "differing": differing,
        "max_abs": most if math.isfinite(most) else str(most),
        "relative_l2": relative if math.isfinite(relative) else str(relative),
    }


def _decoded(raw: Array, dtype: str) -> Array | None:
    """Stored bytes (uint8) as numbers; None for a type that numpy does not have."""
    import numpy as np

    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (raw.astype(np.uint16) << 8).view(np.float16)
    if dtype == "float8_e4m3fn":  # sign, 4 bits of exponent (bias 7), 3 of mantissa; no inf; all ones is nan
        code = np.arange(256)
        exponent, mantissa = code >> 3 & 15, code & 7
        table = np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10))
        return np.where(code & 127 == 127, np.nan, np.where(code > 127, -table, table))[raw]
    try:
        return raw.view(np.dtype(dtype))
    except TypeError:
        return None


def _wide(x: Array) -> str:
    return "complex128" if x.dtype.kind == "c" else "float64"


def _gap(x: Array, y: Array) -> Array:
    """|x - y| in float64; integers are subtracted before they are converted."""
    import numpy as np

    if x.dtype.kind in "iu":
        return (np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)).astype(np.float64)
    return np.asarray(np.abs(x.astype(_wide(x)) - y.astype(_wide(y))))
