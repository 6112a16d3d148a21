"""Loading: the newest good generation -> the live state.

That it fits is known before anything is touched. Its bytes are read once, each chunk verified and then written where
it belongs, where damage half way can be made good; else they are read twice, first to verify all of them (see
docs/decisions/0006). Values, optimizers and random number generators follow when every tensor is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from .. import reporting
from ..engine.arena import Arena
from ..engine.finite import not_finite_error
from ..engine.scatter import Scatter
from ..errors import Damaged, HalfLoaded, LastgoodError, LoadFailed, NotFinite
from ..format.commit import Survey
from ..format.values import component
from ..policy import reshard, restore
from ..policy.arguments import require
from ..policy.merge_values import merged
from ..ports import Tier
from ..records import Finding, Generation, Manifest
from ..run import reader
from ..state.as_dict import Everything, stored_names
from ..state.match import Match, Rename
from ..state.objects import seed_rng
from ..state.patterns import Patterns
from ..state.rules import Stored, match
from ..state.tensor_sink import Filling


@dataclass(frozen=True)
class Restored:
    """What a restore did. `step` is 0 and `generation` None when there was nothing to restore.

    It counts as its step where a whole number is asked for: `for n in range(ckpt.restore(), total)`.
    """

    step: int
    generation: Generation | None
    seconds: float
    bytes: int
    stepped_over: list[tuple[int, str]] = field(default_factory=list)
    """(step, reason) of what is newer and not good"""
    misread: str = ""
    """what was found in its first reading, and not in the second: a fault of memory or cable, and not of the files"""
    repaired: list[tuple[int, str]] = field(default_factory=list)
    """(step, files) of what was damaged, and rebuilt from its parity"""
    skipped: list[str] = field(default_factory=list)
    """with strict=False: what did not fit"""
    unfit: list[str] = field(default_factory=list)
    """of a step that was asked for: tensors that must be finite and are not"""
    not_demanded: frozenset[str] = frozenset()
    """tensors that the generation was saved with, and that may hold NaN or infinity"""

    def __index__(self) -> int:
        return self.step


@dataclass(frozen=True)
class Request:
    """How a generation is to meet the live state; see `Checkpointer.restore`.

    Raises Refused, by name, for a `strict` or `rename` of the wrong type.
    """

    state: MutableMapping[str, Any]
    strict: bool = True
    rename: Mapping[str, str] | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    patterns: Patterns = field(default_factory=Patterns)
    """which of the two have matched no name so far"""
    partial: bool = False  # guard: restore-is-never-partial
    """whether the state may lack top-level entries that the generation has"""

    def __post_init__(self) -> None:
        require(isinstance(self.strict, bool), f"strict={self.strict!r}", "Give True or False.")
        names = self.rename if self.rename is not None else {}
        require(
            isinstance(names, Mapping) and all(isinstance(one, str) for pair in names.items() for one in pair),
            f"rename={self.rename!r}",
            "Give a dict of names: rename={old: new}.",
        )

    def has_place(self, entry: str) -> bool:
        """Whether the state has a place for a top-level entry of a generation."""
        return Rename(self.rename or {}).key(entry) in set(map(component, self.state))

    def fit(self, stored: Stored, nowhere: Callable[[list[str]], list[str]], alone: bool) -> Match:
        """How a generation goes into the state. Raises as `match`; `alone`, without other ranks, as `Patterns.require`.

        Another rank may have what a pattern matches.
        """
        if self.patterns.pending:
            self.patterns.note(stored_names(stored))
        if alone:
            self.patterns.require(self.state)
        return match(
            self.state,
            stored,
            strict=self.strict,
            rename=self.rename,
            include=self.include,
            exclude=self.exclude,
            nowhere=nowhere,
            partial=self.partial,
        )


def load_into(
    request: Request | Everything,
    tier: Tier,
    survey: Survey,
    step: int | None,
    arena_for: Callable[[int, int], Arena],
    workers: Executor,
    examine: Callable[[Generation], list[Finding]],
    mark: Callable[[Generation, list[Finding]], None] = lambda *_: None,
    mend: Callable[[Generation], bool] = lambda _: False,
    rank: int = 0,
    ranks: int = 1,
    together: Callable[[Callable[[], None]], None] | None = None,
    nowhere: Callable[[list[str]], list[str]] = list,
    fits: Callable[[Generation, int], bool] = lambda *_: False,
) -> Restored:
    """Load the newest good generation of the lineage (or `step`) into the live state.

    What is not finite and must be is not good, unless `step` asks for it. `arena_for(bytes, chunk bytes)` lends the
    memory. `rank` of the `ranks` that load takes the place of that rank of those that saved. `together` as in
    `newest_good`: what was not verified is examined by all of them first, since each reads but a part. `nowhere` as in
    `match`; `fits(generation, bytes wanted of it)` is asked before anything is written, and says whether this machine
    reads the same bytes several times. Raises StateMismatch, NoSuchStep, Damaged, NothingGood, Unavailable, each with
    the live state untouched; HalfLoaded when it is not; its LoadFailed where code of the state, of torch or of numpy
    raised half way.
    """
    begun = time.monotonic()
    skipped: list[str] = []
    unfit: set[str] = set()
    not_demanded: set[str] = set()
    half: int | None = None  # step of which the live state holds a part

    def in_one_reading(generation: Generation) -> bool:
        """Whether damage half way can be made good by another load, or was looked for before."""
        if not request.strict:
            return False  # what an older one lacks would stay as it was written
        older = generation.id != restore.choose(survey, step).candidates[-1]
        return generation.verified or older or half is not None or together is not None

    def load(generation: Generation, manifests: list[Manifest]) -> None:
        nonlocal half
        # guard: half-loaded-state-not-mixed
        if half is not None and not request.strict:  # what this one lacks would stay as it was written
            raise Damaged(f"step {half} was damaged, and had been loaded in part")
        findings = examine(generation) if together and not generation.verified else []
        if damage := [one for one in findings if one.layer != "finite"]:
            raise Damaged(f"step {generation.step} does not read back: {restore.told(damage)}")
        tensors = reshard.tensors(manifests)
        aliases = reshard.aliases(manifests)
        shapes = {name: (one.dtype, one.shape) for name, one in tensors.items()}
        shapes |= {alias: shapes[name] for alias, name in aliases.items()}
        values = merged(manifests, rank, ranks, request.has_place)
        stored = Stored(step=generation.step, tensors=shapes, aliases=aliases, values=values)
        fit = request.fit(stored, nowhere, alone=together is None)
        shared = fits(generation, fit.bytes)
        arena = arena_for(*reader.reading_bytes(manifests))
        once = in_one_reading(generation) and (
            together is not None or reader.headers_agree(tier, generation, manifests, arena)
        )
        try:
            not_demanded.clear()
            not_demanded.update(piece.name for manifest in manifests for piece in manifest.pieces if not piece.finite)
            unfit.clear()
            # guard: non-finite-on-any-rank
            unfit.update(one.tensor for one in findings)  # of all ranks: this one reads but a part
            # Of its own accord nobody loads what is not good; what was verified has been asked already.
            tell = None if generation.verified else _refuse if step is None else unfit.add

            def feed(sink: Filling) -> None:
                if len(manifests) == 1 and not (sink.boxed or shared):  # what is stored is what is wanted
                    reader.stream(tier, generation, manifests[0], arena, workers, sink, unfit=tell)
                    return
                plan = [(one, reshard.parts(tensors[name], one.box, rank)) for name, one in sink.targets()]
                into = Scatter(plan, sink)
                reader.scatter(tier, generation, manifests, arena, workers, into, unfit=tell, fresh=not shared)

            fit.apply(feed, look_first=not once)
        except LoadFailed:
            raise
        except (Damaged, NotFinite) as error:
            if fit.begun and not request.strict:
                raise _half_loaded(error, generation.step) from error
            raise
        except LastgoodError:
            raise
        except Exception as error:
            if fit.begun:
                raise _load_failed(error, generation.step) from error
            raise
        finally:
            half = generation.step if fit.begun else half
        skipped[:] = fit.skipped

    try:
        found = reader.newest_good(tier, survey, step, load, examine, mark, mend, together or reader.alone)
    except LastgoodError as error:
        if half is None or isinstance(error, HalfLoaded):
            raise
        raise _half_loaded(error, half) from error
    if found.generation is not None and rank >= found.generation.commit.world.ranks:
        seed_rng(f"{found.generation.root} {rank}")
    return Restored(
        step=found.generation.step if found.generation else 0,
        generation=found.generation,
        seconds=time.monotonic() - begun,
        bytes=found.generation.bytes if found.generation else 0,
        stepped_over=found.stepped_over,
        misread=found.misread,
        skipped=skipped,
        unfit=sorted(unfit),
        not_demanded=frozenset(not_demanded),
    )


def report(found: Restored, verb: str) -> None:
    """Report what was stepped over, misread, or rebuilt."""
    if found.stepped_over:
        reasons = "\n".join(f"  step {at}: {reason}" for at, reason in found.stepped_over)
        reporting.threat(f"{verb} step {found.step}, stepping over\n{reasons}")
    if found.misread:
        reporting.warning(
            f"step {found.step} is good, and was misread at first: {found.misread} Check memory, cable, controller."
        )
    for at, names in found.repaired:
        reporting.warning(f"step {at} was damaged ({names}) and was rebuilt")


def _refuse(tensor: str) -> None:
    raise not_finite_error(tensor)


def _load_failed(error: Exception, step: int) -> LoadFailed:
    return LoadFailed(
        f"loading step {step} had begun when it failed: {type(error).__name__}: {error}",
        safe="\nThe generations are untouched. The live state is part of that step: do not train on it.",
        todo="Mend the cause, build the state anew and restore again.",
    )


def _half_loaded(error: LastgoodError, step: int) -> HalfLoaded:
    return HalfLoaded(
        f"loading step {step} had begun when it failed: {error.what}",
        safe="\nThe generations are untouched. The live state is part of that step: do not train on it.",
        todo=f"Build the state anew and restore again, or ask for another step. {error.todo}".rstrip(),
    )
