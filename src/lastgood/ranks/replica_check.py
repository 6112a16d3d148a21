"""Together: what ranks must agree on in a save, beside its commit: who holds what, and that it is the same.

    restore; the first step of a fresh start     every rank: what is it made of?      -> who holds what (`agree`)
    every save, once all is written              every rank: what it is made of, and digests of what several hold, in
                                                 one sum for each group of holders
                                                 -> as one, which differ, or another structure (`ReplicaCheck`)

Invariants
  1. A save is published only where every rank has the structure that the others know of, and every group of holders
     has divided what it holds in the same way. Else it fails, on all ranks, which find out behind the loop who holds
     what now: the next save has it.
  2. Of what several ranks hold and is not the same, none is taken for all: each writes its own, or the save fails.
  3. The training thread waits for other ranks in a restore, and in the first save of a fresh start, until all have made
     their first step; in no other save.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import torch

from ..coordination.rounds import Ranks, Topic
from ..engine.arena import Arena
from ..engine.write_file import Chunk
from ..errors import ReplicaDiffers, StepDiffers
from ..format import layout
from ..format.layout import Image
from ..io.files import round_up
from ..records import Piece
from ..run.save import Files
from ..snapshot import staging
from ..state.capture import Captured, Origin
from ..state.patterns import refused
from .partition import Division, Item, described, divide, listed


@dataclass(frozen=True, eq=False)
class _Known:
    """What this rank knows of the others."""

    homes: Mapping[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """who holds what, as in `divide`; empty where all are made of the same"""
    structures: Sequence[str] = ()
    """at the coordinator: of which structure on each rank that holds; none where all are made of the same"""
    own: frozenset[str] = frozenset()
    """what was found to differ"""
    name: str = ""
    """of `homes`: the same where they are"""


class Replicas:
    """The agreements of one rank."""

    def __init__(self, ranks: Ranks, algorithm: str) -> None:
        self._ranks, self._algorithm = ranks, algorithm
        self._known: _Known | None = None
        self._asking: Future[_Known] | None = None
        self._division: Division | None = None
        self._for: tuple[int, Collection[str], _Known] | None = None
        self._described = -1, ""
        """key and digest of the structure"""

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @contextmanager
    def topic(self) -> Iterator[Topic]:
        """Where to find out who holds what; it fails there for all where what is done with it fails."""
        topic = self._ranks.topic("structure")
        with topic.failing():
            yield topic

    def agree(self, topic: Topic, captured: Captured, unmatched: Sequence[tuple[str, str]], beside: Executor) -> None:
        """Find out, with all other ranks, who holds what; the next save waits for it. No tensor is held until then.

        `unmatched`: name patterns that match nothing here; the next save is refused if one matches on no rank.
        """
        structure, names = self._structure(captured), listed(captured)
        self._known, self._asking = None, beside.submit(self._ask, topic, structure, names, unmatched)

    def divided(self, captured: Captured, finite: Collection[str], topic: Topic) -> Division:
        """What this rank writes. Where nothing could be agreed on before, all ranks do so now, under `topic`.

        What the others do not know of is taken for its own where their structures differ, else for everybody's.
        """
        if self._known is None:
            asking, self._asking = self._asking, None
            structure = self._structure(captured)
            self._known = asking.result() if asking else self._ask(topic, structure, listed(captured))
        known = self._known
        now = captured.key, finite, known
        if self._division is None or now != self._for:
            mine: list[tuple[int, ...]] = [(self.rank,)]
            everybody: list[tuple[int, ...]] = [(rank,) for rank in range(self._ranks.size)]
            meshes = {name: [spread.mesh] for name, spread in captured.sharded.items()}
            unknown = mine if known.homes else everybody
            homes = {name: known.homes.get(name) or meshes.get(name, unknown) for name in captured.tensors}
            self._division, self._for = divide(captured, finite, self.rank, homes, known.own), now
        return self._division

    def _structure(self, captured: Captured) -> str:
        if captured.key != self._described[0]:
            self._described = captured.key, described(captured)
        return self._described[1]

    def _ask(
        self, topic: Topic, structure: str, names: list[list[Any]], unmatched: Sequence[tuple[str, str]] = ()
    ) -> _Known:
        structures: list[str] = []

        def judge(told: list[dict[str, Any]]) -> str | list[int]:
            structures[:] = [one["structure"] for one in told]
            if any("sums" in one for one in told):
                return AGAIN  # it is not all who ask
            if nowhere := _in_all([one.get("unmatched", []) for one in told]):
                raise refused(nowhere, [name for name, *_ in names])
            return SAME if len(set(structures)) == 1 else _speakers(structures)

        while (verdict := topic.agree({"structure": structure, "unmatched": unmatched}, judge)) == AGAIN:
            continue
        if verdict == SAME:
            return _Known()
        told = topic.agree(names if self.rank in verdict else None, partial(_homes, structures))
        homes = [[tuple(home) for home in one] for one in told["homes"]]
        name = hashlib.sha256(msgspec.json.encode(told)).hexdigest()
        return _Known({name: homes[at] for name, at in told["names"].items()}, structures, name=name)

    # ---- once all is written -------------------------------------------------------------------------------

    def check(
        self, topic: Topic, division: Division, captured: Captured, snapshot: staging.Snapshot, kept: Mapping[str, Any]
    ) -> ReplicaCheck:
        """The check of one save. `kept`: of what others write, the content of what may be this rank's own after all."""
        assert self._for is not None
        return ReplicaCheck(self, topic, division, captured, snapshot, kept, self._for[2], self._structure(captured))

    def exchange_again(self, topic: Topic, captured: Captured, structure: str) -> None:
        """Find out who holds what now: the next save goes by it."""
        self._known = self._ask(topic, structure, listed(captured))

    def note_own(self, known: _Known, names: Collection[str]) -> None:
        """From now on each rank writes these itself."""
        self._known = replace(self._known or known, own=known.own | frozenset(names))


@dataclass(frozen=True)
class ReplicaCheck:
    """The check of one save, once all of it is written: what several ranks hold is the same on each of them."""

    replicas: Replicas
    topic: Topic
    division: Division
    captured: Captured
    snapshot: staging.Snapshot
    kept: Mapping[str, torch.Tensor]
    known: _Known
    """what this rank knew of the others when the save was planned"""
    structure: str

    def approve(self, pieces: Sequence[Piece]) -> Files:
        """Files of what this rank holds differently, and may. Raises ReplicaDiffers, StepDiffers, on all ranks."""
        digests = {piece.key: piece.digest for piece in pieces} | self.snapshot.witnessed
        sums = {_named(group): _sums(keys, digests) for group, keys in self.division.shared.items() if keys}
        mine = {"structure": self.structure, "knows": self.known.name, "sums": sums}
        verdict = self.topic.agree(mine, partial(compare, self.known.structures))
        if verdict == AGAIN:
            # guard: changed-structure-exchanged
            self.replicas.exchange_again(self.topic, self.captured, self.structure)
            raise StepDiffers(
                "the states of the ranks are not made of what they agreed on",
                safe="This save was dropped; every committed generation is untouched.",
                todo="The next save goes by what they are made of now.",
            )
        if verdict == SAME:
            return ()
        held = {key: digests[key] for keys in self.division.shared.values() for key in keys}
        found = dict(self.topic.agree(held, _differing))
        self._require_untrained(found)
        items = {item.tensor.key: item for group in self.division.witnessed.values() for item in group}
        own = {items[key].name for key in found if key in items}
        own |= {item.name for item in self.division.mine if item.tensor.key in found}
        self.replicas.note_own(self.known, own)  # guard: differing-state-own-from-then-on
        # guard: differing-state-own-at-once
        return list(self._further([items[key] for key in sorted(found) if key in items], pieces))

    def _require_untrained(self, found: Mapping[str, str]) -> None:
        """What differs must not be trained: then each rank may write its own. Raises ReplicaDiffers, on all ranks."""
        origins = {item.tensor.key: self.captured.origins[item.name] for items in _all(self.division) for item in items}
        trained = sorted(key for key in found if origins.get(key, Origin.OTHER) is not Origin.OTHER)
        refused = self.topic.agree(trained, lambda posts: sorted({key for one in posts for key in one}))
        if refused:  # guard: differing-weights-refused
            shown = ", ".join(f"{key} ({found[key]})" for key in refused[:5])
            shown += f" and {len(refused) - 5} more" if len(refused) > 5 else ""
            raise ReplicaDiffers(
                f"ranks that should hold the same hold something else: {shown}",
                safe="This save was dropped; every committed generation is untouched.",
                todo="A rank has diverged: see which, and restore() on all of them.",
            )

    def _further(self, own: Sequence[Item], pieces: Sequence[Piece]) -> Iterator[tuple[Image, Iterator[Chunk]]]:
        """Files of what this rank holds differently."""
        if not own:
            return
        first = len({piece.extent.blob for piece in pieces}) or 1
        tensors = [item.tensor._replace(own=True) for item in own]
        files = layout.images(tensors, self.replicas.rank, first=first)
        content = {item.tensor.key: self.kept[item.tensor.key] for item in own}
        for image in files:
            arena = Arena(round_up(image.length, layout.CHUNK_BYTES), min(layout.CHUNK_BYTES, round_up(image.length)))
            yield image, staging.copy_all([image], content, arena).fill()


def _all(division: Division) -> list[list[Item]]:
    return [division.mine, *division.witnessed.values()]


def _named(group: Sequence[int]) -> str:
    """A short name of these ranks, and how many they are."""
    return f"{hashlib.sha256(repr(group).encode()).hexdigest()[:32]} {len(group)}"


def _sums(keys: Sequence[str], digests: Mapping[str, str]) -> tuple[str, str]:
    """Of how a group has divided what it holds, and of the content."""
    divided, content = hashlib.sha256(), hashlib.sha256()
    for key in keys:
        divided.update(f"{key}\n".encode())
        content.update(f"{digests[key]}\n".encode())
    return divided.hexdigest(), content.hexdigest()


# ---- what the coordinator decides ----------------------------------------------------------------------------

SAME, DIFFERING, AGAIN = "same", "differing", "again"


def _in_all(unmatched: Sequence[Sequence[Sequence[str]]]) -> list[tuple[str, str]]:
    """The patterns, with the argument that each was given in, that match nothing on any rank."""
    first, *others = [[(argument, pattern) for argument, pattern in one] for one in unmatched]
    return [one for one in first if all(one in other for other in others)]  # guard: pattern-matches-some-rank


def _speakers(structures: Sequence[str]) -> list[int]:
    """Of each structure, the first rank that has it."""
    return sorted({structure: rank for rank, structure in reversed(list(enumerate(structures)))}.values())


def _homes(structures: Sequence[str], told: Sequence[list[list[Any]] | None]) -> dict[str, Any]:
    """Who holds what, as in `divide`: `homes`, each once, and which of them a name has. `told`: by the speakers.

    Raises StepDiffers where a name means two things.
    """
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, dict[tuple[int, ...], None]] = {}
    for rank, tensors in enumerate(told):
        alike = [(other,) for other, one in enumerate(structures) if one == structures[rank]] if tensors else []
        for name, what, mesh in tensors or ():
            whose, before = first.setdefault(name, (rank, what))
            if before != what:  # guard: name-means-one-thing
                raise StepDiffers(
                    f"{name} is {what} on rank {rank}, and {before} on rank {whose}",
                    safe="Nothing was saved.",
                    todo="Give what is not the same another name: state={'stage0': ...} on one, 'stage1' on the other.",
                )
            found.setdefault(name, {}).update(dict.fromkeys([tuple(mesh)] if mesh else alike))
    homes: dict[tuple[tuple[int, ...], ...], int] = {}
    names = {name: homes.setdefault(tuple(sorted(one)), len(homes)) for name, one in found.items()}
    return {"homes": list(homes), "names": names}


def compare(agreed: Sequence[str], told: list[dict[str, Any]]) -> str:
    """Whether all hold the same under the same name; or they must ask AGAIN who holds what."""
    structures = [one["structure"] for one in told]
    if structures != list(agreed) if agreed else len(set(structures)) > 1:  # guard: stale-plan-refused
        return AGAIN
    # guard: equal-knowledge-required
    if len({one.get("knows") for one in told}) > 1:  # it is not all who know, or not the same
        return AGAIN
    divided: dict[str, set[str]] = {}
    content: dict[str, set[str]] = {}
    count: Counter[str] = Counter()
    for one in told:
        for group, (keys, digests) in one["sums"].items():
            divided.setdefault(group, set()).add(keys)
            content.setdefault(group, set()).add(digests)
            count[group] += 1
    if any(count[group] != int(group.partition(" ")[2]) or len(found) > 1 for group, found in divided.items()):
        return AGAIN
    return SAME if all(len(found) == 1 for found in content.values()) else DIFFERING  # guard: replicas-compared


def _differing(told: list[dict[str, str]]) -> list[list[Any]]:
    """Keys under which ranks hold something else, and how they differ."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, digests in enumerate(told):
        for key, one in digests.items():
            found.setdefault(key, {}).setdefault(one, []).append(rank)
    return [[key, _parties(list(by.values()))] for key, by in found.items() if len(by) > 1]


def _parties(by: list[list[int]]) -> str:
    told = [", ".join(map(str, one[:4])) + (", ..." if len(one) > 4 else "") for one in sorted(by)]
    return "rank " + " against ".join(told[:4]) + (" and others" if len(told) > 4 else "")
