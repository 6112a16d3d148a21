"""Together: what ranks must agree on in a save, beside its commit: who holds what, and that it is the same.

    restore, or a new structure       every rank: what is it made of?     -> who holds what (`divided`)
    every save, once all is written   every rank: digests of what several hold, in one sum for each group of holders
                                      -> as one, or which differ (`approve`)

Invariants
  1. A division is used only in a save in which every rank has the structure for which it was agreed: a stale one makes
     the save fail, on all ranks, and the next save agrees anew.
  2. Of what several ranks hold and is not the same, none is taken for all: each writes its own, or the save fails.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..engine.arena import Arena
from ..engine.persist import Chunk
from ..errors import ReplicaDiffers, StepDiffers
from ..format import layout
from ..format.layout import Image
from ..rawio.files import round_up
from ..records import Piece
from ..run.ranks import Ranks, Topic
from ..run.sharing import Approve, Files
from . import staging
from .capture import Captured, Origin
from .dividing import Division, Item, described, divide, listed


class Together:
    """The agreements of one rank."""

    def __init__(self, ranks: Ranks, algorithm: str) -> None:
        self._ranks, self._algorithm = ranks, algorithm
        self._homes: dict[str, list[tuple[int, ...]]] | None = None
        """of what not all hold alike: who does, as in `divide`"""
        self._agreed: list[str] = []
        """where that is known to the coordinator: of which structure on each rank; none where all are the same"""
        self._own: set[str] = set()
        """what was found to differ"""
        self._for: tuple[int, Collection[str], int] | None = None
        self._division: Division | None = None
        self._described = -1, ""
        """key and digest of the structure"""
        self._homes_of = ""
        """the structure for which `_homes` holds; empty where all ranks are made of the same"""

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def divided(self, captured: Captured, finite: Collection[str]) -> Division:
        """What this rank writes; asks the others where that is not known."""
        if captured.key != self._described[0]:
            self._described = captured.key, described(captured)
        if self._homes is None or self._homes_of not in ("", self._described[1]):
            self._homes = self._find_homes(captured)
            self._division = None
        now = captured.key, finite, len(self._own)
        if self._division is None or now != self._for:
            everybody: list[tuple[int, ...]] = [(rank,) for rank in range(self._ranks.size)]
            meshes = {name: [spread.mesh] for name, spread in captured.sharded.items()}
            homes = {name: self._homes.get(name) or meshes.get(name, everybody) for name in captured.tensors}
            self._division, self._for = divide(captured, finite, self.rank, homes, self._own), now
        return self._division

    def forget(self) -> None:
        """The next save agrees anew."""
        self._homes, self._division = None, None

    def _find_homes(self, captured: Captured) -> dict[str, list[tuple[int, ...]]]:
        topic = self._ranks.topic("structure")
        structures: list[str] = []

        def alike(told: list[str]) -> bool:
            structures[:] = told if len(set(told)) > 1 else []
            return not structures

        same = topic.agree(self._described[1], alike)
        self._agreed, self._homes_of = structures, "" if same else self._described[1]
        if same:
            return {}
        return {name: [tuple(home) for home in homes] for name, homes in topic.agree(listed(captured), _homes).items()}

    # ---- once all is written -------------------------------------------------------------------------------

    def approve(
        self, topic: Topic, division: Division, captured: Captured, snapshot: staging.Snapshot, kept: Mapping[str, Any]
    ) -> Approve:
        """For `RunWriter.save`. `kept`: of what others write, the content of what may be this rank's own after all."""
        structure = self._described[1]
        origins = {item.tensor.key: captured.origins[item.name] for items in _all(division) for item in items}
        items = {item.tensor.key: item for group in division.witnessed.values() for item in group}

        def agreed(pieces: Sequence[Piece]) -> Files:
            digests = {piece.key: piece.digest for piece in pieces} | snapshot.witnessed
            sums = {",".join(map(str, group)): _sum(keys, digests) for group, keys in division.shared.items() if keys}
            told = {"structure": structure, "sums": sums}
            verdict = topic.agree(told, partial(_compare, self._agreed))
            if verdict == "structures":
                self.forget()
                raise StepDiffers(
                    "the states of the ranks are not made of what they agreed on",
                    safe="This save was dropped; every committed generation is untouched.",
                    todo="The next save agrees anew.",
                )
            if verdict == "same":
                return ()
            mine = {key: digests[key] for keys in division.shared.values() for key in keys}
            differing = {key for key, _ in topic.agree(mine, _differing)}
            trained = sorted(key for key in differing if origins.get(key, Origin.OTHER) is not Origin.OTHER)
            refused = topic.agree(trained, lambda told: sorted({key for one in told for key in one}))
            if refused:
                shown = ", ".join(refused[:5]) + (f" and {len(refused) - 5} more" if len(refused) > 5 else "")
                raise ReplicaDiffers(
                    f"ranks that should hold the same hold something else: {shown}",
                    safe="This save was dropped; every committed generation is untouched.",
                    todo="A rank has diverged: see which, and restore() on all of them.",
                )
            self._own |= {items[key].name for key in differing if key in items}
            self._own |= {item.name for item in division.mine if item.tensor.key in differing}
            return list(self._further([items[key] for key in sorted(differing) if key in items], kept, pieces))

        return agreed

    def _further(
        self, own: Sequence[Item], kept: Mapping[str, torch.Tensor], pieces: Sequence[Piece]
    ) -> Iterator[tuple[Image, Iterator[Chunk]]]:
        """Files of what this rank holds differently."""
        if not own:
            return
        first = len({piece.extent.blob for piece in pieces}) or 1
        tensors = [item.tensor._replace(own=True) for item in own]
        files = layout.images(tensors, self.rank, first=first)
        content = {item.tensor.key: kept[item.tensor.key] for item in own}
        for image in files:
            arena = Arena(round_up(image.length, layout.CHUNK_BYTES), min(layout.CHUNK_BYTES, round_up(image.length)))
            chunks = staging.in_chunks([image], arena.chunk_bytes)
            yield image, staging.Snapshot(chunks, content, staging.devices(content), arena).fill()


def _all(division: Division) -> list[list[Item]]:
    return [division.mine, *division.witnessed.values()]


def _sum(keys: Sequence[str], digests: Mapping[str, str]) -> str:
    told = hashlib.sha256()
    for key in keys:
        told.update(f"{key}={digests[key]}\n".encode())
    return told.hexdigest()


# ---- what the coordinator decides ----------------------------------------------------------------------------


def _homes(told: list[list[list[Any]]]) -> dict[str, list[list[int]]]:
    """Who holds what, as in `divide`. Raises StepDiffers where a name means two things."""
    first: dict[str, tuple[int, str, list[int], int]] = {}
    found: dict[str, list[list[int]]] = {}
    for rank, tensors in enumerate(told):
        for name, dtype, shape, mesh in tensors:
            before = first.setdefault(name, (rank, dtype, shape, len(mesh)))
            if before[1:] != (dtype, shape, len(mesh)):
                raise StepDiffers(
                    f"{name} is {dtype} {shape} on rank {rank}, and {before[1]} {before[2]} on rank {before[0]}, or is "
                    "spread in another way",
                    safe="Nothing was saved.",
                    todo="Give what is not the same another name: state={'stage0': ...} on one, 'stage1' on the other.",
                )
            homes, home = found.setdefault(name, []), mesh or [rank]
            if home not in homes:
                homes.append(home)
    return found


def _compare(agreed: list[str], told: list[dict[str, Any]]) -> str:
    """Whether all hold the same under the same name: "same", "differing", or "structures"."""
    structures = [one["structure"] for one in told]
    if structures != agreed if agreed else len(set(structures)) > 1:
        return "structures"
    sums: dict[str, set[str]] = {}
    count: Counter[str] = Counter()
    for one in told:
        for group, found in one["sums"].items():
            sums.setdefault(group, set()).add(found)
            count[group] += 1
    if any(count[group] != group.count(",") + 1 for group in sums):
        return "structures"
    return "same" if all(len(found) == 1 for found in sums.values()) else "differing"


def _differing(told: list[dict[str, str]]) -> list[list[Any]]:
    """Keys under which ranks hold something else, and which ranks."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, digests in enumerate(told):
        for key, one in digests.items():
            found.setdefault(key, {}).setdefault(one, []).append(rank)
    return [[key, sorted(by.values())] for key, by in found.items() if len(by) > 1]
