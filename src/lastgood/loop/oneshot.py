"""A run without a training loop: save once, load once."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

from ..engine.arena import Arena
from ..errors import Refused
from ..format import commit, layout
from ..policy.arguments import is_whole, require
from ..records import Finding, Generation
from ..run import access
from ..run.reader import WORKERS, read_all
from ..run.writer import RunWriter
from ..snapshot import staging
from ..state.as_dict import Everything
from ..state.capture import Capture, finite
from ..state.exempt import untrained
from ..state.patterns import Patterns, matches
from ..state.storable import require_storable
from .load import Request, Restored, load_into, report
from .options import check_state


def save_once(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    step: int = 0,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Generation:
    """Save a state as a new generation of the run at `path` (made if need be) and wait until it is durable.

    It continues the newest generation that is there; nothing is deleted. The state is read now, so it may hold what
    an object's `state_dict()` returned, which a Checkpointer refuses. `include`, `exclude`: name patterns (fnmatch), as
    in the Checkpointer. Raises what a Checkpointer raises.
    """
    require(
        is_whole(step, 0) and step < layout.STEP_LIMIT,
        f"step={step!r}",
        f"Give a whole number below {layout.STEP_LIMIT}: how many optimizer steps are completed.",
    )
    check_state(state)
    patterns = Patterns(include, exclude)
    captured = require_storable(Capture(include, exclude), state)  # refuses before anything is made
    patterns.require(state)
    with access.for_writing(path, "atomic_dirsync") as disk, ThreadPoolExecutor(WORKERS, "lastgood-write") as workers:
        run = RunWriter(disk, workers)
        newest = next(iter(run.lineage()), None)
        run.begin(newest.id if newest else None)
        tensors = captured.tensors
        images = staging.lay_out(tensors, finite(captured, exempt=untrained(state, captured)))
        arena = Arena(2 * WORKERS * layout.CHUNK_BYTES, layout.CHUNK_BYTES)
        chunks = staging.in_chunks(images, arena.chunk_bytes)
        generation = run.save(
            run.admit(operator.index(step)),
            images,
            staging.Snapshot(chunks, tensors, staging.devices(tensors), arena).fill(),
            aliases=captured.aliases,
            values=captured.values,
        )
        run.verify(arena)
        return generation


class Loaded(dict[str, Any]):
    """A generation as a nested dict (see `lastgood.load`); `restored` says which one, and what was stepped over."""

    def __init__(self, content: Mapping[str, Any], restored: Restored) -> None:
        super().__init__(content)
        self.restored = restored


@overload
def load_once(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    step: int | None = None,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Restored: ...
@overload
def load_once(
    path: str | os.PathLike[str],
    state: None = None,
    step: int | None = None,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Loaded: ...
def load_once(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any] | None = None,
    step: int | None = None,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Restored | Loaded:
    """Load the newest good generation (or that of `step`); the run itself is not changed or locked.

    With `state` it is loaded into the live objects there, and a Restored is returned. The state may lack top-level
    entries that the generation has: `lastgood.load(path, {"model": model})` takes the model out of a training run.
    Inside the entries that it has everything must fit, unless strict=False. `rename`: stored name -> live name.

    Without `state` a nested dict of all of it is returned, with new tensors on the CPU: modules and optimizers as
    their `state_dict()` has them, for `model.load_state_dict(found["model"])`; `found.restored.step` is its step.

    `include`, `exclude`: name patterns (fnmatch) of what is wanted. The global random number generators are set only
    where all of a generation goes into `state`: not where entries are lacking, and with `include` only if that names
    "rng". Every byte that is used is verified. Raises NotARun, StateMismatch, NoSuchStep, Damaged, NothingGood,
    Refused; the live state is untouched then. HalfLoaded when it is not.
    """
    if state is None and (rename or not strict):
        raise Refused("rename= and strict= speak of a live state", safe="Nothing was read.", todo="Give state=.")
    if state is not None:
        check_state(state)
    patterns = Patterns(include, exclude)
    if include and not any(matches(one, ["rng"]) or one.startswith("rng.") for one in include):
        exclude = [*exclude, "rng"]  # guard: generators-loaded-only-if-named
    everything = Everything(include, exclude)
    request = everything if state is None else Request(state, strict, rename, include, exclude, patterns, partial=True)
    tier = access.for_reading(path)

    with ThreadPoolExecutor(WORKERS, "lastgood-read") as workers:
        small = Arena(3 * layout.CHUNK_BYTES, layout.CHUNK_BYTES)

        def examine(generation: Generation) -> list[Finding]:
            return read_all(tier, generation, small, workers)

        found = load_into(request, tier, commit.survey(tier), step, Arena, workers, examine)
    report(found, "loaded")
    return found if state is not None else Loaded(everything.content, found)
