"""Values of any length in the store of the nodes: torch's store ends the connection that sends it more than 8 MiB."""

from __future__ import annotations

from collections.abc import Callable

from .membership import Membership

PIECE_CHARACTERS = 1 << 20
"""The longest value of a key. A report with what survivors have left is longer, and takes several."""
IN_PIECES = "in pieces: "
"""How the value of such a key begins, before the number of the others."""


def put(membership: Membership, key: str, value: str, touch: Callable[[], None]) -> None:
    """Set a key of the round to a value. `touch`: shows between the pieces that this node lives. Raises TierDown."""
    if len(value) <= PIECE_CHARACTERS:
        membership.put({key: value})
        return
    starts = range(0, len(value), PIECE_CHARACTERS)
    for number, start in enumerate(starts):
        membership.put({f"{key}/{number}": value[start : start + PIECE_CHARACTERS]})
        touch()
    membership.put({key: f"{IN_PIECES}{len(starts)}"})


def read(membership: Membership, key: str, value: str, touch: Callable[[], None]) -> str:
    """The value that was set so; empty if it was deleted meanwhile. `value`: what the key has in the store. `touch`: as
    for `put`. Raises TierDown."""
    if not value.startswith(IN_PIECES):
        return value
    pieces = list[str]()
    for one in _pieces(key, value):
        piece = membership.read([one])[0]
        if piece is None:
            return ""
        pieces.append(piece)
        touch()
    return "".join(pieces)


def drop(membership: Membership, key: str) -> None:
    """Delete a value that was set so, if it is there. Raises TierDown."""
    value = membership.read([key])[0]
    if value is not None:
        membership.drop([key, *_pieces(key, value)])


def _pieces(key: str, value: str) -> list[str]:
    """The keys of the pieces of a value."""
    pieces = int(value.removeprefix(IN_PIECES)) if value.startswith(IN_PIECES) else 0
    return [f"{key}/{one}" for one in range(pieces)]
