"""Whether the live state is still what a generation holds: asked where a step is saved twice. Writes nothing."""

from __future__ import annotations

from ..errors import StepTaken
from ..records import Manifest
from .capture import Captured, Origin
from .staging import content_digest

_TRAINED = {Origin.PARAMETER, Origin.STEPPED}
_LISTED = 3
"""names of changed tensors in the error"""


def require_unchanged(captured: Captured, manifest: Manifest) -> None:
    """Raises StepTaken where a parameter, or the state of an optimizer, is not what was saved of this step.

    Everything is read: version counters miss what fused optimizers change. Buffers, random numbers and values may
    differ, because an evaluation changes them too.
    """
    changed = [
        piece.name
        for piece in manifest.pieces
        if captured.origins.get(piece.name) in _TRAINED
        and content_digest(captured.tensors[piece.name], manifest.digest) != piece.digest
    ]
    if changed:
        more = f" and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
        raise StepTaken(
            f"step {manifest.step} is saved already, and the state has changed since: "
            f"{', '.join(changed[:_LISTED])}{more}",
            safe="What was saved of this step is untouched; nothing was written.",
            todo="Save the new state under the number of its own step.",
        )
