"""Whether the live state still equals a generation, for a step that is saved a second time. Writes nothing.

All bytes are read and digested, because version counters miss the changes of fused optimizers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from torch.optim.lr_scheduler import LRScheduler

from ..errors import StepTaken
from ..format.values import component
from ..records import Manifest, Piece
from ..state.capture import Captured, Origin
from ..state.objects import find_objects, tag_of
from ..units import shortened
from .staging import content_digest

_LISTED = 3
"""names of changed tensors in the error"""
_RANDOM = "rng"
"""random number generators: any code between two saves draws from them, so they are not compared"""
_MOVING = {"!object", "!torch.Generator", "!np.Generator", "!np.RandomState", "!random.Random"}
"""tags of objects that change without a step of an optimizer"""


def changed(captured: Captured, manifest: Manifest) -> list[str]:
    """Names of the parameters and optimizer states of a rank's manifest whose content has changed on this rank.

    Tensors of `Origin.OTHER` (buffers, random numbers) and values are not compared: an evaluation may change them.
    """
    origins = captured.origins
    trained = (piece for piece in manifest.pieces if origins.get(piece.name, Origin.OTHER) is not Origin.OTHER)
    return [piece.name for piece in trained if not _holds(captured, piece, manifest.digest)]


def changed_values(state: Mapping[str, Any], captured: Captured, manifest: Manifest) -> list[str]:
    """Names of the entries of a state whose values have changed: data, schedules, and learning rates.

    Not of other objects: a loader, for example, changes when it is iterated, and an evaluation draws random numbers.
    """
    before, now = _values(manifest.values), _values(captured.values)
    names = [component(name) for name, one in state.items() if isinstance(one, LRScheduler)]
    for values in (before, now):
        values.update({name: _data(one) for name, one in values.items() if name not in names})
    return [name for name in map(component, state) if before.get(name) != now.get(name)]


def changed_beside(
    state: Mapping[str, Any], captured: Captured, manifest: Manifest, among: Collection[str] | None = None
) -> list[str]:
    """Names of the tensors that `changed` does not compare, buffers and those in containers, whose content has changed,
    or that are gone; not of those of objects that `changed_values` leaves out. `among`: the names to compare; default
    None: all of them."""
    moving = [path for path, one in find_objects(state).items() if _is_moving(one)]
    moving = [*moving, _RANDOM]
    beside = (piece for piece in manifest.pieces if captured.origins.get(piece.name, Origin.OTHER) is Origin.OTHER)
    kept = (piece for piece in beside if not any(f"{piece.name}.".startswith(f"{path}.") for path in moving))
    compared = (piece for piece in kept if among is None or piece.name in among)
    return sorted(
        piece.name
        for piece in compared
        if piece.name not in captured.tensors or not _holds(captured, piece, manifest.digest)
    )


def require_unchanged(step: int, names: Sequence[str]) -> None:
    """Raises StepTaken if there are any `names`: those of tensors that have changed since `step` was saved."""
    if names:
        raise StepTaken(
            f"step {step} is saved already, and the state has changed since: {shortened(names, _LISTED)}",
            safe="What was saved of this step is untouched; nothing was written.",
            todo="Save the new state under the number of its own step.",
        )


def is_same(captured: Captured, manifest: Manifest) -> bool:
    """Whether all of the live state, except the random numbers, equals the manifest of a single process."""
    pieces = [piece for piece in manifest.pieces if not _is_random(piece.name)]
    return (  # guard: unchanged-restore-compares-all
        {piece.name for piece in pieces} == {name for name in captured.tensors if not _is_random(name)}
        and captured.aliases == manifest.aliases
        and _values(captured.values) == _values(manifest.values)
        and all(_holds(captured, piece, manifest.digest) for piece in pieces)
    )


def _holds(captured: Captured, piece: Piece, algorithm: str) -> bool:
    """Whether the part of the live tensor that this piece stores still has the content that was saved."""
    held, spread = captured.tensors[piece.name], captured.sharded.get(piece.name)
    if piece.offsets:
        first = piece.offsets[0] - (spread.box.offsets[0] if spread else 0)
        held = held[first : first + piece.shape[0]]
    return content_digest(held, algorithm) == piece.digest


def _is_moving(obj: Any) -> bool:
    """Whether this object changes without a step of an optimizer: a loader, or a generator of random numbers."""
    return tag_of(obj) in _MOVING and not isinstance(obj, LRScheduler)


def _data(value: Any) -> Any:
    """A value as stored, without such objects inside of it."""
    if isinstance(value, dict):
        return None if _MOVING & value.keys() else {key: _data(one) for key, one in value.items()}
    return [*map(_data, value)] if isinstance(value, list) else value


def _is_random(name: str) -> bool:
    return name.partition(".")[0] == _RANDOM


def _values(values: Mapping[str, Any]) -> Any:
    """The values without random numbers, as they are read back from a manifest."""
    kept = {name: one for name, one in values.items() if name != _RANDOM}
    return msgspec.json.decode(msgspec.json.encode(kept))
