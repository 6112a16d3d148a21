"""Snapshots: copies in a state that the training loop cannot reach, so that every save would store the same old values.

`require_live` refuses what an object's `state_dict()` returned, before a Checkpointer opens its run. `Numbers` warns of
a plain number that stays what it was while steps go by. Both look at plain containers only: what an object's own
`state_dict()` returns at a save is always current.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .. import reporting
from ..errors import Refused
from ..format.values import DEPTH_LIMIT, component, join, only_numbers
from .capture import wanted
from .objects import tag_of

UNCHANGED_SAVES = 3
"""saves of ascending steps, after which a number that never changed is reported"""
COUNTERS = {"epoch", "step", "global_step", "iteration", "current_epoch", "current_step"}
"""keys of numbers in nested dicts that count what has been trained"""

_SCHEDULER = {"base_lrs", "last_epoch", "_step_count", "_last_lr", "_schedulers"}
"""keys of torch's schedulers: the state_dict() of each has two of them at least"""
_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def require_live(state: Mapping[str, Any]) -> None:
    """Raises Refused, with all their names, if the state holds the `state_dict()` of an object instead of the object.

    A module's `state_dict()` shares the memory of its parameters, but only until something replaces them
    (`module.to()`, `load_state_dict(assign=True)`, FSDP), so it is refused too. A copy of weights that is kept on
    purpose passes as a plain dict of tensors: `dict(copies)`.
    """
    found = [one for key, value in state.items() for one in _snapshots(value, component(key))]
    if found:
        listed = "\n".join(f"  {path}: the state_dict() of {kind}" for path, kind in found)
        raise Refused(
            f"the state holds copies that training does not update; every save would store the same:\n{listed}",
            safe="\nNothing was touched.",
            todo='Hand in the object itself: state={"optimizer": optimizer}, not optimizer.state_dict(). It is read '
            "anew at every save. Weights that were copied on purpose: dict(copies).",
        )


def _snapshots(obj: Any, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Path and kind of every `state_dict()` in nested containers."""
    if depth > DEPTH_LIMIT:
        return  # the first save refuses it by name
    if isinstance(obj, Mapping) and not tag_of(obj):  # else it is an object, which is read anew
        if kind := _kind(obj):
            yield path, kind
            return
        for key, part in obj.items():
            yield from _snapshots(part, join(path, key), depth + 1)
    elif isinstance(obj, (list, tuple)) and not only_numbers(obj):
        for index, part in enumerate(obj):
            yield from _snapshots(part, f"{path}.{index}", depth + 1)


def _kind(obj: Mapping[Any, Any]) -> str:
    """What kind of object this is the `state_dict()` of; empty for any other mapping."""
    return next((kind for kind, holds in _KINDS.items() if holds(obj)), "")


def _is_of_an_optimizer(obj: Mapping[Any, Any]) -> bool:
    groups = obj.get("param_groups")
    return (
        "state" in obj
        and isinstance(groups, list)
        and len(groups) > 0
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
    )


_KINDS: dict[str, Callable[[Mapping[Any, Any]], bool]] = {
    "an optimizer": _is_of_an_optimizer,
    "a learning rate scheduler": lambda obj: len(_SCHEDULER & obj.keys()) > 1,
    "a gradient scaler": lambda obj: obj.keys() == _SCALER,
    "a ResumableSampler": lambda obj: {"epoch", "cursor_step", "seed"} <= obj.keys(),
    "a StatefulDataLoader": lambda obj: "_iterator_finished" in obj or "_steps_since_snapshot" in obj,
    "a module": lambda obj: isinstance(obj, OrderedDict) and hasattr(obj, "_metadata"),
}


class Numbers:
    """Top-level int and float entries of a state, and counters in nested dicts, watched for UNCHANGED_SAVES saves.

    A number of a nested dict counts as configuration (`lr`, `seed`, `batch_size`) and is not watched, unless its key is
    one of COUNTERS, which no configuration keeps constant. Lists are not entered: they hold records of the past. A
    number that an evaluation or an epoch updates may rightly stay the same for so long; the report is one line, made
    once, and says so.
    """

    def __init__(self, state: Mapping[str, Any], include: Sequence[str], exclude: Sequence[str]) -> None:
        self._names = wanted(include, exclude)
        self._unchanged = self._numbers(state)
        self._steps: list[int] = []

    def saved(self, step: int, state: Mapping[str, Any]) -> None:
        """Note a save of `step`; the last one watched reports what never changed."""
        if len(self._steps) == UNCHANGED_SAVES or not self._unchanged:
            return
        now = self._numbers(state)
        self._unchanged = {key: one for key, one in self._unchanged.items() if key in now and now[key] == one}
        self._steps.append(step)
        if len(self._steps) == UNCHANGED_SAVES and self._unchanged:
            place = "".join(f"[{key!r}]" for key in next(iter(self._unchanged)))
            entries = ", ".join(f"'{'.'.join(keys)}' = {value}" for keys, value in self._unchanged.items())
            reporting.warning(
                f"the state holds a number that was the same in the first {UNCHANGED_SAVES} saves (steps "
                f"{self._steps[0]} to {self._steps[-1]}): {entries}. A number is copied when the state dict is built: "
                f"assign state{place} = ... in the loop when it changes, or keep it in an object that has "
                "state_dict() and load_state_dict(). If it is a constant, or is assigned already, nothing is wrong."
            )

    def _numbers(self, state: Mapping[str, Any]) -> dict[tuple[str, ...], int | float]:
        """The watched numbers, by their keys from the outermost dict to the innermost."""
        return {  # guard: numbers-tracked-from-start
            keys: value
            for keys, value in _entries(state, ())
            if type(value) in (int, float)
            and (len(keys) == 1 or keys[-1].lower() in COUNTERS)
            and self._names.keeps(".".join(map(component, keys)))
        }


def _entries(part: Mapping[Any, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Keys and value of every entry in nested dicts whose keys are text."""
    for key, value in part.items():
        if type(key) is str:
            keys = (*above, key)
            yield keys, value
            if type(value) is dict and len(keys) <= DEPTH_LIMIT:
                yield from _entries(value, keys)
