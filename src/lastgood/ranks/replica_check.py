"""Replica check: the ranks agree on who holds which tensor, and check in each save that replicas have equal content.

    when                                           what every rank posts                        verdict
    ---------------------------------------------  -------------------------------------------  --------------------
    in restore(), or in the first step of a fresh  a digest of the structure of its state, and  which ranks hold
    start (`Replicas.start_exchange`)              how much it holds alone; its list of names,  which tensor
                                                   if the structures differ
    in every save, once its pieces are written     digests of its structure, of which ranks     equal, different, or
    (`ReplicaCheck.approve`)                       hold what, and of what several ranks hold    a stale partition

Where the last exchange failed, both may take place in the topic of one save: some ranks exchange, others are in the
check already. A post of the check has the key "sums". Both verdicts are AGAIN then, and all ranks exchange.

Invariants
  1. A save is published only if every rank still has the structure that was exchanged (or all have the same
     one, as they had then), knows the same holders as all others, and all holders of the same boxes have partitioned
     them alike. Otherwise the save fails with StepDiffers on all ranks. They exchange their
     structures again behind the training loop, and the saves that are planned after that use the result.
  2. Where the replicas of a tensor differ, none of them is taken for all: each rank writes its own, in this save and
     in all later ones. If an optimizer trains the tensor, the save fails with ReplicaDiffers on all ranks instead.
     Saves that are planned soon after find the difference again. From a step on that no rank has reached, all ranks
     plan with it: saves are planned while others are under way, and the ranks learn of a difference one after another.
  3. The training thread waits for other ranks in restore(), and in the first save after a fresh start, until all ranks
     have made their first step; in no other save, unless the last exchange failed: then
     the next save repeats it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import torch

from ..coordination.rounds import RankGroup, Topic
from ..engine.arena import Arena
from ..engine.write_file import Chunk
from ..errors import ReplicaDiffers, StepDiffers
from ..format import layout
from ..format.layout import Image
from ..io.files import round_up
from ..limits import CHUNK_BYTES
from ..records import Piece
from ..run.save import Files
from ..snapshot import staging
from ..state.capture import Captured, Origin
from ..state.patterns import refused
from ..units import shortened
from .partition import Item, Partition, own_bytes, partition, structure_digest, structure_list, written_bytes


@dataclass(frozen=True, eq=False)
class _Exchanged:
    """What this rank knows about the states of all ranks since their last exchange."""

    holders: Mapping[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """name -> groups of ranks, as in `partition`; empty where all ranks have the same structure: then every rank holds
    each tensor that is not sharded"""
    structures: Sequence[str] = ()
    """at the coordinator: the structure of each rank at that time; empty where all ranks have the same structure"""
    digest: str = ""
    """a digest of `holders`"""


class Replicas:
    """What one rank has agreed on with the others about replicated tensors.

    `algorithm`: of the digests of pieces. `in_flight`: how many saves are written side by side.
    """

    def __init__(self, ranks: RankGroup, algorithm: str, in_flight: int) -> None:
        self._ranks, self._algorithm, self._in_flight = ranks, algorithm, in_flight
        self._lock = threading.Lock()
        self._own: Mapping[str, int] = {}
        """name of a tensor that was found to differ -> the step from which on saves are planned with that. Lanes of
        several saves replace it, under the lock"""
        self._exchanged: _Exchanged | None = None
        self._exchanging: Future[_Exchanged] | None = None
        self._partition: Partition | None = None
        self._partition_key: tuple[int, Collection[str], _Exchanged, frozenset[str]] | None = None
        self._planned_steps: list[int] = []
        """of the last saves since the restore"""
        self._structure_of = -1, ""
        """key of a captured state, and the digest of its structure"""

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @contextmanager
    def topic(self) -> Iterator[Topic]:
        """The topic of an exchange of structures; an exception in the block fails it on all ranks."""
        topic = self._ranks.topic("structure")
        with topic.failing():
            yield topic

    def start_exchange(
        self,
        topic: Topic,
        captured: Captured,
        unmatched: Sequence[tuple[str, str]],
        executor: Executor,
        report: Callable[[Sequence[int]], None],
    ) -> None:
        """Exchange structures with all other ranks, on `executor`; the next save waits for the end. Keeps no tensor.

        `unmatched`: name patterns, with the argument each was given in, that match nothing on this rank. The next save
        raises Refused if one of them matches on no rank. `report`: called at the coordinator, on `executor`, with the
        bytes that each rank writes in a save.
        """
        names = structure_list(captured)
        mine = {"structure": self._structure(captured), "unmatched": unmatched, "own": own_bytes(captured)}
        self._own, self._planned_steps = {}, []
        self._exchanged, self._exchanging = None, executor.submit(self._exchange, topic, mine, names, report)

    def partition(self, captured: Captured, finite: Collection[str], topic: Topic) -> Partition:
        """What this rank writes. Where the last exchange failed, all ranks exchange their structures under `topic`.

        A name that was not exchanged is this rank's alone if the structures differed, else every rank's: when all ranks
        had the same structure, they usually change it together.
        """
        if self._exchanged is None:
            exchanging, self._exchanging = self._exchanging, None
            if exchanging:
                self._exchanged = exchanging.result()
            else:
                mine = {"structure": self._structure(captured)}
                self._exchanged = self._exchange(topic, mine, structure_list(captured))
        exchanged, step = self._exchanged, topic.steps[-1]
        self._planned_steps = [*self._planned_steps, step][-PLANNED_STEPS:]
        own = frozenset(name for name, first in self._own.items() if first <= step)
        key = captured.key, finite, exchanged, own
        if self._partition is None or key != self._partition_key:
            this_rank: list[tuple[int, ...]] = [(self.rank,)]
            every_rank: list[tuple[int, ...]] = [(rank,) for rank in range(self._ranks.size)]
            meshes = {name: [sharded.mesh] for name, sharded in captured.sharded.items()}
            unknown = this_rank if exchanged.holders else every_rank
            holders = {name: exchanged.holders.get(name) or meshes.get(name, unknown) for name in captured.tensors}
            self._partition = partition(captured, finite, self.rank, holders, own)
            self._partition_key = key
        return self._partition

    def _structure(self, captured: Captured) -> str:
        if captured.key != self._structure_of[0]:
            self._structure_of = captured.key, structure_digest(captured)
        return self._structure_of[1]

    def _exchange(
        self,
        topic: Topic,
        mine: dict[str, Any],
        names: list[list[Any]],
        report: Callable[[Sequence[int]], None] | None = None,
    ) -> _Exchanged:
        """Agree on which ranks hold what. One rank of each structure posts its names, if the structures differ.

        `mine`: what this rank posts; `names`: its `structure_list`. `report`: as for `start_exchange`.
        """
        structures, own = list[str](), list[int]()  # empty at all ranks but the coordinator
        lists = {mine["structure"]: names}

        def decide(posts: list[dict[str, Any]]) -> str | list[int]:
            structures[:] = [one["structure"] for one in posts]
            own[:] = [one.get("own", 0) for one in posts]
            if any("sums" in one for one in posts):
                return AGAIN  # some ranks are in the check of a save; on this verdict they begin an exchange
            if nowhere := _in_all([one.get("unmatched", []) for one in posts]):
                raise refused(nowhere, [name for name, *_ in names])
            return SAME if len(set(structures)) == 1 else _representatives(structures)

        def merge(posts: list[list[list[Any]] | None]) -> dict[str, Any]:
            lists.update({structures[rank]: one for rank, one in enumerate(posts) if one is not None})
            return _merged_holders(structures, posts)

        while (verdict := topic.agree(mine, decide)) == AGAIN:
            continue
        merged = None if verdict == SAME else topic.agree(names if self.rank in verdict else None, merge)
        if report is not None and own:
            report(written_bytes(structures, lists, own))
        if merged is None:
            return _Exchanged()
        holders = [[tuple(group) for group in groups] for groups in merged["holders"]]
        digest = hashlib.sha256(msgspec.json.encode(merged)).hexdigest()
        return _Exchanged({name: holders[at] for name, at in merged["names"].items()}, structures, digest=digest)

    # ---- in a save -----------------------------------------------------------------------------------------

    def check(
        self,
        topic: Topic,
        partition: Partition,
        captured: Captured,
        snapshot: staging.Snapshot,
        kept: Mapping[str, torch.Tensor],
    ) -> ReplicaCheck:
        """The check of one save, which was planned with `partition`.

        `kept`: key -> a copy of each tensor that another rank writes and that this rank must write if it differs.
        """
        assert self._partition_key is not None
        exchanged = self._partition_key[2]
        return ReplicaCheck(self, topic, partition, captured, snapshot, kept, exchanged, self._structure(captured))

    def exchange_again(self, topic: Topic, captured: Captured, structure: str) -> None:
        """Exchange structures now, in a save that fails: the next save uses the result."""
        self._exchanged = self._exchange(topic, {"structure": structure}, structure_list(captured))
        with self._lock:
            self._own = {}  # ranks that differ about it would fail each save

    def own_from(self) -> int | None:
        """A step that no rank will have reached when all know a verdict of now, as far as this rank can tell.

        None: this rank does not know yet how far saves are apart.
        """
        steps = self._planned_steps
        if len(steps) < PLANNED_STEPS:
            return None
        between = max(after - before for before, after in pairwise(steps))
        return max(steps) + OWN_AFTER_FLIGHTS * self._in_flight * max(between, 1)

    def note_own(self, names: Collection[str], step: int) -> None:
        """From `step` on each rank writes these tensors itself; from an earlier one, where that was noted before."""
        with self._lock:
            self._own = {**self._own, **{name: min(step, self._own.get(name, step)) for name in names}}


@dataclass(frozen=True)
class ReplicaCheck:
    """The check of one save, once its pieces are written: replicas on several ranks have equal content."""

    replicas: Replicas
    topic: Topic
    partition: Partition
    captured: Captured
    snapshot: staging.Snapshot
    kept: Mapping[str, torch.Tensor]
    exchanged: _Exchanged
    """what this rank knew about the others when the save was planned"""
    structure: str

    def approve(self, pieces: Sequence[Piece]) -> Files:
        """As `run.save.Check`. The further files have tensors that this rank holds differently from their writer.

        Raises ReplicaDiffers where trained tensors differ, StepDiffers where the partition is stale; on all ranks.
        """
        digests = {piece.key: piece.digest for piece in pieces} | self.snapshot.replica_digests
        sums = {_group_key(group): _sums(keys, digests) for group, keys in self.partition.shared.items() if keys}
        mine = {"structure": self.structure, "holders": self.exchanged.digest, "sums": sums}
        verdict = self.topic.agree(mine, partial(compare, self.exchanged.structures))
        if verdict == AGAIN:
            # guard: changed-structure-exchanged
            self.replicas.exchange_again(self.topic, self.captured, self.structure)
            raise StepDiffers(
                "the states of the ranks no longer have the structure that the ranks agreed on",
                safe="This save was dropped; every committed generation is untouched.",
                todo="Nothing: the next save uses the structure that the states have now.",
            )
        if verdict == SAME:
            return ()
        held = {key: digests[key] for keys in self.partition.shared.values() for key in keys}
        found, own_from = self.topic.agree({"held": held, "from": self.replicas.own_from()}, _differing)
        differing = dict(found)
        self._require_untrained(differing)
        items = {item.tensor.key: item for group in self.partition.witnessed.values() for item in group}
        own = {items[key].name for key in differing if key in items}
        own |= {item.name for item in self.partition.mine if item.tensor.key in differing}
        if own_from is not None:
            self.replicas.note_own(own, own_from)  # guard: differing-state-own-from-then-on
        # guard: differing-state-own-at-once
        return list(self._own_files([items[key] for key in sorted(differing) if key in items], pieces))

    def _require_untrained(self, differing: Mapping[str, str]) -> None:
        """Raise ReplicaDiffers, on all ranks, if an optimizer of any rank trains one of these tensors."""
        items = [self.partition.mine, *self.partition.witnessed.values()]
        origins = {item.tensor.key: self.captured.origins[item.name] for group in items for item in group}
        trained = sorted(key for key in differing if origins.get(key, Origin.OTHER) is not Origin.OTHER)
        refused = self.topic.agree(trained, lambda posts: sorted({key for one in posts for key in one}))
        if refused:  # guard: differing-weights-refused
            shown = shortened([f"{key} ({differing[key]})" for key in refused], 5)
            raise ReplicaDiffers(
                f"ranks hold different content of tensors that should be equal: {shown}",
                safe="This save was dropped; every committed generation is untouched.",
                todo="A rank has diverged: find out which, and restore() on all ranks.",
            )

    def _own_files(self, own: Sequence[Item], pieces: Sequence[Piece]) -> Iterator[tuple[Image, Iterator[Chunk]]]:
        """Tensor files with this rank's own content of `own`. `pieces`: what this rank has written in this save.

        The numbers in the names of the new files follow those of the files with `pieces`.
        """
        if not own:
            return
        first = len({piece.extent.blob for piece in pieces}) or 1
        tensors = [item.tensor._replace(own=True) for item in own]
        files = layout.images(tensors, self.replicas.rank, first=first)
        content = {item.tensor.key: self.kept[item.tensor.key] for item in own}
        for image in files:
            arena = Arena(round_up(image.length, CHUNK_BYTES), min(CHUNK_BYTES, round_up(image.length)))
            yield image, staging.copy_all([image], content, arena).fill()


def _group_key(group: Sequence[int]) -> str:
    """A short key for a group of ranks, followed by their number."""
    return f"{hashlib.sha256(repr(group).encode()).hexdigest()[:32]} {len(group)}"


def _sums(keys: Sequence[str], digests: Mapping[str, str]) -> tuple[str, str]:
    """A digest of how a group has partitioned what it holds, and one of its content."""
    names, content = hashlib.sha256(), hashlib.sha256()
    for key in keys:
        names.update(f"{key}\n".encode())
        content.update(f"{digests[key]}\n".encode())
    return names.hexdigest(), content.hexdigest()


# ---- decisions of the coordinator ----------------------------------------------------------------------------

SAME, DIFFERING, AGAIN = "same", "differing", "again"
PLANNED_STEPS, OWN_AFTER_FLIGHTS = 3, 3
"""Once so many saves were planned, the ranks know how far saves are apart. So many times the saves in flight after the
newest of them, they plan with a difference between them: until then each save finds it anew."""


def _in_all(unmatched: Sequence[Sequence[Sequence[str]]]) -> list[tuple[str, str]]:
    """The patterns that match nothing on any rank, each with the argument that it was given in."""
    first, *others = [[(argument, pattern) for argument, pattern in one] for one in unmatched]
    return [one for one in first if all(one in other for other in others)]  # guard: pattern-matches-some-rank


def _representatives(structures: Sequence[str]) -> list[int]:
    """The first rank of each structure, which posts its names for all ranks of that structure."""
    return sorted({structure: rank for rank, structure in reversed(list(enumerate(structures)))}.values())


def _merged_holders(structures: Sequence[str], lists: Sequence[list[list[Any]] | None]) -> dict[str, Any]:
    """Which ranks hold each name. `lists`: of each representative its `structure_list`, of every other rank None.

    Returns the distinct values of `_Exchanged.holders` as "holders", and as "names" the index of its value for each
    name. Raises StepDiffers where a name stands for different tensors.
    """
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, dict[tuple[int, ...], None]] = {}
    for rank, tensors in enumerate(lists):
        alike = [(other,) for other, one in enumerate(structures) if one == structures[rank]] if tensors else []
        for name, what, mesh, _ in tensors or ():
            owner, before = first.setdefault(name, (rank, what))
            if before != what:  # guard: name-means-one-thing
                raise StepDiffers(
                    f"{name} is {what} on rank {rank}, and {before} on rank {owner}",
                    safe="Nothing was saved.",
                    todo="Give different tensors different names: state={'stage0': ...} on one rank, 'stage1' on the "
                    "other.",
                )
            found.setdefault(name, {}).update(dict.fromkeys([tuple(mesh)] if mesh else alike))
    holders: dict[tuple[tuple[int, ...], ...], int] = {}
    names = {name: holders.setdefault(tuple(sorted(one)), len(holders)) for name, one in found.items()}
    return {"holders": list(holders), "names": names}


def compare(exchanged: Sequence[str], posts: list[dict[str, Any]]) -> str:
    """Whether all replicas are the SAME or DIFFERING; AGAIN where structures must be exchanged first.

    `exchanged`: the structure of each rank when structures were exchanged last; empty if they were all the same.
    """
    structures = [one["structure"] for one in posts]
    unchanged = structures == list(exchanged) if exchanged else len(set(structures)) == 1
    if not unchanged:  # guard: stale-plan-refused
        return AGAIN
    # Some ranks are in an exchange instead, or the last exchange ended differently for them.
    # guard: equal-knowledge-required
    if len({one.get("holders") for one in posts}) > 1:
        return AGAIN
    partitions: dict[str, set[str]] = {}
    contents: dict[str, set[str]] = {}
    count: Counter[str] = Counter()
    for one in posts:
        for group, (names, content) in one["sums"].items():
            partitions.setdefault(group, set()).add(names)
            contents.setdefault(group, set()).add(content)
            count[group] += 1
    if any(count[group] != int(group.partition(" ")[2]) or len(found) > 1 for group, found in partitions.items()):
        return AGAIN
    return SAME if all(len(found) == 1 for found in contents.values()) else DIFFERING  # guard: replicas-compared


def _differing(posts: list[dict[str, Any]]) -> tuple[list[list[Any]], int | None]:
    """The keys whose digests differ between ranks, each with a text that says which ranks differ; and the step from
    which on saves are planned with that (`Replicas.own_from`; None: not yet)."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, one in enumerate(posts):
        for key, digest in one["held"].items():
            found.setdefault(key, {}).setdefault(digest, []).append(rank)
    steps = [one["from"] for one in posts]
    own_from = None if None in steps else max(steps)  # guard: differing-state-own-later
    return [[key, _sides(list(by.values()))] for key, by in found.items() if len(by) > 1], own_from


def _sides(ranks: list[list[int]]) -> str:
    """Lists of ranks with equal content, as text: "rank 0, 2 against 1, 3"."""
    sides = [", ".join(map(str, one[:4])) + (", ..." if len(one) > 4 else "") for one in sorted(ranks)]
    return "rank " + " against ".join(sides[:4]) + (" and others" if len(sides) > 4 else "")
