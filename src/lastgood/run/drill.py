"""A drill: the newest good generation of a run is copied to scratch places, which are damaged and must come back.

The run itself is only read. What brings the copies back is the code that brings a run back: the settling of an opening
(settle.py), the candidates of a restore (candidates.py), mending (mend.py), copies (copying.py) and the agent. What was
brought back is compared with the original by the digest of all bytes of its files, and by its commit.

The invariants are those of the acts (drill_acts.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..engine import parity
from ..errors import Cancelled, NoSpace, NothingGood, Refused
from ..format import commit
from ..io import memory_limits, os_errors
from ..io.files import free_bytes
from ..io.reed_solomon import Code
from ..limits import DRILL_SHARE, WORKERS
from ..policy import restore
from ..ports import Tier
from ..records import Generation
from ..units import size
from . import access, agent_link, copying, drill_nodes, drill_scratch, memory_place, paths, place_list, read_places
from .drill_acts import Act, Original, Reading, Stage
from .drill_peers import PeerRead, read_peers
from .drill_scratch import ScratchPlace
from .kept import kept, require_not_deleted
from .paths import Place

ATTEMPTS = 3
"""Training may delete a generation while it is copied: the next one is taken then, so many times in all."""
NO_FRONT = "the run has no tier in the memory of this machine, and no disk of this node with an agent"


@dataclass(frozen=True)
class Drill:
    """The result of a drill. `generation`, `place`: what was copied, and from where. `copied_seconds`: to make
    the copies. `cleared`: names of folders of killed drills that were removed."""

    generation: Generation
    place: str
    copied_seconds: float
    acts: list[Act]
    peers: list[PeerRead]
    cleared: list[str]

    @property
    def good(self) -> bool:
        """Whether every way back that was tried has worked."""
        return all(good is not False for good in [*(one.good for one in self.acts), *(one.good for one in self.peers)])


def drill(run: str, scratch_folder: str | None, announce: Callable[[str], object]) -> Drill:
    """Play all acts with copies of the newest good generation of `run`.

    `scratch_folder`: the directory for the copies; None: the one beside the run. `announce`: receives a line before
    anything is copied. Raises NothingGood, NoSpace, Refused, and what opening the run raises.
    """
    tier = access.for_reading(run)
    parent, name = drill_scratch.parent_folder(run, scratch_folder), drill_scratch.name_of(run)
    front, no_front = front_of(run, tier)
    _require_outside(parent, [run, *place_list.listed(tier), *([front.url] if front is not None else [])])
    folder = front.root if front is not None else ""
    own = access.for_reading(front.url) if front is not None and os.path.isdir(os.path.join(folder, "gen")) else None
    beside = front.url if front is not None and front.kind == "directory" and not no_front else None
    alone = drill_scratch.alone(folder) if own is not None else contextlib.nullcontext()
    with alone, ThreadPoolExecutor(WORKERS, "lastgood-drill") as workers:
        reading = Reading(workers)
        if own is not None:
            drill_scratch.clear_copies(folder)
        cleared = drill_scratch.clear(parent, name)
        if beside is not None:
            cleared += drill_scratch.clear(os.path.dirname(folder), drill_scratch.name_of(beside))
        with drill_scratch.opened(parent, name, beside) as scratch:
            for attempt in range(1, ATTEMPTS + 1):
                with _asked_again(attempt), contextlib.ExitStack() as keep:
                    original = newest_good(tier, own, reading, keep)
                    require_room(original, parent)
                    lacks = no_front or front_lacks(original, parent, scratch.front)
                    announce(
                        f"copying step {original.generation.step} to {parent}: {size(original.room_bytes)} at most"
                    )
                    stage, begun = Stage(original, scratch, reading, lacks), time.monotonic()
                    stage.make_whole()
                    break
            copied_seconds = time.monotonic() - begun
            acts, peers = [*stage.play()], list[PeerRead]()
            if own is not None:
                peers = read_peers(folder, own, reading.read_ranks)
                place = scratch.disk if lacks else scratch.front
                acts += drill_nodes.play(folder, own, peers, place, reading)
    return Drill(original.generation, original.tier.place, copied_seconds, acts, peers, cleared)


@contextlib.contextmanager
def _asked_again(attempt: int) -> Iterator[None]:
    """Suppress Cancelled, for a generation that training has deleted meanwhile; raise it for the last attempt."""
    try:
        yield
    except Cancelled as deleted:
        if attempt == ATTEMPTS:  # guard: drill-attempts-end
            raise Cancelled(
                f"training has deleted {ATTEMPTS} generations of this run, each while it was copied: {deleted.what}",
                safe="Nothing is damaged, and the run was only read.",
                todo="Save less often, keep more generations in the first place (Tier(retention=Keep(last=3))), or "
                "run the drill once the last place of the run has received a save.",
            ) from deleted


def _require_outside(parent: str, urls: Sequence[str]) -> None:
    """Raise Refused for a directory for copies, without links, that lies in one of these places of the run."""
    for place in map(paths.parsed, urls):
        if paths.lies_in(paths.Place(parent, "directory"), place):  # guard: drill-copies-outside-the-run
            raise Refused(
                f"{parent} lies in {place.url}, a place of the run",
                safe="Nothing was copied.",
                todo="A drill only reads the run: name a directory outside, --in DIR.",
            )


def require_room(original: Original, parent: str) -> None:
    """Raise NoSpace if the directory `parent` has no room for the copies beside the next saves of the job: a save that
    finds a full disk deletes generations. Raises what `os_errors.at_path` returns too."""
    with os_errors.translated(parent):
        free = free_bytes(parent)
    if free // DRILL_SHARE < original.room_bytes:  # guard: drill-needs-free-space
        raise NoSpace(
            f"a drill needs {original.room_bytes:,} bytes in {parent} for a while, free are {free:,}, of which it gets "
            f"one part of {DRILL_SHARE}",
            safe="Nothing was copied, and the rest is left for the saves of the job.",
            todo="Free space on this disk, or name another directory: --in DIR.",
        )


def front_lacks(original: Original, parent: str, front: ScratchPlace) -> str:
    """Why the front has no room for the copies, beside those in the directory `parent` and the saves of the job.

    "" if it has.
    """
    root, needed = os.path.dirname(os.path.dirname(front.root)), original.room_bytes
    try:
        known: list[int | None] = [free_bytes(root)]
        if front.in_memory:
            known.append(memory_limits.available_bytes())
            needed += original.generation.bytes  # memory of deleted files is kept (io/reused_files.py)
        elif os.stat(root).st_dev == os.stat(parent).st_dev:
            needed += original.room_bytes  # for the copies there
    except OSError as error:
        return f"{root}: {error.strerror}"
    free = min(one for one in known if one is not None)
    if free // DRILL_SHARE < needed:  # guard: drill-needs-free-memory
        return f"copies {front.where} need {size(needed)}, and of {size(free)} that are free a drill gets a quarter"
    return ""


def front_of(run: str, tier: Tier) -> tuple[Place | None, str]:
    """Where this node keeps what its agent copies: memory, or a disk that it has for itself. It may not exist.

    None if the run has no such place. With it: why no copies can be made there, or "".
    """
    listed = place_list.listed(tier)
    durable = [one for one in listed if not paths.in_memory(one)]
    # Only the first place has an agent. AGENT.json in another one is of an earlier opening, when that was the first.
    for one in (one for one in durable[:-1] if one == listed[0]):  # guard: drill-front-is-the-first-place
        place = paths.parsed(one)
        if place.kind == "directory" and os.path.isfile(os.path.join(place.root, agent_link.SPEC)):
            try:
                parent = drill_scratch.parent_folder(place.url, None)
            except Refused as refused:
                return place, refused.what
            return place, "" if os.access(parent, os.W_OK) else f"{parent} cannot be written"
    folder = memory_place.folder_of(durable[-1] if durable else run)
    if os.path.isdir(folder) or any(map(paths.in_memory, listed)):
        return Place(folder, "memory"), ""
    return None, NO_FRONT


def newest_good(tier: Tier, memory: Tier | None, reading: Reading, keep: contextlib.ExitStack) -> Original:
    """The newest generation that a reading finds good: of the place `tier`; if that has none, of the memory.

    `keep`: until it is closed the generation is kept as `kept` does. Raises NoSuchStep if nothing was ever committed,
    NothingGood if none is good, Cancelled if one was deleted while it was read, and what reading raises.
    """
    why, survey = list[str](), commit.survey(tier)
    for one, found in [(tier, survey), *([(memory, _whole(memory))] if memory is not None else [])]:
        chosen = restore.choose(found, None)
        why += [f"  step {at.step} in {one.place}: {reason}" for at, reason in chosen.passed_over]
        for at in chosen.candidates:
            if at not in found.generations:
                continue  # its commit cannot be read
            generation = found.generations[at]
            keep.close()
            place = keep.enter_context(kept(one, at))
            findings, digest = reading.read(place, generation)
            if not findings:
                return Original(place, generation, digest, _code(place, generation))
            require_not_deleted(one, at)
            why.append(f"  step {at.step} in {one.place}: {restore.summary(findings)}")
    if why:
        parts = survey.generations.keys() - _whole(tier).generations.keys()
        raise NothingGood(
            "\n".join(["no generation of this run is good:", *why]),
            safe="\nNothing was copied.",
            todo="If each node has this directory for itself, give the last place of the run." if parts else "",
        )
    raise restore.no_such_step(restore.NOTHING_YET, survey, read_places.found(tier).remark(None))


def _whole(memory: Tier) -> commit.Survey:
    """What is in memory, or in another place, without generations of which only other nodes have some files."""
    survey = commit.survey(memory)
    for at, one in [*survey.generations.items()]:
        if not copying.is_whole(memory, one):
            del survey.generations[at]
    return survey


def _code(tier: Tier, generation: Generation) -> Code | None:
    """The parity of a generation; None if it has none, or if no library for it is installed."""
    with contextlib.suppress(Refused):
        found = [] if tier.newest_only else parity.find_all(tier, generation.id)
        return found[0].code if found else None
    return None
