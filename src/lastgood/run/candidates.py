"""Candidates of a restore: which generation is tried next, and how one that does not load is handled. Torch-free.

for generation in candidates:
    try:
        ...                                  # load it
        break
    except (Damaged, NotFinite) as error:
        candidates.failed(error)             # the next iteration examines, mends or marks it, and then goes on
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

from ..coordination.single_rank import AnyTopic
from ..engine.arena import Arena
from ..engine.finite import exception
from ..errors import Damaged, HalfLoaded, LastgoodError, LoadFailed, NotFinite, NothingGood, Unreadable
from ..format.commit import Survey
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS
from ..policy import restore
from ..ports import Tier
from ..records import Finding, Generation, GenerationId, intact, judged
from .content import Content
from .reader import read_all


class RestorableRun(Protocol):
    """A run as a restore uses it: its survey, the memory and threads for reading, and the handling of damage."""

    @property
    def survey(self) -> Survey: ...
    @property
    def workers(self) -> Executor: ...

    def place_of(self, generation: Generation, topic: AnyTopic | None = None) -> Tier:
        """The place from which a generation is read. With several ranks all call it, and agree in `topic`."""

    def gather(self, content: Content, wanted: Mapping[str, Sequence[int]], topic: AnyTopic) -> None:
        """Make chunks of a generation ready for this rank that lie on other nodes only, or that several ranks of a
        machine want. All ranks call it.

        `wanted`: file -> the indices of the chunks that this rank wants.
        """

    def arena(self, total_bytes: int, chunk_bytes: int) -> Arena:
        """The memory in which tensors are read: `total_bytes`, lent in chunks of `chunk_bytes`."""

    def examine(self, generation: Generation, topic: AnyTopic | None = None) -> list[Finding]:
        """Read all of a generation again, past the page cache, and return the findings.

        With several ranks, each one reads a part, and all agree on the findings in `topic` (None: a new topic).

        Raises Unreadable, Unavailable.
        """

    def mark(self, generation: Generation, findings: list[Finding]) -> None:
        """Store the findings beside the generation, so that later restores pass over it."""

    def mend(self, generation: Generation) -> bool:
        """Rebuild a damaged generation, which has what was found. Returns whether it is intact afterwards."""


class ReadOnlyRun:
    """A run that is open for reading only: generations are examined, but neither marked nor mended."""

    def __init__(self, tier: Tier, survey: Survey, workers: Executor) -> None:
        self._tier, self.survey, self.workers = tier, survey, workers

    def place_of(self, generation: Generation, topic: AnyTopic | None = None) -> Tier:
        return self._tier

    def gather(self, content: Content, wanted: Mapping[str, Sequence[int]], topic: AnyTopic) -> None:
        """Every file is readable: this process sees all of the place."""

    def arena(self, total_bytes: int, chunk_bytes: int) -> Arena:
        return Arena(total_bytes, chunk_bytes)

    def examine(self, generation: Generation, topic: AnyTopic | None = None) -> list[Finding]:
        return read_all(
            self.place_of(generation), generation, Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES), self.workers
        )

    def mark(self, generation: Generation, findings: list[Finding]) -> None:
        """Stores nothing: a run that is open for reading is never changed."""

    def mend(self, generation: Generation) -> bool:
        return False


class Found(NamedTuple):
    """The result of a search for a generation to load. `generation` is None if the run never had a commit."""

    generation: Generation | None
    stepped_over: list[tuple[int, str]]
    """step and reason of each newer generation that was passed over because it is not good"""
    misread: str = ""
    """the error of a first load of `generation` whose files were intact when they were read again: a fault of memory or
    of the connection to the disk; empty if there was none"""


class Candidates:
    """Iterates over the generations that a restore tries: those of the lineage, newest first; or only those of `step`.

    The caller loads each generation that the iteration yields. It stops at the first one that loads, and calls `failed`
    for every other. `run` (None: nothing is examined) then reads the failed generation again. If its files are intact,
    or could be mended from parity, the same generation is yielded a second time. Otherwise it is marked, and the next
    older generation follows. A failed load may have overwritten part of the caller's state; the next load must
    overwrite all of it.

    The constructor raises NoSuchStep. The iteration raises
      - the error of a generation that failed twice, and that of the last generation of an explicit `step`;
      - NothingGood, with the reason for each generation, if none is left;
      - HalfLoaded, where the state is a mixture of two steps and no other generation may be tried, and its subclass
        LoadFailed, where the user's loading code raised (`failed` raises that one at once);
      - the error of a generation that could not be read when the run was listed, before an older one would be tried;
      - what `run` raises.
    It ends without an error only if nothing was ever committed.
    """

    def __init__(self, survey: Survey, step: int | None = None, run: RestorableRun | None = None) -> None:
        self._survey, self._step, self._run = survey, step, run
        choice = restore.choose(survey, step)
        self._untried = choice.candidates
        self._passed_over = [(at.step, reason) for at, reason in choice.passed_over]
        self._unfit = _known_unfit(survey, [at for at, _ in choice.passed_over])
        self._error: Damaged | NotFinite | None = None
        self._misread = ""

    def __iter__(self) -> Iterator[Generation]:
        for at in self._untried:
            error, again = self._survey.broken.get(at), False
            if error is None:
                generation = self._survey.generations[at]
                yield generation
                error, again = self._handle_failure(generation)
                if again:
                    yield generation
                    error = self._taken_failure()
            if isinstance(error, HalfLoaded) or not isinstance(error, (Damaged, NotFinite)):
                raise error  # not before all ranks have examined the generation: else some would wait for this one
            if isinstance(error, NotFinite):
                self._unfit[at.step] = [error.tensor]
            if again or (self._step is not None and self.is_last(at)):  # guard: next-older-after-damage
                raise error
            self._passed_over.append((at.step, str(error)))
        if self._step is None and (end := restore.ends_at(self._survey)) is not None:
            raise self._survey.broken[end]  # guard: unread-generation-not-stepped-over
        if self._passed_over:
            raise self._nothing_good()

    def failed(self, error: Damaged | NotFinite) -> None:
        """Report that the current generation did not load. Raises LoadFailed at once: no other may be tried then."""
        if isinstance(error, LoadFailed):
            raise error
        self._error = error

    def is_last(self, at: GenerationId) -> bool:
        """Whether no older generation would be tried after this one."""
        return at == self._untried[-1]

    def found(self, generation: Generation | None) -> Found:
        """The result of the search after `generation` was loaded (None: nothing was ever committed)."""
        if generation is None:
            return Found(None, [])
        newer = [one for one in self._passed_over if one[0] >= generation.step]
        return Found(generation, sorted(newer, reverse=True), self._misread)

    def _taken_failure(self) -> Damaged | NotFinite:
        """Return the error that `failed` received for the current generation, and clear it."""
        error, self._error = self._error, None
        assert error is not None, "a generation was neither loaded nor reported as failed"
        return error

    def _handle_failure(self, generation: Generation) -> tuple[LastgoodError, bool]:
        """Examine a generation that did not load. Returns its error, and whether it is tried a second time."""
        error = self._taken_failure()
        try:
            return error, self._run is not None and self._examine(self._run, generation, error)
        except HalfLoaded:
            raise
        except (Damaged, NotFinite) as other:
            return other, False

    def _examine(self, run: RestorableRun, generation: Generation, error: LastgoodError) -> bool:
        """Read a failed generation again; mend or mark it if it is damaged. Returns whether it is intact now."""
        try:
            findings = run.examine(generation)
        except Unreadable:
            if not run.mend(generation):  # guard: mended-generation-retried
                raise
            return True
        if not findings:
            self._misread = str(error)
            return True
        if not intact(findings) and run.mend(judged(generation, findings)):
            return True
        run.mark(generation, findings)
        return False

    def _nothing_good(self) -> NothingGood:
        reasons = "\n".join(f"  step {at}: {reason}" for at, reason in sorted(self._passed_over, reverse=True))
        return NothingGood(
            f"no generation of this run is good:\n{reasons}",
            safe="\nNothing was loaded and nothing was deleted.",
            todo=self._remedy(),
        )

    def _remedy(self) -> str:
        """The advice to the user if no generation is good."""
        if self._unfit:
            step = max(self._unfit)
            names = [one for one in self._unfit[step] if one]
            text = f"Step {step} is intact, and restore(step={step}) loads it on request until it is deleted."
            if not names:  # what training did after it is known against it, and no tensor
                return text
            return (
                f"{text} If {', '.join(names)} may hold NaN or infinity, save with {exception(*names)}: "
                "later saves then count as good."
            )
        others = sorted({at.step for at in self._survey.generations} - {at for at, _ in self._passed_over})
        if others:
            listed = ", ".join(map(str, others))
            return f"Outside the lineage there are these steps: {listed}. Load one of them with restore(step=...)."
        return "Restore the files from a copy, or start over with restore(step=0)."


def _known_unfit(survey: Survey, passed_over: list[GenerationId]) -> dict[int, list[str]]:
    """Step -> names of tensors that hold NaN or infinity, of the passed over generations that are marked as unfit."""
    known = [survey.generations[at] for at in passed_over if at in survey.generations]
    return {one.step: [finding.tensor for finding in one.unfit[:3]] for one in known if one.unfit}
