"""What differs between two replays of one step, grouped, in the order in which one difference causes others. No torch.

Other samples or other random numbers change the parameters in the same step, and the optimizer with them. So the first
group that differs is nearest to the cause, and the alphabet does not decide.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..run.content import Content
from .compare import on_ranks
from .value_tree import parts_of

_ARITHMETIC = (
    "either of two, because no sampler and no generator that is known in the state differs. Samples or random numbers "
    "of what is not in the state, and so is not seen here: a loader, or a generator of dropout or augmentation, that "
    "is neither seeded nor in the state. Or arithmetic: operations that add in another order each time. "
    "torch.use_deterministic_algorithms(True) names them; on CUDA set CUBLAS_WORKSPACE_CONFIG=:4096:8 and "
    "torch.backends.cudnn.benchmark = False. Threads may add up in any order (OMP_NUM_THREADS)"
)
HINTS = {
    "order of samples": "a shuffle without a seed, or a loader that does not restore its order. Other samples change "
    "everything that comes after them in a step",
    "random numbers": "a generator that is neither seeded nor restored, or drawn from by another thread. Dropout and "
    "augmentation that draw from it change everything that comes after them in a step",
    "values": "a value that the script computes, perhaps from the time or the machine. A loss scale, a schedule or a "
    "best metric that follows the loss differs only because something else does",
    "buffers": _ARITHMETIC,
    "parameters": _ARITHMETIC,
    "optimizer": _ARITHMETIC,
    "other tensors": _ARITHMETIC,
}
"""Group of names of the state -> what usually causes a difference there. A group can change those after it."""
METRICS_ONLY = (
    "a metric that depends on more than the state: the time, or data that are read for it alone. The state of this "
    "step is the same"
)
"""the same where only metrics differ"""
_ORDER = re.compile(
    r"sampler|loader|shuffl|permutation|dataset|cursor|(^|[._])(data|order|indices|audit)([._]|$)", re.IGNORECASE
)
"""names, outside of modules and optimizers, that belong to the order of the samples"""
_OWNERS = {"!module": "parameters", "!optimizer": "optimizer", "!torch.Generator": "random numbers"}
"""tag of a stored value -> the group of the tensors in it"""


def usual_cause(groups: Collection[str]) -> str:
    """What usually causes that these groups differ, in the order of HINTS; none: only metrics do."""
    first, then = [*groups, "", ""][:2]
    if first == "values" and then:
        return f"{HINTS[first]}: {HINTS[then]}"
    return HINTS.get(first, METRICS_ONLY)


def by_group(compared: Mapping[str, Any], one: Content, two: Content) -> dict[str, list[str]]:
    """Group -> the names that differ, in the order of HINTS, with the ranks where not all differ; groups without a
    difference are left out.

    `compared`: as `compare.compared` returns it for the two generations.
    """
    owners = dict[str, str]()
    for content in (two, one):
        for rank in range(len(content.manifests)):  # stages of a pipeline hold different names
            owners |= _owners(content.values(rank))
    may_be_infinite = one.not_demanded() | two.not_demanded()
    found: dict[str, list[str]] = {group: [] for group in HINTS}
    for row in compared["tensors"]:
        if row["status"] != "same":
            group = _group(row["name"], owners)
            is_buffer = group == "parameters" and row["name"] in may_be_infinite
            found["buffers" if is_buffer else group or "other tensors"].append(row["name"] + on_ranks(row))
    for row in compared["values"]:
        group = _group(row["path"], owners)
        found[group if group in ("order of samples", "random numbers") else "values"].append(
            row["path"] + on_ranks(row)
        )
    return {group: names for group, names in found.items() if names}


def _group(name: str, owners: Mapping[str, str]) -> str:
    """The group of a tensor; empty: it belongs to nothing that is known."""
    if name.partition(".")[0] == "rng":
        return "random numbers"
    of = next((group for path, group in owners.items() if not path or f"{name}.".startswith(f"{path}.")), "")
    if of in ("", "random numbers") and _ORDER.search(name):
        return "order of samples"
    return of


def _owners(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and group of each module, optimizer and generator in a stored value."""
    tag = next(iter(value), "") if isinstance(value, dict) else ""
    if tag in _OWNERS:
        yield path, _OWNERS[tag]
        return
    for name, part in parts_of(value):
        yield from _owners(part, f"{path}.{name}" if path else name)
