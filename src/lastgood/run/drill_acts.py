"""The acts of a drill: each damages a scratch copy, lets it come back, and compares it with the original.

What brings it back is the code that brings a run back: the settling of an opening (settle.py), the candidates of a
restore (candidates.py), mending (mend.py), copies (copying.py) and the agent.

Invariants
  1. Nothing is written outside of the scratch places (drill_scratch.py).
  2. Each act begins with whole copies of the original in all scratch places, and nothing else there.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, cast

from ..engine.arena import Arena
from ..errors import Damaged, LastgoodError, NoSpace, TierDown
from ..format import commit, layout
from ..io import files, memory_files, os_errors
from ..io.checksum import ALGORITHMS
from ..io.reed_solomon import Code
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS
from ..policy import restore
from ..policy.retention import KEEP
from ..ports import Mendable, Tier
from ..records import Finding, Generation, GenerationId
from ..storage.directory import Disk
from ..units import size
from . import access, agent_link, agent_messages, agent_start, copying, drill_victim
from .agent_link import AgentLink
from .agent_messages import AgentSpec, CopyTo
from .candidates import Candidates, ReadOnlyRun
from .drill_scratch import ScratchPlace, ScratchPlaces
from .kept import kept
from .reader import RunReader, read_all
from .verify import protect_part
from .writer import RunWriter

RECORDS_BYTES = 16 << 20
"""The room that is reckoned for the records of the copies in one place."""
AGENT_SECONDS = 600.0
"""How long an agent may take to copy the scratch run."""
POLL_MILLISECONDS = 1
_SAFE = "It was a copy; the run itself was only read."

Damage = Literal["byte", "cut", "missing"]
_DAMAGES: dict[Damage, str] = {
    "byte": "a byte of a file differs",
    "cut": "a file is cut in half",
    "missing": "a file is missing",
}


@dataclass(frozen=True, kw_only=True)
class Act:
    """One act, after it was played. `good`: None if it was not played; `why` says the reason, or what went wrong.

    `way_back`: what brought the copy back. `seconds`: from the damage to the end of the comparison. `network_bytes`: of
    files, which came from other nodes for it; None: the act needs no other node.
    """

    what: str
    way_back: str = ""
    good: bool | None = None
    seconds: float | None = None
    why: str = ""
    network_bytes: int | None = None


class Original(NamedTuple):
    """The generation that is copied, where it was found good, and the digest of the bytes of its files.

    `code`: its parity; None: it has none, or no library for it is installed.
    """

    tier: Tier
    generation: Generation
    digest: str
    code: Code | None

    @property
    def room_bytes(self) -> int:
        """The room that the copies need in one place: the original, and another save of the same tensors."""
        return 2 * self.generation.bytes + RECORDS_BYTES


class Reading:
    """The memory and threads of all readings and copies of a drill."""

    def __init__(self, workers: ThreadPoolExecutor) -> None:
        self.arena, self.workers = Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES), workers

    def read(self, tier: Tier, generation: Generation, of: Sequence[int] | None = None) -> tuple[list[Finding], str]:
        """Read a generation past the page cache. Returns the findings, and the digest of all its tensor files.

        `of`: the ranks that wrote the files that are read; None: all.
        """
        hasher = ALGORITHMS["xxh3_128"]()

        def add(data: memoryview) -> None:
            hasher.update(data)

        findings = read_all(tier, generation, self.arena, self.workers, also=add, of=of)
        return findings, hasher.hexdigest()

    def read_ranks(self, tier: Tier, generation: Generation, ranks: list[int]) -> list[Finding]:
        """Read the files that these ranks wrote."""
        return read_all(tier, generation, self.arena, self.workers, of=ranks)


class _OpenedRun(ReadOnlyRun):
    """A scratch place as a restore uses it: what is damaged is mended, or marked."""

    def __init__(self, writer: RunWriter, reading: Reading) -> None:
        super().__init__(writer.tier, writer.survey, reading.workers)
        self._writer, self._arena = writer, reading.arena

    def mark(self, generation: Generation, findings: list[Finding]) -> None:
        self._writer.conclude(generation, findings)

    def mend(self, generation: Generation) -> bool:
        return self._writer.mender.try_to_mend(generation.id, self._arena)


class _Restored(NamedTuple):
    """The result of a restore. `mended`: files that were rebuilt. `over`: steps that were stepped over."""

    at: GenerationId
    mended: list[str]
    over: list[int]


class Stage:
    """The scratch places of a drill, and the acts. `no_front`: why there is no copy in the front; empty if there is."""

    def __init__(self, original: Original, scratch: ScratchPlaces, reading: Reading, no_front: str) -> None:
        self._original, self._reading, self._no_front = original, reading, no_front
        self._disk, self._front = scratch.disk, scratch.front
        self._places = [self._disk] if no_front else [self._disk, self._front]
        self._digests: dict[str, str] = {}
        """of the tensors of the original"""
        self._no_file = ""
        """why nothing that needs a tensor file can be played; empty if there is one"""
        self._struck = 0.0
        """when the present act did its damage, by the monotonic clock"""

    def make_whole(self, source: Tier | None = None) -> None:
        """Remove what is in the scratch places, and copy the original into each. They are empty after Damaged.

        `source`: where the original is read; None: where it was first.
        """
        self.remove()
        try:
            for place in self._places:
                self._copy(source or self._original.tier, place)
        except Damaged:
            self.remove()
            raise
        manifests = commit.read_manifests(access.for_reading(self._disk.url), self._original.generation)
        self._digests = drill_victim.digests(manifests)
        self._no_file = "" if any(one.blobs for one in manifests) else "this generation has no tensor file"

    def remove(self) -> None:
        """Remove what is in the scratch places."""
        for place in self._places:
            for folder in (place.root, place.away):
                shutil.rmtree(folder, ignore_errors=True)

    def play(self) -> Iterator[Act]:
        """Play all acts. One that fails does not end the others. Raises nothing but bugs and interruptions."""
        failed = False
        for what, play, not_played in self._acts():
            if not_played := not_played or self._short() or (self._renewed() if failed else ""):
                yield Act(what=what, why=not_played)
                continue
            self._struck = time.monotonic()
            good, text = _outcome(play)
            failed = not good
            seconds = time.monotonic() - self._struck
            if good is None:
                yield Act(what=what, why=text)
            else:
                way_back, why = (text, "") if good else ("", text)
                yield Act(what=what, way_back=way_back, good=good, seconds=seconds, why=why)

    def _renewed(self) -> str:
        """Make whole copies again. Returns why that is not possible, or ""."""

        def renew() -> str:
            with kept(self._original.tier, self._original.generation.id) as source:
                self.make_whole(source)
            return ""

        good, why = _outcome(renew)
        return "" if good else f"the copies could not be made again: {why}"

    def _short(self) -> str:
        """Why no act can be played now: there is no room for its save and for the next one of the job. Or ""."""
        needed = self._original.room_bytes
        for place in self._places:
            root = os.path.dirname(place.root)
            try:
                free = memory_files.free_bytes(root) if place.in_memory else files.free_bytes(root)
            except OSError as error:
                return f"{root}: {error.strerror}"
            if free < needed:  # guard: act-leaves-room-for-the-job
                return f"an act and the next save of the job need {size(needed)} {place.where}, free are {size(free)}"
        return ""

    def _acts(self) -> Iterator[tuple[str, Callable[[], str], str]]:
        """What each act does, the act, and why it is not played ("": it is)."""
        disk, front, lacks, no_file = self._disk, self._front, self._no_front, self._no_file
        yield f"killed within a save to {disk.name}", partial(self._kill, disk), no_file
        yield f"killed within a save to {front.name}", partial(self._kill, front), lacks or no_file
        for damage, what in _DAMAGES.items():
            yield f"{what}, {disk.where}", partial(self._damage, damage, disk), no_file
        yield f"{_DAMAGES['byte']}, {front.where}", partial(self._damage, "byte", front), lacks or no_file
        yield f"{disk.subject} is gone", partial(self._lose, disk, front), lacks
        yield f"{front.subject} is gone", partial(self._lose, front, disk), lacks
        yield "the agent is killed while it copies", self._kill_agent, lacks or no_file

    # ---- acts ----------------------------------------------------------------------------------------------

    def _kill(self, place: ScratchPlace) -> str:
        with drill_victim.halfway(place.url) as process:
            begun = self._uncommitted(place)
            require(bool(begun), "the process had written nothing when it was killed")
            process.kill()
            process.wait()
            self._struck = time.monotonic()
        found = self._restored([place])
        require(found.at == self._original.generation.id, f"step {found.at.step} was loaded")
        require(not self._uncommitted(place), f"{', '.join(begun)} was not removed")
        return f"the next opening removed half of step {found.at.step + 1}; step {found.at.step} loaded"

    def _damage(self, damage: Damage, place: ScratchPlace) -> str:
        others = [one for one in self._places if one is not place]
        if self._original.code is not None and damage == "byte" and place is self._disk:
            others, by = [], "parity"
        else:
            by = others[0].name if others else ""
        at = self._original.generation.id if by else self._saved(place)
        self._strike(damage, place, at)
        found = self._restored([place, *others])
        if by:
            require(found.at == at and bool(found.mended), f"step {found.at.step} was loaded, and nothing was mended")
            return f"found, and mended from {by}; step {at.step} loaded"
        require(found.over == [at.step], f"step {at.step} was damaged, and stepped over were {found.over}")
        with access.for_writing(place.url, "atomic_dirsync") as tier:
            commit.retire(tier, at)
        return f"found, and stepped over: step {found.at.step} loaded, the one before"

    def _lose(self, place: ScratchPlace, other: ScratchPlace) -> str:
        os.rename(place.root, place.away)
        self._struck = time.monotonic()
        found = self._restored([place, other])
        shutil.rmtree(place.away)
        self._copy(access.for_reading(other.url), place)
        self._restored([place])
        return f"step {found.at.step} loaded from {other.name}, and copied back"

    def _kill_agent(self) -> str:
        at = self._saved(self._front)
        front = access.for_reading(self._front.url)
        generation = commit.read_generation(front, at, None)
        _, digest = self._reading.read(front, generation)
        self._copy_until_killed(at)
        finished = layout.COMMIT in _names(self._disk, at)
        self._end_of_agent()
        disk = access.for_reading(self._disk.url)
        copy = commit.read_generation(disk, at, None)
        findings, copied = self._reading.read(disk, copy)
        require(not findings and (copy.root, copied) == (generation.root, digest), f"the copy of {at} differs")
        way_back = f"another agent {'found' if finished else 'finished'} the copy of step {at.step}"
        if not self._front.in_memory:
            return way_back
        require(not self._front.exists, "the memory was not removed")
        return f"{way_back}, and removed the memory"

    # ---- parts of acts -------------------------------------------------------------------------------------

    def _copy(self, source: Tier, place: ScratchPlace) -> None:
        """Copy the original into a scratch place, with parity on the disk, and read it there again."""
        generation, code = self._original.generation, self._original.code
        how = copying.Copying(self._reading.arena, self._reading.workers, plain=True)
        with access.for_writing(place.url, "atomic_dirsync") as tier:
            copying.adopt_run(source, tier, commit.survey(source))
            copying.complete(cast(Mendable, tier), [source], generation, how)
            if code is not None and place is self._disk:
                for seal in generation.commit.seals:
                    protect_part(tier, generation, seal.rank, code, how)

    def _restored(self, places: Sequence[ScratchPlace]) -> _Restored:
        """Restore from the first of these places that is there, and compare. The others mend what is damaged in it."""
        front, *others = [one for one in places if one.exists]
        original = self._original
        with access.for_writing(front.url, "atomic_dirsync") as tier:
            writer = RunWriter(tier, self._reading.workers)
            writer.mender.sources = [access.for_reading(one.url) for one in others]
            candidates = Candidates(writer.survey, None, _OpenedRun(writer, self._reading))
            generation, digest = self._load(tier, candidates)
            over = [step for step, _ in candidates.found(generation).stepped_over]
            mended = writer.mender.mended.get(generation.id, [])
        same = (generation.root, digest) == (original.generation.root, original.digest)
        require(same, f"step {generation.step} was loaded, and is not the original")  # guard: drill-compares-digests
        return _Restored(generation.id, mended, over)

    def _load(self, tier: Tier, candidates: Candidates) -> tuple[Generation, str]:
        for generation in candidates:
            findings, digest = self._reading.read(tier, generation)
            if not findings:
                return generation, digest
            candidates.failed(Damaged(restore.summary(findings)))
        raise Damaged(f"{tier.place} holds nothing any more", safe=_SAFE)

    def _saved(self, place: ScratchPlace) -> GenerationId:
        """Let another process save the tensors of the original as its next step."""
        drill_victim.saved(place.url)
        tier = access.for_reading(place.url)
        newest = RunReader(tier).generation()
        require(newest.step == self._original.generation.step + 1, f"the save is not there, but step {newest.step}")
        digests = drill_victim.digests(commit.read_manifests(tier, newest), of_copy=True)
        require(digests == self._digests, f"the tensors of {newest.id} are not those that were saved")
        return newest.id

    def _strike(self, damage: Damage, place: ScratchPlace, at: GenerationId) -> None:
        """Damage the longest tensor file of a generation."""
        tier = access.for_reading(place.url)
        manifests = commit.read_manifests(tier, commit.read_generation(tier, at, None))
        blob = max((blob for one in manifests for blob in one.blobs), key=lambda one: one.length)
        path = os.path.join(place.root, layout.folder(at), blob.name)
        if damage == "missing":
            os.unlink(path)
        else:
            with open(path, "r+b") as file:
                if damage == "cut":
                    file.truncate(blob.length // 2)
                else:
                    file.seek(blob.length // 2)
                    byte = file.read(1)[0]
                    file.seek(blob.length // 2)
                    file.write(bytes([byte ^ 1]))
                file.flush()
                os.fsync(file.fileno())
        self._struck = time.monotonic()

    def _uncommitted(self, place: ScratchPlace) -> list[str]:
        """The folders of generations without a COMMIT."""
        folders = sorted(os.listdir(os.path.join(place.root, "gen")))
        return [one for one in folders if layout.COMMIT not in os.listdir(os.path.join(place.root, "gen", one))]

    def _copy_until_killed(self, at: GenerationId) -> None:
        """Start the agent of the scratch front, and kill it once it has begun to copy a generation to the disk."""
        link = AgentLink(self._front.url)
        spec = AgentSpec(format=layout.FORMAT, places=[CopyTo(url=self._disk.url, keep=KEEP)], order=0, spill=None)
        try:
            with access.for_writing(self._front.url, "atomic_dirsync") as tier:
                link.start(cast(Disk, tier), spec)
            with self._connected() as agent:
                link.close()  # as if the training process had ended: the agent begins to copy
                until, ended = time.monotonic() + AGENT_SECONDS, select.poll()
                ended.register(agent, select.POLLIN)
                while not _names(self._disk, at) and not ended.poll(POLL_MILLISECONDS):
                    if time.monotonic() > until:
                        raise TierDown(f"the agent has copied nothing within {AGENT_SECONDS:.0f} s", safe=_SAFE)
                agent_link.kill(agent)
                self._struck = time.monotonic()
        finally:
            link.close()

    def _end_of_agent(self) -> None:
        """Start another agent, and let it copy everything, remove what is in memory, and end."""
        if problem := agent_start.started(self._front.url):
            raise TierDown(f"another agent could not be started: {problem}", safe=_SAFE)
        with self._connected() as agent:
            agent.settimeout(AGENT_SECONDS)
            try:
                error = agent_link.asked(agent, agent_messages.Request(protocol=agent_link.PROTOCOL, call="end")).error
            except (OSError, ValueError) as failure:
                error = f"{type(failure).__name__}: {failure}"
        if error:
            full = any(one in error for one in (NoSpace.__name__, os_errors.NO_SPACE))
            kind = NoSpace if full else Damaged
            raise kind(f"another agent did not finish the copy: {error}", safe=_SAFE)

    def _connected(self) -> contextlib.closing[socket.socket]:
        try:
            return contextlib.closing(agent_link.connected(self._front.root))
        except OSError as error:
            raise TierDown(f"the agent of {self._front.root} cannot be reached: {error}", safe=_SAFE) from error


def _outcome(play: Callable[[], str]) -> tuple[bool | None, str]:
    """True and what a call returns; False and why it failed; None and why it was no trial: the disk is full."""
    try:
        return True, play()
    except NoSpace as error:
        return None, error.what  # guard: full-disk-is-no-failure
    except LastgoodError as error:
        return False, error.what or type(error).__name__
    except OSError as error:
        return None if error.errno in os_errors.USED_UP else False, f"{type(error).__name__}: {error}"


def _names(place: ScratchPlace, at: GenerationId) -> list[str]:
    """The files of a generation; none if its folder is not there."""
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(os.path.join(place.root, layout.folder(at)))
    return []


def require(holds: bool, otherwise: str) -> None:
    """Raise Damaged with the text `otherwise`, unless something holds."""
    if not holds:
        raise Damaged(otherwise, safe=_SAFE)
