"""Loading: the newest good generation -> the live state.

    for each candidate, newest first:  match with the live state -> read, verify and write tensors -> values, generators

Invariants
  1. Nothing is written before it is known that a generation fits the live state.
  2. With strict=True a generation is read once, chunk by chunk into the live state, if it was verified before, if an
     older candidate would overwrite what a fault leaves half written, if the live state is half written already, or if
     there are several ranks, which examine it first; in a world of one the headers of its files must agree with its
     manifest too. Otherwise it is read twice: first to verify all of it, then to write it (docs/decisions/0006).
  3. Several ranks load the same generation, or none does.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .. import reporting
from ..coordination.single_rank import AnyRanks, AnyTopic
from ..engine.read_file import UnfitTensors
from ..errors import Damaged, HalfLoaded, LastgoodError, LoadFailed, NotFinite, StepDiffers
from ..format.values import component
from ..io.machine import machine
from ..policy import restore
from ..policy.arguments import require
from ..policy.merge_values import merged, unplaced
from ..records import Finding, Generation
from ..run.candidates import Candidates, RestorableRun
from ..run.content import Content, ReadSettings
from ..run.watched import Source
from ..state.as_dict import AsDict, stored_names
from ..state.match import Match, match
from ..state.objects import seed_rng
from ..state.patterns import Patterns
from ..state.rename import Rename
from ..state.rules import Stored
from ..units import shortened

SHARED = 1.5
"""If the ranks of a machine want more than this many times the bytes of a generation, they use its page cache."""


@dataclass(frozen=True)
class Restored:
    """The result of a restore or a load. It converts to its step: `for n in range(ckpt.restore(), total)`."""

    step: int
    """number of optimizer steps that are completed in the restored state; 0 if there was nothing to restore"""
    generation: Generation | None
    """the generation that was loaded; None if there was nothing to restore"""
    seconds: float
    """duration of the load"""
    bytes: int
    """size of all files of the generation"""
    stepped_over: list[tuple[int, str]] = field(default_factory=list)
    """(step, reason) of each newer generation that is not good"""
    misread: str = ""
    """what the first reading found and the second did not: a fault of memory or cable, and not of the files"""
    repaired: list[tuple[int, str]] = field(default_factory=list)
    """(step, files) of each generation that was damaged, and was rebuilt from its parity"""
    sources: dict[str, Source] = field(default_factory=dict)
    """of a Checkpointer: path or URL of each place that was read -> bytes and seconds"""
    skipped: list[str] = field(default_factory=list)
    """with strict=False: the name of each entry that did not fit, with the reason"""
    unfit: list[str] = field(default_factory=list)
    """if a step was asked for: its tensors that must be finite and hold NaN or infinity"""
    not_demanded: frozenset[str] = frozenset()
    """names of the tensors that were saved as allowed to hold NaN or infinity"""

    def __index__(self) -> int:
        return self.step

    def __repr__(self) -> str:
        """One line: `print(ckpt.restore())` shows it."""
        if self.generation is None:
            return "<Restored: step 0, nothing to restore>"
        found = [str(self.generation.id), f"{len(self.unfit)} of its tensors not finite" if self.unfit else "good"]
        found += [f"from {' and '.join(self.sources)}"] if self.sources else []
        for name, many in (("stepped_over", self.stepped_over), ("repaired", self.repaired), ("skipped", self.skipped)):
            found += [f"{name}: {len(many)}"] if many else []
        return f"<Restored: {', '.join(found)}>"


@dataclass(frozen=True)
class LoadRequest:
    """Which generation to load into which live state, and how; `Checkpointer.restore` describes the arguments.

    Raises Refused for a `strict` or `rename` of the wrong type.
    """

    state: MutableMapping[str, Any]
    step: int | None = None
    strict: bool = True
    rename: Mapping[str, str] | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    patterns: Patterns = field(default_factory=Patterns)
    """those of `include` and `exclude` that have matched no name so far"""
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
        return Rename(self.rename or {}).entry(entry) in set(map(component, self.state))

    def fit(self, stored: Stored, alone: bool) -> Match:
        """Match a generation with the state. Raises as `match`.

        `alone`: whether no other rank loads. Then a pattern that matches no name is refused; otherwise another rank may
        have what it matches.
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
            partial=self.partial,
        )


class Request(Protocol):
    """The interface of a request to `load`. Implemented by `LoadRequest` and `as_dict.DictRequest`."""

    @property
    def step(self) -> int | None: ...
    @property
    def strict(self) -> bool: ...
    def has_place(self, entry: str) -> bool: ...
    def fit(self, stored: Stored, alone: bool) -> Match | AsDict: ...


def load(request: Request, run: RestorableRun, ranks: AnyRanks) -> Restored:
    """Load the newest good generation of the lineage, or `request.step`, into the live state.

    A generation with NaN or infinity in tensors that must be finite is not good, unless its step is asked for. Values
    that differ between ranks are taken from the rank of the same number. Several ranks load the same generation, or
    none does; they first examine one that is not verified together, because each of them reads only a part of it.

    Raises StateMismatch, NoSuchStep, Damaged, NothingGood, Unavailable: the live state is untouched then. Raises
    HalfLoaded if it is not, and its subclass LoadFailed if code of the state, of torch or of numpy raised after writing
    had begun.
    """
    begun = time.monotonic()
    candidates = Candidates(run.survey, request.step, run)
    loading = _Loading(request, run, ranks, candidates)
    loaded: Generation | None = None
    try:
        for generation in candidates:
            try:
                loading.attempt(generation)
            except (Damaged, NotFinite) as error:
                candidates.failed(error)
            else:
                loaded = generation
                break
    except LastgoodError as error:
        if loading.half is None or isinstance(error, HalfLoaded):
            raise
        raise _half_loaded(error, loading.half) from error
    if loaded is not None and ranks.rank >= loaded.commit.world.ranks:
        seed_rng(f"{loaded.root} {ranks.rank}")
    found = candidates.found(loaded)
    return Restored(
        step=loaded.step if loaded else 0,
        generation=loaded,
        seconds=time.monotonic() - begun,
        bytes=loaded.bytes if loaded else 0,
        stepped_over=found.stepped_over,
        misread=found.misread,
        skipped=loading.skipped,
        unfit=sorted(loading.unfit.names),
        not_demanded=loading.not_demanded,
    )


class _Loading:
    """The attempts of one load, one generation each, and the results of the last attempt."""

    def __init__(self, request: Request, run: RestorableRun, ranks: AnyRanks, candidates: Candidates) -> None:
        self._request, self._run, self._ranks, self._candidates = request, run, ranks, candidates
        self._several = ranks.size > 1
        self.half: int | None = None
        """the step of which the live state holds a part, after an attempt that failed half way"""
        self.skipped: list[str] = []
        """as `Restored.skipped`"""
        self.unfit = UnfitTensors(refused=False)
        """tensors of the generation that must be finite and are not"""
        self.not_demanded: frozenset[str] = frozenset()
        """as `Restored.not_demanded`"""

    def attempt(self, generation: Generation) -> None:
        """Load a generation, on all ranks or on none. Raises Damaged or NotFinite if it is not good."""
        topic = self._ranks.topic("load")
        with topic.failing():
            # guard: half-loaded-state-not-mixed
            if (
                self.half is not None and not self._request.strict
            ):  # entries that this one lacks would keep what was written
                raise Damaged(f"step {self.half} was damaged, and had been loaded in part")
            findings = self._examine_unverified(generation, topic)
            content = Content(self._run.place_of(generation, topic), generation)
            fit = self._fit(content, topic)
            if self._several:
                self._run.gather(content, fit.chunks_wanted(content, self._ranks.rank), topic)
            shared = self._is_read_several_times(generation, fit.bytes, topic)
            arena = self._run.arena(*content.reading_bytes())
            once = self._may_read_once(generation) and (self._several or content.headers_agree(arena))
            self.unfit = UnfitTensors(refused=self._request.step is None)
            # guard: non-finite-on-any-rank
            self.unfit.names.update(one.tensor for one in findings)  # of all ranks: this one reads only a part
            self.not_demanded = content.not_demanded()
            settings = ReadSettings(
                arena=arena,
                workers=self._run.workers,
                rank=self._ranks.rank,
                unfit=None if generation.verified else self.unfit,
                shared=shared,
            )
            with topic.barrier(), self._translated_errors(generation, fit):  # guard: all-ranks-load-or-none
                fit.apply(content, settings, verify_first=not once)
            self.skipped = list(fit.skipped)

    def _examine_unverified(self, generation: Generation, topic: AnyTopic) -> list[Finding]:
        """Examine a generation that is not verified, if there are several ranks. Raises Damaged.

        Returns the findings of NaN and infinity, of all ranks.
        """
        if generation.verified or not self._several:
            return []
        findings = self._run.examine(generation, topic)
        if damage := [one for one in findings if one.layer != "finite"]:
            raise Damaged(f"step {generation.step} does not read back: {restore.summary(damage)}")
        return findings

    def _fit(self, content: Content, topic: AnyTopic) -> Match | AsDict:
        """Match a generation with the state of this rank. Raises StateMismatch."""
        shapes = {name: (one.dtype, one.shape) for name, one in content.names().items()}
        values = merged(content.manifests, self._ranks.rank, self._ranks.size, self._request.has_place)
        stored = Stored(step=content.generation.step, tensors=shapes, aliases=content.aliases, values=values)
        fit = self._request.fit(stored, alone=not self._several)
        fit.unexpected = topic.agree(
            fit.unexpected, unplaced
        )  # another rank may have a place, as with pipeline parallelism
        fit.require_fit()
        return fit

    def _is_read_several_times(self, generation: Generation, wanted_bytes: int, topic: AnyTopic) -> bool:
        """Whether the ranks of this machine together read much more than the bytes of a generation.

        All ranks agree here before any of them writes into its state: the generation fits the state of every rank, and
        all ranks load the same one.
        """
        if not self._several:
            return False
        here = machine()
        wanted = topic.agree((generation.root, here, wanted_bytes), _wanted_bytes)
        return bool(wanted[here] > SHARED * generation.bytes)  # guard: shared-content-read-once

    def _may_read_once(self, generation: Generation) -> bool:
        """Whether it is safe to write each chunk into the live state before the later ones are known to be good.

        With strict=True it is if the generation was verified before, if an older one would overwrite what is half
        written, if the live state is half written already, or if several ranks have examined the generation. In a world
        of one, `attempt` also compares the headers of the files first.
        """
        if not self._request.strict:
            return False  # entries that an older generation lacks would keep what was written
        older = not self._candidates.is_last(generation.id)
        return generation.verified or older or self.half is not None or self._several

    @contextlib.contextmanager
    def _translated_errors(self, generation: Generation, fit: Match | AsDict) -> Iterator[None]:
        """Around writing: notes whether it has begun; raises HalfLoaded or LoadFailed if no generation mends that."""
        try:
            yield
        except LoadFailed:
            raise
        except (Damaged, NotFinite) as error:
            if fit.begun and not self._request.strict:
                raise _half_loaded(error, generation.step) from error
            raise
        except LastgoodError:
            raise
        except Exception as error:
            if fit.begun:
                raise _load_failed(error, generation.step) from error
            raise
        finally:
            self.half = generation.step if fit.begun else self.half


def _wanted_bytes(posts: list[tuple[str, str, int]]) -> Mapping[str, int]:
    """Machine -> bytes that its ranks read. `posts`: (root of the generation, machine, bytes) of every rank."""
    if len({root for root, _, _ in posts}) > 1:  # guard: ranks-load-one-generation
        raise StepDiffers("ranks were about to load different generations", safe="Nothing was loaded.")
    wanted: Counter[str] = Counter()
    for _, at, size in posts:
        wanted[at] += size
    return wanted


def report(found: Restored, verb: str, for_all: bool = True) -> None:
    """Report which generations were stepped over, misread, or rebuilt. `verb`: "loaded" or "resumed from". `for_all`:
    also what is the same on all ranks, which step over the same generations."""
    if found.stepped_over and for_all:  # guard: stepped-over-reported-once
        reasons = "\n".join(f"  step {at}: {reason}" for at, reason in found.stepped_over)
        reporting.threat(f"{verb} step {found.step}, stepping over\n{reasons}")
    if found.skipped and for_all:  # guard: skipped-entries-reported
        listed = shortened(found.skipped, 3, "; ")
        reporting.warning(f"{verb} step {found.step} without what does not fit, which stays as it was: {listed}")
    if found.misread:
        reporting.warning(
            f"step {found.step} is good, and was misread at first: {found.misread} Check memory, cable, controller."
        )
    for at, names in found.repaired:
        reporting.warning(f"step {at}: what was missing or damaged was rebuilt: {names}")


def _load_failed(error: Exception, step: int) -> LoadFailed:
    return LoadFailed(
        f"loading step {step} had begun when it failed: {type(error).__name__}: {error}",
        safe="\nThe generations are untouched. The live state is part of that step: do not train on it.",
        todo="Fix the cause, build the state anew and restore again.",
    )


def _half_loaded(error: LastgoodError, step: int) -> HalfLoaded:
    return HalfLoaded(
        f"loading step {step} had begun when it failed: {error.what}",
        safe="\nThe generations are untouched. The live state is part of that step: do not train on it.",
        todo=f"Build the state anew and restore again, or ask for another step. {error.todo}".rstrip(),
    )
