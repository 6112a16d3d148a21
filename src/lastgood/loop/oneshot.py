"""One save or one load, without a training loop: `lastgood.save` and `lastgood.load`."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

import torch.distributed as dist

from .. import reporting
from ..coordination.single_rank import SingleRank
from ..engine.arena import Arena
from ..errors import Refused, RunLocked, RunReplaced
from ..limits import CHUNK_BYTES, STEP_LIMIT, WORKERS
from ..policy.arguments import is_whole, require
from ..ranks.torch_store import among_ranks, world_size
from ..records import Generation
from ..run import access, read_places
from ..run.left_behind import order_beside
from ..run.save import ReadyChunks, SaveRequest
from ..run.writer import RunWriter
from ..snapshot import staging
from ..state.as_dict import DictRequest
from ..state.capture import Capture, Captured, finite
from ..state.exempt import untrained
from ..state.patterns import Patterns, matches
from ..state.storable import require_storable
from ..units import shortened
from .load import LoadRequest, Restored, load, report
from .options import check_state
from .replaying import refuse_save_once
from .save_planner import flat_modules

_WHOLE = (
    "Call Checkpointer.save(step) on all ranks. Or gather the whole state on all ranks, and save that on rank 0: "
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
    "torch.distributed.checkpoint.state_dict."
)


def save_once(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    step: int = 0,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    finite_also: Sequence[str] = (),
    finite_except: Sequence[str] = (),
) -> Generation:
    """Save a state as a new generation of the run at `path`, and wait until it is durable and verified.

    The run is made if it does not exist. The generation continues the newest one of the run; nothing is deleted.
    `state`: name -> object, as for a Checkpointer. It is read once, now, so it may hold what an object's
    `state_dict()` returned, which a Checkpointer refuses. `step` (default 0): how many optimizer steps are completed.
    `include`, `exclude` (default: everything is saved): name patterns (fnmatch) of what is saved, and of what is not.
    `finite_also`, `finite_except` (default: none): as for a Checkpointer.

    It stores what this process has. In a process group call it on one rank, or on each with a path of its own. A state
    of which this rank holds only a part, as with FSDP2 and tensor parallelism, is refused. Raises what a Checkpointer
    raises.

        lastgood.save("runs/a", {"model": model}, step=4000)
    """
    require(
        is_whole(step, 0) and step < STEP_LIMIT,
        f"step={step!r}",
        f"Give a whole number below {STEP_LIMIT}: how many optimizer steps are completed.",
    )
    check_state(state)
    refuse_save_once(path)
    patterns = Patterns(include, exclude, finite_also, finite_except)
    captured = _captured(Capture(include, exclude), state)  # refuses before anything is made
    patterns.require(state)
    must = finite(captured, finite_also, finite_except, exempt=untrained(state, captured))
    with (
        _naming_rank(),
        access.for_writing(path, "atomic_dirsync") as disk,
        ThreadPoolExecutor(WORKERS, "lastgood-write") as workers,
    ):
        run = RunWriter(disk, workers)
        newest = run.newest()
        run.begin(newest.id if newest else None, order_beside((), [disk]))
        tensors = captured.tensors
        images = staging.lay_out(tensors, must)
        arena = Arena(2 * WORKERS * CHUNK_BYTES, CHUNK_BYTES)
        generation = run.save(
            SaveRequest(
                at=run.admit(operator.index(step)),
                images=images,
                chunks=ReadyChunks(staging.copy_all(images, tensors, arena).fill()),
                aliases=captured.aliases,
                values=captured.values,
            )
        )
        run.verify(arena)
        return generation


def _captured(capture: Capture, state: Mapping[str, Any]) -> Captured:
    """What is to be saved. Raises Unstorable, and Refused where this process holds only a part of it."""
    if among_ranks():  # before a `state_dict()` that takes all ranks
        _require_whole(flat_modules(state))  # guard: flat-parameters-are-parts
    captured = require_storable(capture, state)
    parts = [name for name, one in captured.sharded.items() if one.box.shape != one.shape]
    _require_whole(parts)  # guard: part-is-no-whole-tensor
    return captured


def _require_whole(parts: Sequence[str]) -> None:
    what = f"this process holds only a part of {shortened(parts, 3)}, and lastgood.save stores what one process holds"
    require(not parts, what, _WHOLE)


@contextlib.contextmanager
def _naming_rank() -> Iterator[None]:
    """Of several ranks that save to one path only one can: the others raise what one alone does, with the remedy."""
    try:
        yield
    except (RunLocked, RunReplaced) as error:
        if not among_ranks():  # guard: locked-path-names-rank
            raise
        raise type(error)(
            f"rank {dist.get_rank()} of {world_size()} called lastgood.save, and {error.what}",
            safe=error.safe,
            todo="If other ranks save to the same path, call it on rank 0 only, or give each rank a path of its own. "
            f"Otherwise: {error.todo}",
        ) from error


class Loaded(dict[str, Any]):
    """A generation as a nested dict (see `lastgood.load`). `restored` says which one, and what was stepped over."""

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
    """Load the newest good generation of the run at `path`, or that of `step`. The run is neither changed nor locked.

    A generation that only the memory of this machine has (`Tier("memory://")`) is loaded from there.

    With `state`, the generation is loaded into the live objects there, and a Restored is returned. The state may lack
    top-level entries of the generation: `lastgood.load(path, {"model": model})` takes the model out of a training run.
    Within the entries that it has, everything must fit, unless strict=False (default True), which skips what does not.
    `step` (default None): the step of the generation; None: the newest good one. `rename` (default: no name changes):
    stored name -> live name.

    Without `state`, a nested dict of the whole generation is returned, with new tensors on the CPU. Modules and
    optimizers are as their `state_dict()` has them, for `model.load_state_dict(found["model"])`; the step is
    `found.restored.step`.

    `include`, `exclude` (default: everything is loaded): name patterns (fnmatch) of what is loaded, and of what is not.
    The global random number generators are set only where the whole generation goes into `state`: not where entries
    are lacking, and with `include` only if that names "rng". Every byte that is used is verified. Raises NotARun,
    StateMismatch, NoSuchStep, Damaged, NothingGood, Refused, Unavailable: the live state is untouched then. Raises
    HalfLoaded when it is not.

        lastgood.load("runs/a", {"model": model}, step=4000)
    """
    if state is None and (rename or not strict):
        raise Refused("rename= and strict= apply only to a live state", safe="Nothing was read.", todo="Give state=.")
    if state is not None:
        check_state(state)
    patterns = Patterns(include, exclude)
    if include and not any(matches(one, ["rng"]) or one.startswith("rng.") for one in include):
        exclude = [*exclude, "rng"]  # guard: generators-loaded-only-if-named
    content: dict[str, Any] = {}
    request = (
        LoadRequest(state, step, strict, rename, include, exclude, patterns, partial=True)
        if state is not None
        else DictRequest(content, step, include, exclude)
    )
    places = read_places.found(access.for_reading(path))
    with (
        ThreadPoolExecutor(max(WORKERS, places.tier.reads_at_once), "lastgood-read") as workers,
        contextlib.closing(read_places.RunOfPlaces(places, workers)) as run,
    ):
        found = load(request, run, SingleRank())
    report(found, "loaded")
    if found.generation is None and (remark := places.remark(None)):
        reporting.warning(f"nothing was loaded: {remark}")  # guard: part-in-memory-reported
    elif found.generation is not None and (remark := places.remark(found.generation.id)):
        reporting.info(remark)
    return found if state is not None else Loaded(content, found)
