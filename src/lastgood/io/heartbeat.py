"""What a training process shows of its progress to the process that supervises it: one page of shared memory a rank.

A training process writes its page without a system call. It never reads it, and never waits for anybody.

Invariant: each number is one aligned store of 8 bytes, so a reader finds the old number or the new one. A text is
written before the number that says how long it is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from ..errors import Refused
from . import processes

VARIABLE = "LASTGOOD_HEARTBEAT"
"""The environment variable that names the page of a rank. Without it nothing is shown."""
PAGE_BYTES = 8192
_INCARNATION_AT, _PHASE_AT, _TEXT_AT = 192, 256, 512
_INCARNATION_LIMIT = _PHASE_AT - _INCARNATION_AT
_PHASE_LIMIT, _TEXT_LIMIT = _TEXT_AT - _PHASE_AT, PAGE_BYTES - _TEXT_AT


class _Field(IntEnum):
    """The position of each number. Times are nanoseconds of the system-wide monotonic clock; 0: it has not happened.
    OWNER: the process that writes the page; negative: while one of its runs does. STARTED, NAMESPACE: of that process,
    as processes.started_ticks and namespace have them. SIGN: the newest sign of life after
    the first step. LONGEST: the longest time between two signs, in which no phase was open, once two steps are
    completed. PHASE: when the phase that is open began. EPOCH, WINDOW: position of the sampler at STEP; WINDOWS: how
    many windows STEP has trained.
    FAILED: an exception has ended the script. SAVED: the newest step whose save is committed. TEXT, PHASE_TEXT,
    INCARNATION: the lengths of texts. CLOSED: the run was closed. JUST_IN_TIME: how long the rank may take to write
    what it holds when another one has died, in nanoseconds; 0: it does not. WRITTEN: when it has done so.
    """

    BEGUN = 0
    OPENED = 1
    RESTORED = 2
    RESTORED_STEP = 3
    FIRST = 4
    STEP = 5
    BEAT = 6
    TEXT = 7
    OWNER = 8
    SIGN = 9
    LONGEST = 10
    PHASE = 11
    PHASE_TEXT = 12
    EPOCH = 13
    WINDOW = 14
    WINDOWS = 15
    FAILED = 16
    INCARNATION = 17
    SAVED = 18
    CLOSED = 19
    JUST_IN_TIME = 20
    WRITTEN = 21
    STARTED = 22
    NAMESPACE = 23


class Owner(NamedTuple):
    """A process. `started_ticks`: as of processes.started_ticks; another process may have its number later."""

    pid: int
    started_ticks: int


class Position(NamedTuple):
    """Where a sampler stands: the epoch, the first window that is not trained, and the windows of the last step."""

    epoch: int
    window: int
    windows: int


class Progress(NamedTuple):
    """What a rank has shown. Times: seconds of the monotonic clock; None: it has not happened."""

    begun: float | None
    """when the training script began"""
    opened: float | None
    """when the run was open"""
    restored: float | None
    """when the state was restored"""
    restored_step: int
    """0 where nothing was restored"""
    incarnation: str
    """of the generation that was restored; empty where nothing was"""
    first: float | None
    """when the first step after that was completed"""
    step: int
    """the newest step that was completed"""
    beat: float | None
    """when"""
    saved_step: int
    """the newest step whose save was committed, as far as this rank knows; 0: none that it knows of"""
    run: str
    """the path or URL of the run; empty until it is open"""
    sign: float | None
    """the newest sign of life after the first step: a step, or the begin or end of a phase"""
    longest_seconds: float
    """the longest time between two signs outside of phases, after the first step; 0.0: not known"""
    phase: str
    """name of the phase that is open; empty: none is"""
    phase_began: float | None
    closed: float | None
    """when the run was closed; None: it is open, or never was"""
    failed: float | None
    """when an exception has ended the script"""
    position: Position
    """of the sampler at `step`; windows is 0 if it is not known"""
    just_in_time_seconds: float = 0.0
    """how long the rank may take to write what it holds when another one has died; 0.0: it does not"""
    written: float | None = None
    """when it has done so, or has found that another rank does"""
    rank: int | None = None
    """None: not known"""


class Heartbeat:
    """The page of one rank, as the rank writes it. `path`: of the file, as `create` has made it. Raises OSError."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._numbers = memoryview(self._memory).cast("q")
        self._beats = 0
        """how many steps the run has completed that writes the page"""
        self._is_new = True
        """whether nothing of this run was restored yet"""

    def begin(self) -> None:
        """The training script begins, in this process."""
        self._own(os.getpid())
        self._numbers[_Field.BEGUN] = time.monotonic_ns()

    def taken(self) -> bool:
        """Let one run write the page. Returns False if another process has it, or another run of this one. What a
        process had that has ended is free: a command may run one program after the other."""
        if self._numbers[_Field.OWNER] not in (0, os.getpid()) and not self._owner_has_ended():  # guard: one-run-beats
            return False
        for field in _OF_ONE_RUN:  # of a run that was closed before
            self._numbers[field] = 0  # guard: run-begins-without-signs
        self._own(-os.getpid())
        return True

    def _own(self, owner: int) -> None:
        self._numbers[_Field.STARTED] = processes.started_ticks(os.getpid())
        self._numbers[_Field.NAMESPACE] = processes.namespace()
        self._numbers[_Field.OWNER] = owner

    def _owner_has_ended(self) -> bool:
        """False also where that is not shown here: another container may share the memory, and not the processes."""
        if self._numbers[_Field.NAMESPACE] != processes.namespace() or not self._numbers[_Field.STARTED]:
            return False
        return processes.started_ticks(abs(self._numbers[_Field.OWNER])) != self._numbers[_Field.STARTED]

    def ended(self) -> None:
        """No step follows, so there are no windows with which it trains."""
        self._numbers[_Field.WINDOWS] = 0

    def released(self) -> None:
        """The run that wrote the page is closed."""
        self._numbers[_Field.OWNER] = os.getpid()
        self._numbers[_Field.CLOSED] = time.monotonic_ns()

    def opened(self, run: str) -> None:
        """A run was opened. Raises Refused as `own`."""
        text = _encoded(run)[:_TEXT_LIMIT]
        self._memory[_TEXT_AT : _TEXT_AT + len(text)] = text
        self._numbers[_Field.TEXT] = len(text)
        self._numbers[_Field.OPENED] = time.monotonic_ns()

    def restored(self, step: int, incarnation: str = "", position: Position | None = None) -> None:
        """The state is that of a step; 0: nothing was restored. What was restored first of this run is shown.

        `incarnation`: of the generation. `position`: of the sampler, and the windows of the next step; None: not known.
        """
        numbers = self._numbers
        at = position or (0, 0, 0)  # guard: position-is-that-of-this-run
        numbers[_Field.EPOCH], numbers[_Field.WINDOW], numbers[_Field.WINDOWS] = at
        numbers[_Field.STEP] = step
        self._beats = self._numbers[_LONGEST] = 0  # guard: restored-run-has-no-longest-step
        for field in _UNTIL_RESTORED if self._is_new else ():  # guard: steps-are-those-of-one-run
            self._numbers[field] = 0
        self._is_new = False
        if not self._numbers[_Field.RESTORED]:
            text = incarnation.encode()[:_INCARNATION_LIMIT]
            self._memory[_INCARNATION_AT : _INCARNATION_AT + len(text)] = text
            self._numbers[_Field.INCARNATION] = len(text)
            self._numbers[_Field.RESTORED_STEP] = step
            self._numbers[_Field.RESTORED] = time.monotonic_ns()

    def beat(self, step: int, position: Position | None = None) -> None:
        """A step is completed. `position`: of the sampler; None: not known."""
        numbers = self._numbers
        self._beats += 1
        now = self._sign()
        if not numbers[_FIRST]:
            numbers[_FIRST] = now
        if position is not None:
            numbers[_Field.EPOCH], numbers[_Field.WINDOW], numbers[_Field.WINDOWS] = position
        numbers[_STEP] = step
        numbers[_BEAT] = now

    def saved(self, step: int) -> None:
        """The newest step whose save is committed."""
        self._numbers[_SAVED] = step

    def phase(self, name: str) -> None:
        """A phase begins, in place of the one that was open; with an empty name: none is open."""
        numbers, text = self._numbers, name.encode()[:_PHASE_LIMIT]
        now = self._sign()
        numbers[_PHASE] = 0
        self._memory[_PHASE_AT : _PHASE_AT + len(text)] = text
        numbers[_Field.PHASE_TEXT] = len(text)
        numbers[_PHASE] = now if text else 0

    def can_save_just_in_time(self, seconds: float) -> None:
        """If another rank dies, this one may take so long to write what it holds; 0: it does not."""
        self._numbers[_Field.JUST_IN_TIME] = int(1e9 * seconds)

    def wrote_just_in_time(self) -> None:
        """This rank has written what it holds, or has found that another one does."""
        self._numbers[_Field.WRITTEN] = time.monotonic_ns()

    def failed(self) -> None:
        """An exception has ended the script."""
        self._numbers[_Field.FAILED] = time.monotonic_ns()

    def _sign(self) -> int:
        """Note a sign of life, and how long there was none. Returns the time.

        Between the first step and the second only the second counts: a save after the first one ends soon, and the
        second step may be compiled.
        """
        numbers, now = self._numbers, time.monotonic_ns()
        before = numbers[_SIGN]
        # guard: second-step-sets-the-limit
        if self._beats > 1 and not numbers[_PHASE] and now - before > numbers[_LONGEST]:
            numbers[_LONGEST] = now - before
        numbers[_SIGN] = now
        return now


# Attributes of an Enum take longer to read than the stores themselves.
_FIRST, _STEP, _SAVED, _BEAT = int(_Field.FIRST), int(_Field.STEP), int(_Field.SAVED), int(_Field.BEAT)
_SIGN, _LONGEST, _PHASE = int(_Field.SIGN), int(_Field.LONGEST), int(_Field.PHASE)
_OF_ONE_RUN = (
    *(_Field.OPENED, _Field.FIRST, _Field.SIGN, _Field.PHASE, _Field.LONGEST, _Field.CLOSED),
    *(_Field.JUST_IN_TIME, _Field.WRITTEN),
)
"""What a run that was opened before must not have left."""
_UNTIL_RESTORED = _Field.RESTORED, _Field.SAVED, _Field.BEAT
"""The same, once the next run is restored: its steps are not to be compared with those of the run before. Until then
these say how far this attempt of the job has come."""


def own(environ: Mapping[str, str] = os.environ, run: str = "") -> Heartbeat | None:
    """The page of this process; None if nobody supervises it, if the page is gone, or if a run has it already.

    `run`: what will be opened. Raises Refused if somebody supervises and its path is no text: records are JSON.
    """
    if VARIABLE in environ:
        _encoded(run)
    try:
        page = Heartbeat(environ[VARIABLE])
        return page if page.taken() else None
    except (KeyError, OSError, ValueError):
        return None


def _encoded(run: str) -> bytes:
    try:
        return run.encode()
    except UnicodeEncodeError as error:
        raise Refused(
            f"the path of the run has bytes that are no text under this locale: {os.fsencode(run)!r}",
            safe="Nothing was saved, and earlier generations are untouched.",
            todo="Set PYTHONUTF8=1 (or LANG=C.UTF-8), or give the run a name in UTF-8.",
        ) from error


def begin(environ: Mapping[str, str] = os.environ) -> None:
    """Show that the training script begins in this process, if it is supervised."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        Heartbeat(environ[VARIABLE]).begin()


def note_failed(environ: Mapping[str, str] = os.environ) -> None:
    """Show that an exception has ended the script in this process, if it is supervised."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        Heartbeat(environ[VARIABLE]).failed()


def create(path: str) -> None:
    """Make an empty page. Raises OSError."""
    with open(path, "xb") as file:
        file.write(bytes(PAGE_BYTES))


def owner(path: str) -> Owner | None:
    """The process that has a run open and writes this page, if it lives and is shown here; else None."""
    numbers = memoryview(_page(path)).cast("q")
    found = Owner(-numbers[_Field.OWNER], numbers[_Field.STARTED])
    here = numbers[_Field.NAMESPACE] == processes.namespace()
    lives = found.pid > 0 and here and processes.started_ticks(found.pid) == found.started_ticks != 0
    return found if lives else None


def _page(path: str) -> bytes:
    """One that is gone, because somebody has removed it, shows nothing."""
    try:
        with open(path, "rb") as file:
            return file.read(PAGE_BYTES).ljust(PAGE_BYTES, b"\0")
    except OSError:
        return bytes(PAGE_BYTES)


def read(path: str) -> Progress:
    """What is on a page. One that is gone shows nothing."""
    page = _page(path)
    numbers = memoryview(page).cast("q")

    def seconds(field: _Field) -> float | None:
        return numbers[field] / 1e9 if numbers[field] else None

    def text(at: int, length: _Field) -> str:
        return page[at : at + numbers[length]].decode(errors="replace")

    return Progress(
        begun=seconds(_Field.BEGUN),
        opened=seconds(_Field.OPENED),
        restored=seconds(_Field.RESTORED),
        restored_step=numbers[_Field.RESTORED_STEP],
        incarnation=text(_INCARNATION_AT, _Field.INCARNATION),
        first=seconds(_Field.FIRST),
        step=numbers[_Field.STEP],
        beat=seconds(_Field.BEAT),
        saved_step=numbers[_Field.SAVED],
        run=text(_TEXT_AT, _Field.TEXT),
        sign=seconds(_Field.SIGN),
        longest_seconds=numbers[_Field.LONGEST] / 1e9,
        phase=text(_PHASE_AT, _Field.PHASE_TEXT),
        phase_began=seconds(_Field.PHASE),
        closed=seconds(_Field.CLOSED) if numbers[_Field.OWNER] > 0 else None,
        failed=seconds(_Field.FAILED),
        position=Position(numbers[_Field.EPOCH], numbers[_Field.WINDOW], numbers[_Field.WINDOWS]),
        just_in_time_seconds=numbers[_Field.JUST_IN_TIME] / 1e9,
        written=seconds(_Field.WRITTEN),
    )
