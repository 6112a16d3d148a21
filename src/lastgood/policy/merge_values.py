"""Merging: the values that many ranks saved -> the values that one process loads. Pure.

A process loads the values of the rank of its own number. If fewer ranks saved, it loads those of rank 0, and its random
number generators are seeded anew (`objects.seed_rng`). An entry that the process has a place for and that rank did not
have, such as the stage of a pipeline, comes from the first rank that had it. The state of optimizers and of modules is
merged from all ranks, because each of them may know only some of the parameters.

The records of an audit (data/audit.py) exist once: on another number of ranks, rank r of n loads those of the old ranks
r, r + n, r + 2n, ..., and none if there is no such rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any

from ..records import Manifest

RECORDS = "lastgood.audit"
"""The key of a dict, anywhere in a state, whose value is a list of records that exist once."""


def merged(
    manifests: Sequence[Manifest], rank: int, ranks: int, has_place: Callable[[str], bool] = lambda _: False
) -> dict[str, Any]:
    """The values of one generation for process `rank` of `ranks`.

    `has_place(entry)`: whether this process has a place for a top-level entry; by default it has none.
    """
    values = dict(manifests[rank if rank < len(manifests) else 0].values)
    if len(manifests) > 1:
        for one in manifests:
            values |= {name: one.values[name] for name in one.values.keys() - values.keys() if has_place(name)}
        for name, tree in values.items():
            values[name] = _completed(tree, [one.values[name] for one in manifests if name in one.values])
    if len(manifests) != ranks:  # guard: audit-records-of-other-worlds
        for name, tree in values.items():
            # guard: audit-record-on-one-rank
            taken = [one.values[name] for one in manifests[rank::ranks] if name in one.values]
            values[name] = _with_records(tree, taken)
    return values


def unplaced(unexpected: Sequence[Sequence[str]]) -> list[str]:
    """The names that no rank has a place for, of the names that each rank has no place for.

    A name stands for everything below it too.
    """
    listed = [set(names) for names in unexpected]
    names = dict.fromkeys(chain.from_iterable(unexpected))
    # guard: unplaced-names-refused
    return [name for name in names if all(_covers(one, name) for one in listed)]


def _covers(names: Collection[str], name: str) -> bool:
    ends = (at for at, letter in enumerate(name) if letter == ".")
    return name in names or any(name[:at] in names for at in ends)


def _completed(tree: Any, others: Sequence[Any]) -> Any:
    """Complete modules and optimizers with what only other ranks knew; `others` has the trees of all ranks.

    What this rank had stays, except in the parameter lists of optimizer groups, where the last rank's entry counts.
    "!module" and "!optimizer" are the tags of these objects in the stored values.
    """
    if all(other == tree for other in others):
        return tree
    if isinstance(tree, list) and any(isinstance(one, (dict, list)) for one in tree):
        alike = [other for other in others if isinstance(other, list) and len(other) == len(tree)]
        return [
            _completed(one, [other[at] for other in alike]) for at, one in enumerate(tree)
        ]  # guard: lists-completed
    if not isinstance(tree, dict) or tree.keys() == {RECORDS}:
        return tree
    if tree.keys() == {"!module"}:
        found = {name: one for other in others if _is(other, "!module") for name, one in other["!module"].items()}
        return {"!module": found | tree["!module"]}
    if tree.keys() == {"!optimizer"}:
        return {
            "!optimizer": _optimizer(
                tree["!optimizer"], [one["!optimizer"] for one in others if _is(one, "!optimizer")]
            )
        }
    if len(tree) == 1 and tree.keys() != {"!tuple"}:
        ((tag, body),) = tree.items()
        if tag.startswith("!") and isinstance(body, list):  # of a dict or a set: the same place is another entry there
            return tree
    return {
        key: _completed(value, [other[key] for other in others if isinstance(other, dict) and key in other])
        for key, value in tree.items()
    }


def _with_records(tree: Any, taken: Sequence[Any]) -> Any:
    """`tree`, in which each list of records is replaced by those at the same place in the trees of `taken`."""
    alike = [other for other in taken if type(other) is type(tree)]
    if isinstance(tree, list) and any(isinstance(one, (dict, list)) for one in tree):
        return [_with_records(one, [other[at] for other in alike if at < len(other)]) for at, one in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == {RECORDS}:
        return {RECORDS: [record for other in alike if _is(other, RECORDS) for record in other[RECORDS]]}
    return {key: _with_records(one, [other[key] for other in alike if key in other]) for key, one in tree.items()}


def _is(tree: Any, tag: str) -> bool:
    return isinstance(tree, dict) and tree.keys() == {tag}


def _optimizer(one: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    alike = [other for other in others if len(other["groups"]) == len(one["groups"])]
    groups = []
    for index, group in enumerate(one["groups"]):
        params = {entry[0]: entry for other in alike for entry in other["groups"][index]["params"]}
        groups.append({**group, "params": [*params.values()]})
    state = {name: entry for other in alike for name, entry in other["state"].items()}
    return {**one, "groups": groups, "state": state | one["state"]}
