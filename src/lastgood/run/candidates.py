"""Candidates: which generation a restore tries next, and what is done about one that does not load. Torch-free.

for generation in candidates:
    try:
        ...                                  # load it
        break
    except (Damaged, NotFinite) as error:
        candidates.failed(error)             # it is examined, marked, mended; then the iteration goes on
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

from ..coordination.single_rank import AnyTopic
from ..engine.arena import Arena
from ..engine.finite import exception
from ..errors import Damaged, HalfLoaded, LastgoodError, LoadFailed, NotFinite, NothingGood, Unreadable
from ..format import layout
from ..format.commit import Survey
from ..policy import restore
from ..ports import Tier
from ..records import Finding, Generation, GenerationId, intact
from .reader import read_all


class RestorableRun(Protocol):
    """A run as a restore uses it: what lies in it, the memory and threads to read it, and care for what is damaged."""

    @property
    def tier(self) -> Tier: ...
    @property
    def survey(self) -> Survey: ...
    @property
    def workers(self) -> Executor: ...

    def arena(self, total_bytes: int, chunk_bytes: int) -> Arena:
        """Memory for reading tensors."""

    def examine(self, generation: Generation, topic: AnyTopic | None = None) -> list[Finding]:
        """Read all of a generation again; several ranks each read a part, and agree in `topic` (None: a new one).

        Raises Unreadable, Unavailable.
        """

    def mark(self, generation: Generation, findings: list[Finding]) -> None:
        """Record what was found."""

    def mend(self, generation: Generation) -> bool:
        """Rebuild a damaged generation. Returns whether it is whole again."""


class ReadOnlyRun:
    """A run that is open for reading: generations are examined, and neither marked nor mended."""

    def __init__(self, tier: Tier, survey: Survey, workers: Executor) -> None:
        self.tier, self.survey, self.workers = tier, survey, workers

    def arena(self, total_bytes: int, chunk_bytes: int) -> Arena:
        return Arena(total_bytes, chunk_bytes)

    def examine(self, generation: Generation, topic: AnyTopic | None = None) -> list[Finding]:
        return read_all(self.tier, generation, Arena(3 * layout.CHUNK_BYTES, layout.CHUNK_BYTES), self.workers)

    def mark(self, generation: Generation, findings: list[Finding]) -> None:
        """A run that is open for reading is never written to."""

    def mend(self, generation: Generation) -> bool:
        return False


class Found(NamedTuple):
    """The result of a search for a generation to load. `generation` is None when nothing was ever committed."""

    generation: Generation | None
    stepped_over: list[tuple[int, str]]
    """(step, reason) of each newer generation that is not good"""
    misread: str = ""
    """what the first reading of `generation` found and the second did not: a fault of memory or cable, not of files"""


class Candidates:
    """Iterates over the generations to try: those of the lineage, newest first; or only those of `step`.

    The caller loads each generation that it is given, stops at the first that loads, and reports any other with
    `failed`. What failed is examined by `run`, if there is one. Without findings the fault was not in the files, and
    the generation is given once more; so it is when it was mended. Otherwise it is marked, and the next older one
    follows.
    What the caller has written by then, the next generation must overwrite.

    Making it raises NoSuchStep. The iteration raises the last failure of a generation that fails twice, or of the last
    one of an explicit `step`; NothingGood, with what is wrong with each, where no generation is left; and what `run`
    raises. It ends without an error only where nothing was ever committed.
    """

    def __init__(self, survey: Survey, step: int | None = None, run: RestorableRun | None = None) -> None:
        self._survey, self._step, self._run = survey, step, run
        choice = restore.choose(survey, step)
        self._untried = choice.candidates
        self._over = [(at.step, reason) for at, reason in choice.passed_over]
        self._unfit = _known_unfit(survey, [at for at, _ in choice.passed_over])
        self._error: Damaged | NotFinite | None = None
        self._misread = ""

    def __iter__(self) -> Iterator[Generation]:
        for at in self._untried:
            error, again = self._survey.broken.get(at), False
            if error is None:
                generation = self._survey.generations[at]
                yield generation
                error, again = self._considered(generation)
                if again:
                    yield generation
                    error = self._failure()
            if isinstance(error, HalfLoaded) or not isinstance(error, (Damaged, NotFinite)):
                raise error  # of several ranks, once all have examined it: none waits for another
            if isinstance(error, NotFinite):
                self._unfit[at.step] = [error.tensor]
            if again or (self._step is not None and self.is_last(at)):  # guard: next-older-after-damage
                raise error
            self._over.append((at.step, str(error)))
        if self._over:
            raise self._nothing_good()

    def failed(self, error: Damaged | NotFinite) -> None:
        """Report that the current generation did not load. Raises `error` itself where no other may be tried."""
        if isinstance(error, LoadFailed):
            raise error
        self._error = error

    def is_last(self, at: GenerationId) -> bool:
        """Whether no older generation would be tried after this one."""
        return at == self._untried[-1]

    def found(self, generation: Generation | None) -> Found:
        """The result, once `generation` was loaded."""
        if generation is None:
            return Found(None, [])
        newer = [one for one in self._over if one[0] >= generation.step]
        return Found(generation, sorted(newer, reverse=True), self._misread)

    def _failure(self) -> Damaged | NotFinite:
        error, self._error = self._error, None
        assert error is not None, "a generation was neither loaded nor reported as failed"
        return error

    def _considered(self, generation: Generation) -> tuple[LastgoodError, bool]:
        """Why a generation counts as failed, and whether it is tried once more."""
        error = self._failure()
        try:
            return error, self._run is not None and self._is_good_after_all(self._run, generation, error)
        except HalfLoaded:
            raise
        except (Damaged, NotFinite) as other:
            return other, False

    def _is_good_after_all(self, run: RestorableRun, generation: Generation, error: LastgoodError) -> bool:
        """Examine a generation that did not load; mend it, or mark it."""
        try:
            findings = run.examine(generation)
        except Unreadable:
            if not run.mend(generation):  # guard: mended-generation-retried
                raise
            return True
        if not findings:
            self._misread = str(error)
            return True
        if not intact(findings) and run.mend(generation):
            return True
        run.mark(generation, findings)
        return False

    def _nothing_good(self) -> NothingGood:
        reasons = "\n".join(f"  step {at}: {reason}" for at, reason in sorted(self._over, reverse=True))
        return NothingGood(
            f"no generation of this run is good:\n{reasons}",
            safe="\nNothing was loaded and nothing was deleted.",
            todo=self._remedy(),
        )

    def _remedy(self) -> str:
        """What may help where nothing is good."""
        if self._unfit:
            step = max(self._unfit)
            names = self._unfit[step]
            return (
                f"Step {step} is intact, and restore(step={step}) loads it by hand, as long as it is there. "
                f"If {', '.join(names)} may hold NaN or infinity, open the run with {exception(*names)}: "
                "saves are good from then on."
            )
        others = sorted({at.step for at in self._survey.generations} - {at for at, _ in self._over})
        if others:
            listed = ", ".join(map(str, others))
            return f"Outside the lineage there is still: {listed}; ask for it with restore(step=...)."
        return "Restore the files from a copy, or start over with restore(step=0)."


def _known_unfit(survey: Survey, passed_over: list[GenerationId]) -> dict[int, list[str]]:
    """Step -> tensors that hold NaN or infinity, of the generations that are marked so."""
    known = [survey.generations[at] for at in passed_over if at in survey.generations]
    return {one.step: [finding.tensor for finding in one.unfit[:3]] for one in known if one.unfit}
