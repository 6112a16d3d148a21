"""Whether a state is live: copies in it that the training does not update would be saved with the same values for ever.

`require_live` refuses results of an object's `state_dict()`, before a Checkpointer opens its run. `Numbers` warns of a
plain number that does not change from save to save. Both examine plain containers only, because the `state_dict()` of
an object is called again at every save.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .. import reporting
from ..errors import Refused
from ..format.values import component, join, only_numbers
from ..limits import DEPTH_LIMIT
from .capture import wanted
from .instances import parts_of
from .objects import tag_of

UNCHANGED_SAVES = 3
"""number of saves after which a number that never changed is reported"""
COUNTERS = {"epoch", "step", "global_step", "iteration", "current_epoch", "current_step"}
"""keys of the numbers in nested dicts that count the progress of the training"""

_SCHEDULER = {"base_lrs", "last_epoch", "_step_count", "_last_lr", "_schedulers"}
"""keys of torch's schedulers: the state_dict() of each has two of them at least"""
_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def require_live(state: Mapping[str, Any]) -> None:
    """Raises Refused, with all their names, if the state holds the `state_dict()` of an object instead of the object.

    A module's `state_dict()` shares the memory of its parameters, but only until something replaces them
    (`module.to()`, `load_state_dict(assign=True)`, FSDP). So it is refused too. A copy of weights that is kept on
    purpose is accepted as a plain dict of tensors: `dict(copies)`.
    """
    found = [one for key, value in state.items() for one in _state_dicts(value, component(key), frozenset())]
    if found:
        listed = "\n".join(f"  {path}: the state_dict() of {kind}" for path, kind in found)
        raise Refused(
            f"the state holds copies that training does not update; every save would store the same:\n{listed}",
            safe="\nNothing was touched.",
            todo='Give the object itself: state={"optimizer": optimizer}, not optimizer.state_dict(). It is read '
            "again at every save. Give weights that were copied on purpose as dict(copies).",
        )


def _state_dicts(obj: Any, path: str, above: frozenset[int]) -> Iterator[tuple[str, str]]:
    """Path and kind of every `state_dict()` in nested containers, dataclasses and namedtuples.

    `above`: the ids of those that this one is in.
    """
    if id(obj) in above or len(above) > DEPTH_LIMIT:
        return  # the first save refuses it by name
    below = above | {id(obj)}
    if isinstance(obj, Mapping) and not tag_of(obj):  # an object is read again at every save
        if kind := _kind(obj):
            yield path, kind
            return
        for key, part in obj.items():
            yield from _state_dicts(part, join(path, key), below)
    elif not tag_of(obj) and (parts := parts_of(obj)):
        for name, part in parts.items():
            yield from _state_dicts(part, join(path, name), below)
    elif isinstance(obj, (list, tuple, deque)) and not only_numbers(obj):
        for index, part in enumerate(obj):
            yield from _state_dicts(part, f"{path}.{index}", below)


def _kind(obj: Mapping[Any, Any]) -> str:
    """The kind of object whose `state_dict()` this is; empty for any other mapping."""
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
    """Warns of numbers in a state that do not change during the first UNCHANGED_SAVES saves.

    Watched are top-level entries of type int and float, and numbers in nested dicts whose key is one of COUNTERS. Every
    other number in a nested dict is taken for configuration (`lr`, `seed`, `batch_size`). Lists are not examined,
    because they hold records of the past. A number that changes once an epoch may rightly stay the same for so long;
    so the report is a single warning, and its text mentions this case. `include`, `exclude`: as in `capture`; only
    numbers that are saved are watched.
    """

    def __init__(self, state: Mapping[str, Any], include: Sequence[str], exclude: Sequence[str]) -> None:
        self._names = wanted(include, exclude)
        self._unchanged = self._numbers(state)
        self._steps: list[int] = []

    def saved(self, step: int, state: Mapping[str, Any]) -> None:
        """Note a save of `step`. The last save that is watched reports the numbers that never changed."""
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
        """The watched numbers; the key of each is the tuple of its keys from the outermost dict to the innermost."""
        return {  # guard: numbers-tracked-from-start
            keys: value
            for keys, value in _entries(state, ())
            if type(value) in (int, float)
            and (len(keys) == 1 or keys[-1].lower() in COUNTERS)
            and self._names.keeps(".".join(map(component, keys)))
        }


def _entries(part: Mapping[Any, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(keys, value) of every entry in nested dicts whose keys are strings."""
    for key, value in part.items():
        if type(key) is str:
            keys = (*above, key)
            yield keys, value
            if type(value) is dict and len(keys) <= DEPTH_LIMIT:
                yield from _entries(value, keys)
