"""The acts of a drill on the other nodes of the job: copies there are lost, damaged and cut off, and what this node has
comes back from the others.

The agents of these nodes copy the files of one generation that they hold into folders of the drill (drill_copies.py).
What brings the files of this node back is the code that does so after a loss (rebuilding.py), over the wire between
agents. What came back is compared with a copy of this node's files, by the digest of all bytes.

Invariants
  1. No file of the run is written or removed, on any node. Each node is asked for room before it copies anything.
  2. Each act begins with whole copies on all nodes, but for its own damage.
  3. At the end, also after an error or Ctrl-C, the copies are removed on all nodes. What a killed drill leaves is
     removed by the agents (agent/drill_files.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, NamedTuple, cast

import msgspec

from ..engine.stripes import is_damage
from ..errors import LastgoodError, NoSpace, TierDown
from ..format import commit, layout, sealed, stripe_layout
from ..io.files import PosixFiles
from ..io.machine import machine
from ..io.memory_files import MemoryFiles
from ..ports import Tier
from ..records import Extent, Generation, StripeFile
from ..storage.directory import Disk
from ..units import size
from . import agent_link, drill_relay
from .drill_acts import Act, Reading, require
from .drill_copies import CopyPeers, Counted
from .drill_peers import LISTINGS, PeerRead
from .drill_relay import Relay
from .drill_scratch import ScratchPlace
from .peer_security import security
from .peers import RANK_FILE, STRIPE_FILE, PeerDisk, PeerNode, Peers
from .reader import RunReader
from .rebuilding import rebuild

HERE = "this node"
REMOVE_SECONDS = 10.0
"""How long a drill waits at its end for each node to remove its copies. The agent goes on to remove them."""
Kind = Literal["copies", "parity"]
Played = tuple[str, int]
"""what brought the files back, and the bytes of files that crossed the network for it"""


class _Scene(NamedTuple):
    """The generation that the acts play with. `ranks`: those whose files come back. `files`: name of a node -> what it
    copies, name -> length. `losses`: so many nodes may be lost at once, this one among them.

    `target`: the node that is damaged and cut off, and the byte of it that is read for sure; None: there is none.
    """

    generation: Generation
    ranks: list[int]
    files: dict[str, dict[str, int]]
    losses: int
    target: tuple[PeerNode, Extent] | None


class _Act(NamedTuple):
    what: str
    prepare: Callable[[], None]
    """makes the copies, and the damage in them; if it fails, the act is not played"""
    play: Callable[[], Played]
    lacks: str = ""
    """why it is not played, as far as that is known before"""


def play(folder: str, own: Tier, rows: Sequence[PeerRead], place: ScratchPlace, reading: Reading) -> list[Act]:
    """Play all acts with the nodes that the agent of `folder` knows.

    `own`: the tier of that folder. `rows`: what was read on these nodes before. `place`: of the files that come back.
    Raises nothing but bugs and interruptions.
    """
    try:
        known = agent_link.peers_of(folder)
    except (OSError, ValueError, LastgoodError):
        return []  # `rows` say so
    if known is None:
        return []
    secured, acts = security(known.key, known.certificates), list[Act]()
    with (
        contextlib.closing(Peers(known.job, secured, machine())) as real,
        contextlib.closing(CopyPeers(known.job, secured, machine(), real)) as copies,
        copies.kept(),
    ):
        kinds: list[tuple[Kind, list[PeerNode]]] = [("copies", known.copies), ("parity", known.parity)]
        for kind, nodes in kinds:
            unread = {row.node: row.why for row in rows if row.what == kind and not row.good}
            readable = [one for one in nodes if one.name not in unread] if kind == "copies" or not unread else []
            if nodes and not readable:
                lacks = "; ".join(f"node {name}: {why}" for name, why in unread.items())
                acts.append(Act(what=f"{kind}: this node is lost", why=lacks))
            elif nodes:
                acts += NodeStage(kind, readable, real, copies, own, place, reading).play()
    return acts


class NodeStage:
    """The copies on `nodes`, and the acts with them. `real`: the connections to the files themselves.

    `copies`: to the copies. `own`: the tier of this node, which is read only.
    """

    def __init__(
        self,
        kind: Kind,
        nodes: Sequence[PeerNode],
        real: Peers,
        copies: CopyPeers,
        own: Tier,
        place: ScratchPlace,
        reading: Reading,
    ) -> None:
        self._kind, self._nodes, self._real, self._copies, self._own = kind, nodes, real, copies, own
        self._root, self._reading = place.root, reading
        # In memory it compares the room again before each file: what the processes of the job need is left to them.
        self._files = MemoryFiles(place.root, buffered=False) if place.in_memory else PosixFiles()
        self._here = Disk(self._files, place.root)
        """a copy of this node's files"""
        self._commit = b""
        """the record COMMIT, which every node has"""
        self._digest = ""
        self._made = dict[str, bool]()
        """the nodes that have copies -> whether these are whole"""

    def play(self) -> Iterator[Act]:
        """Play all acts. One that fails does not end the others. Raises nothing but bugs and interruptions."""
        shutil.rmtree(self._root, ignore_errors=True)
        try:
            try:
                scene = self._prepared()
            except (LastgoodError, OSError) as error:
                yield Act(what=f"{self._kind}: this node is lost", why=_text(error))
                return
            for number in range(len(self._acts(scene))):
                scene, lacks = self._made_ready(number, scene)
                yield self._played(self._acts(scene)[number], scene, lacks)
        finally:
            with ThreadPoolExecutor(len(self._nodes), "lastgood-drill-remove") as workers:
                list(workers.map(self._remove, self._nodes))  # guard: drill-leaves-no-copies
            shutil.rmtree(self._root, ignore_errors=True)

    def _remove(self, node: PeerNode) -> None:
        with contextlib.suppress(LastgoodError):  # then its agent removes them
            self._copies.remove(node, REMOVE_SECONDS)

    def _made_ready(self, number: int, scene: _Scene) -> tuple[_Scene, str]:
        """Make the copies for the act of this number: of another generation where training has deleted this one.

        Returns the scene, and why the act cannot be played, or "".
        """
        why = ""
        for _ in range(LISTINGS):
            act = self._acts(scene)[number]
            if act.lacks:
                return scene, act.lacks
            try:
                act.prepare()
                return scene, ""
            except (LastgoodError, OSError) as error:
                why = _text(error)
            try:
                if self._is_there(scene):
                    break
                scene = self._prepared()  # guard: drill-follows-training
            except (LastgoodError, OSError) as error:
                return scene, _text(error)
        return scene, why

    def _is_there(self, scene: _Scene) -> bool:
        """Whether all nodes have the generation of a scene still. Raises as reading."""
        folder = layout.folder(scene.generation.id)
        return layout.COMMIT in self._own.list(folder) and all(
            scene.files[node.name].keys() <= self._real.list(node, folder).keys() for node in self._nodes
        )

    def _played(self, act: _Act, scene: _Scene, lacks: str) -> Act:
        if lacks:
            return Act(what=act.what, why=lacks)
        begun = time.monotonic()
        try:
            way_back, count = act.play()
        except NoSpace as error:
            return Act(what=act.what, why=error.what)  # guard: short-memory-is-no-failure
        except (LastgoodError, OSError) as error:
            if lacks := self._lacks(scene):
                return Act(what=act.what, why=lacks)
            return Act(what=act.what, good=False, seconds=time.monotonic() - begun, why=_text(error))
        seconds = time.monotonic() - begun
        return Act(what=act.what, way_back=way_back, good=True, seconds=seconds, network_bytes=count)

    def _lacks(self, scene: _Scene) -> str:
        """Why an act is no proof: a node went down meanwhile, or its copies are gone, which no act removed. Or ""."""
        for node in (one for one in self._nodes if one.name in self._made):
            try:
                if not self._copies.list(node, layout.folder(scene.generation.id)):
                    del self._made[node.name]
                    return f"node {node.name} has removed the copies, as when its job is opened or its memory is short"
            except LastgoodError as error:
                del self._made[node.name]
                return f"node {node.name} cannot be read any more: {error.what}"
        return ""

    # ---- before the acts -----------------------------------------------------------------------------------

    def _prepared(self) -> _Scene:
        """Choose the newest generation that all nodes have, and copy this node's files. What training deletes meanwhile
        counts for nothing: the next one is chosen then. Raises TierDown if there is none, and what copying raises."""
        for generation in (one for _ in range(LISTINGS) for one in RunReader(self._own).lineage()):
            self._made.clear()  # guard: next-scene-gets-own-copies
            try:
                if (scene := self._scene(generation)) is None:
                    continue
                self._commit = sealed.record_bytes([self._own], generation, None)
                self._here = self._empty("here", generation)
                rebuild(self._here, [self._own], generation, scene.ranks)
                findings, self._digest = self._reading.read(self._here, generation, scene.ranks)
                if findings:
                    continue
                self._make(scene, self._nodes)
                return scene
            except LastgoodError:
                if layout.COMMIT in self._own.list(layout.folder(generation.id)):
                    raise
        raise TierDown("no generation is on all of these nodes now, and is good", safe="Nothing was copied.")

    def _scene(self, generation: Generation) -> _Scene | None:
        """What the nodes hold of a generation; None if that does not bring the files of this node back."""
        folder = layout.folder(generation.id)
        here = self._own.list(folder)
        there = {node.name: _files(self._real.list(node, folder), folder) for node in self._nodes}
        seals = [one for one in generation.commit.seals if one.manifest in here]
        if self._kind == "parity":
            ranks = [one.rank for one in seals]
            return self._parity_scene(generation, ranks, there) if ranks else None
        seals = [one for one in seals if all(one.manifest in files for files in there.values())]
        blobs = [blob for one in seals for blob in commit.read_manifest(self._own, generation, one.rank).blobs]
        if not blobs:
            return None
        names = {one.manifest for one in seals} | {one.name for one in blobs}
        files = {node: {name: size for name, size in of.items() if name in names} for node, of in there.items()}
        longest = max(blobs, key=lambda one: one.length)
        byte = Extent(blob=f"{folder}/{longest.name}", offset=longest.length // 2, length=1)
        target = (self._nodes[0], byte) if longest.length else None
        return _Scene(generation, [one.rank for one in seals], files, len(self._nodes), target)

    def _parity_scene(
        self, generation: Generation, ranks: list[int], files: dict[str, dict[str, int]]
    ) -> _Scene | None:
        """With parity: a stripe of this node's files says how many nodes may be lost, and which cells are read."""
        folder, mine, losses = layout.folder(generation.id), {layout.blob_name(rank) for rank in ranks}, 0
        for node in self._nodes:
            for name in filter(stripe_layout.is_record, files[node.name]):
                tier = cast(Tier, PeerDisk(self._real, node))
                data = sealed.read(tier, f"{folder}/{name}", files[node.name][name])
                record = layout.decode(data, StripeFile, name)
                stripe_layout.validate(record, name)
                stripes = [[one for one in stripe.cells if one is not None] for stripe in record.stripes]
                for cells in (cells for cells in stripes if mine & {one.blob for one in cells}):
                    losses = record.parity
                    for cell in (one for one in cells if one.blob not in mine):
                        for holder in (one for one in self._nodes if cell.blob in files[one.name]):
                            at = cell.offset + cell.length // 2
                            target = holder, Extent(blob=f"{folder}/{cell.blob}", offset=at, length=1)
                            return _Scene(generation, ranks, files, losses, target)
        return _Scene(generation, ranks, files, losses, None) if losses else None

    # ---- acts ----------------------------------------------------------------------------------------------

    def _acts(self, scene: _Scene) -> list[_Act]:
        others, lacks = self._nodes[: scene.losses - 1], ""
        lost = _named(others, "this node and ") if others else "this node"
        if scene.target is None:
            lacks = "no other node has a byte that is needed"
        elif self._kind == "parity" and scene.losses < 2:
            lacks = "this parity makes one loss good, and this node is it"
        node = scene.target[0] if scene.target else self._nodes[0]
        make = partial(self._make, scene, self._nodes)
        return [
            _Act(
                f"{self._kind}: {lost} {'are' if others else 'is'} lost",
                make,
                partial(self._lose, scene, others),
            ),
            _Act(
                f"{self._kind}: a byte on node {node.name} differs",
                partial(make, flips=True),
                partial(self._damage, scene, node),
                lacks,
            ),
            _Act(
                f"{self._kind}: node {node.name} is cut off while it is read",
                make,
                partial(self._cut_off, scene, node),
                lacks,
            ),
        ]

    def _lose(self, scene: _Scene, lost: Sequence[PeerNode]) -> Played:
        for node in lost:
            self._made.pop(node.name, None)
            self._copies.remove(node)
        sources = [self._source(node) for node in self._nodes]
        self._bring_back(scene, sources)
        return self._described(scene, "", sources)

    def _damage(self, scene: _Scene, node: PeerNode) -> Played:
        assert scene.target is not None
        damaged, read = scene.target[1], list[Extent]()
        first, others, here = self._sources(node, self._source(node, read.append))
        passed_over = self._bring_back(scene, [first, *others, *here])
        if self._kind == "copies":
            there = [one for one in read if one.blob == damaged.blob]
            covered = any(one.offset <= damaged.offset < one.offset + one.length for one in there)
            require(covered and first.bytes > 0, f"the damaged part was not read from node {node.name}")
            require(any(one.bytes for one in (*others, *here)), "the damage was not found")
        else:
            found = any(place == first.place and is_damage(error) for (place, _), error in passed_over.items())
            require(found, "the damage was not found")
        return self._described(scene, "found: ", [first, *others, *here])

    def _cut_off(self, scene: _Scene, node: PeerNode) -> Played:
        assert scene.target is not None
        folder = layout.folder(scene.generation.id)
        middle = scene.target[1] if self._kind == "copies" else None
        with contextlib.closing(Relay((node.host, node.port))) as relay:

            def cut_in_the_middle(extent: Extent) -> None:
                if middle is None or (extent.blob == middle.blob and extent.offset + extent.length > middle.offset):
                    relay.cut_after(extent.length // 2)

            through = msgspec.structs.replace(node, host=drill_relay.HOST, port=relay.port)
            first, others, here = self._sources(node, self._source(through, cut_in_the_middle))
            self._bring_back(scene, [first, *others, *here])
            require(relay.is_cut, f"node {node.name} was not read in {folder}")
            return self._described(scene, "cut off: ", [first, *others, *here], relay.passed - first.bytes)

    # ---- parts of acts -------------------------------------------------------------------------------------

    def _make(self, scene: _Scene, nodes: Sequence[PeerNode], flips: bool = False) -> None:
        """Let these nodes make the copies that are missing or damaged. `flips`: a byte differs in those of one node."""
        damaged, byte = scene.target if flips and scene.target else (None, None)
        for node in nodes:
            if not self._made.get(node.name) or node is damaged:
                self._made.pop(node.name, None)
                flipped = byte if node is damaged else None
                self._copies.make(node, layout.folder(scene.generation.id), scene.files[node.name], flipped)
                self._made[node.name] = node is not damaged

    def _source(self, node: PeerNode, before: Callable[[Extent], None] = lambda extent: None) -> Counted:
        return Counted(cast(Tier, PeerDisk(self._copies, node)), f"node {node.name}", before)

    def _sources(self, node: PeerNode, first: Counted) -> tuple[Counted, list[Counted], list[Counted]]:
        """`first`, which reads the damaged node, the other nodes, and this one: with parity it is lost too."""
        others = [self._source(one) for one in self._nodes if one is not node]
        return first, others, [Counted(self._here, HERE)] if self._kind == "copies" else []

    def _bring_back(self, scene: _Scene, sources: Sequence[Counted]) -> dict[tuple[str, str], LastgoodError]:
        """Make this node's files whole in an empty place, and compare them. Returns as `rebuild`."""
        back = self._empty("back", scene.generation)
        passed_over = rebuild(back, [one.tier for one in sources], scene.generation, scene.ranks)
        findings, digest = self._reading.read(back, scene.generation, scene.ranks)
        # guard: drill-compares-digests-of-nodes
        require(not findings and digest == self._digest, "what came back is not what this node had")
        return passed_over

    def _empty(self, name: str, generation: Generation) -> Disk:
        """A folder as a node has it that was replaced: with the COMMIT of the generation, and none of its files."""
        root = os.path.join(self._root, name)
        shutil.rmtree(root, ignore_errors=True)
        os.makedirs(os.path.join(root, "gen"), 0o700)
        disk = Disk(self._files, root)
        disk.put_new(f"{layout.folder(generation.id)}/{layout.COMMIT}", self._commit)
        return disk

    def _described(self, scene: _Scene, found: str, sources: Sequence[Counted], more_bytes: int = 0) -> Played:
        """In words: which of these have given the files. `more_bytes`: what crossed the network and was of no use."""
        names = ", ".join(one.place for one in sources if one.bytes)
        done = "computed from" if self._kind == "parity" else "came back from"
        count = more_bytes + sum(one.bytes for one in sources if one.place != HERE)
        return f"{found}step {scene.generation.step} {done} {names}; {size(count)} over the network", count


def _files(listing: dict[str, int | None], folder: str) -> dict[str, int]:
    """The files that a node copies, records last, as they count with their records only."""
    found = {
        name: length
        for name, length in listing.items()
        if length is not None and (RANK_FILE.fullmatch(f"{folder}/{name}") or STRIPE_FILE.fullmatch(f"{folder}/{name}"))
    }
    return dict(sorted(found.items(), key=lambda one: one[0].endswith(".json")))


def _named(nodes: Sequence[PeerNode], before: str = "") -> str:
    return f"{before}node{'s' * (len(nodes) > 1)} {', '.join(one.name for one in nodes)}"


def _text(error: LastgoodError | OSError) -> str:
    return error.what if isinstance(error, LastgoodError) else f"{type(error).__name__}: {error}"
