"""What ranks leave for a just-in-time save, as records: notes of each step, and what a survivor has written. Pure.

A note is made at each step by every rank; `Written` once, by a rank that has survived another one.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..io.checksum import digest
from ..policy.survival import Noted
from ..records import Blob, Incarnation, Piece, Record

_ALGORITHM = "xxh3_128"


class NotedTensor(Record, frozen=True, kw_only=True):
    """A copy of a tensor in row-major order."""

    name: str
    dtype: str
    shape: list[int]
    data: bytes


class Note(Record, frozen=True, kw_only=True):
    """What one rank notes when it has completed a step. `values`: JSON, as in a manifest. `samples`: as in `Noted`."""

    step: int
    opening: str
    """of the run by this job, since its last restore"""
    process: int
    structure: str
    samples: list[tuple[list[int], str]]
    aliases: dict[str, str]
    values: bytes
    tensors: list[NotedTensor]

    @property
    def noted(self) -> Noted:
        """What the policy needs of it."""
        return Noted(self.structure, {tuple(held): samples for held, samples in self.samples})


class Written(Record, frozen=True, kw_only=True):
    """What one survivor has written of its memory, durable: `blobs` and `pieces` as in its manifest.

    `held`: holders, of whose parts of tensors it has written all. `finite`: names of tensors that must be finite.
    `incarnation`: in which the attempt has saved, or would have; None: in none yet. `place`: the directory in which it
    has written. `others`: the other places of the run. `mode`, `algorithm`: as it has written.
    """

    rank: int
    step: int
    opening: str
    held: list[list[int]]
    blobs: list[Blob]
    pieces: list[Piece]
    finite: list[str]
    incarnation: Incarnation | None
    place: str
    others: list[str]
    mode: str
    algorithm: str


R = TypeVar("R", Note, Written)


def decoded(data: bytes, kind: type[R]) -> R | None:
    """What a rank has left; None for what another version has left."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError:
        return None


def stores(tensor: NotedTensor, rank: int, first: Note) -> bool:
    """Whether a rank stores a tensor of its note, as every save does (ranks/partition.py): rank 0 all of them; another
    one its random numbers, and what differs from the note of rank 0, `first`."""
    random = tensor.name == "rng" or tensor.name.startswith("rng.")
    return rank == 0 or random or all(one.name != tensor.name or one.data != tensor.data for one in first.tensors)


def samples_digest(described: str, *samples: bytes) -> str:
    """The digest of samples in a note. `described`: where they are taken."""
    return digest(_ALGORITHM, described.encode(), *samples)
