"""Where the output of ranks goes: to the console, to files, or to both, with the options and formats of torchrun.

Output for both goes to a file, from which the supervisor copies whole lines to the console between its other work.

Invariants
  1. A console that nobody reads does not keep the supervisor from watching the ranks: it gets what it takes without
     waiting, and the rest stays in the file. A line of the supervisor itself is dropped after LINE_SECONDS.
  2. Each line reaches the console once, whole, after the name of its rank.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from .. import reporting
from .placement import TOUCH_SECONDS

STDOUT, STDERR = 1, 2
"""bits of a redirection, and descriptors of the console"""
NAMES = {STDOUT: "stdout", STDERR: "stderr"}
TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""the variable with another name of the rank before each line, as for torchrun"""
PREFIX = "[${role_name}${local_rank}]:"
"""that name where the variable does not give another one"""
READ_BYTES, CONSOLE_BYTES, LINE_CHARACTERS = 1 << 16, 4096, 1 << 16
"""taken from a file at once; given to the console at once, which a pipe takes whole (PIPE_BUF); the longest line that
is kept whole"""
LAST_SECONDS = 5.0
"""how long the console has to take more of what is left when an attempt is over"""
LONGEST_SECONDS = 30.0
"""how long it has in all: a process that a rank has left may go on writing"""
LINE_SECONDS = 1.0
"""how long the console has to take a line of the supervisor itself"""


@dataclass(frozen=True)
class Outputs:
    """What is done with the output of ranks.

    `redirects`: local rank -> bits of what goes to files. `tee`: local rank -> bits of what goes to the console too.
    `shown`: local ranks whose output the console gets; None: all. `filters`: STDOUT or STDERR -> texts; lines of `tee`
    that contain one of them go to a file of all ranks too. `template`: of the text before each line.
    """

    redirects: Mapping[int, int] = field(default_factory=dict)
    tee: Mapping[int, int] = field(default_factory=dict)
    shown: frozenset[int] | None = None
    filters: Mapping[int, Sequence[str]] = field(default_factory=dict)
    template: str = PREFIX

    def to_file(self, rank: int, stream: int) -> bool:
        """Whether a stream of a local rank goes to a file."""
        return bool((self.redirects.get(rank, 0) | self.tee.get(rank, 0)) & stream)

    def to_console(self, rank: int) -> bool:
        """Whether the console gets the output of a local rank that goes to no file."""
        return self.shown is None or rank in self.shown

    @property
    def any_file(self) -> bool:
        """Whether any output goes to a file."""
        return any(self.redirects.values()) or any(self.tee.values())


class _Tail:
    """The file of one stream of one rank, from which lines are copied. `prefix`: before each line."""

    def __init__(self, path: Path, stream: int, prefix: str) -> None:
        self.stream = stream
        self._file, self._prefix, self._text = os.open(path, os.O_RDONLY | os.O_CLOEXEC), prefix, ""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
        self._path, self._failed = path, False
        self.ended = False
        """whether all of the file was read"""

    def lines(self, last: bool) -> list[str]:
        """The next lines, some of them; empty if there is no whole one. `last`: no more will be written.

        A file that cannot be read is reported once, and copied no further.
        """
        if self._failed:
            self.ended = last
            return []
        try:
            data = os.read(self._file, READ_BYTES)
        except OSError as error:  # guard: unread-output-ends-no-job
            self._failed, self.ended = True, last
            reporting.warning(f"the output of a rank is no longer copied from {self._path}: {error}")
            return [f"{self._prefix}{self._text}\n"] if self._text else []
        self.ended = last and not data
        self._text += self._decoder.decode(data, final=self.ended)
        *whole, self._text = self._text.split("\n")
        if self._text and (self.ended or len(self._text) > LINE_CHARACTERS):
            whole, self._text = [*whole, self._text], ""
        return [f"{self._prefix}{one}\n" for one in whole]

    def close(self) -> None:
        os.close(self._file)


class Console:
    """Copies the output of the ranks of one attempt to the console. `folder`: of the attempt."""

    def __init__(self, outputs: Outputs, folder: Path) -> None:
        self._outputs, self._folder = outputs, folder
        self._tails = list[_Tail]()
        self._filtered = {
            stream: open(folder / f"filtered_{NAMES[stream]}.log", "w", errors="replace", buffering=1)  # noqa: SIM115
            for stream, texts in outputs.filters.items()
            if texts
        }
        self._unwritten = {STDOUT: b"", STDERR: b""}
        self._descriptors = dict[int, int]()
        """stream -> where it is written; without: nowhere"""

    def add(self, local: int, rank: int, role: str) -> None:
        """Copy the output of one rank, whose files exist."""
        if not self._outputs.to_console(local):
            return
        names = {"role_name": role, "rank": rank, "local_rank": local}
        prefix = Template(self._outputs.template).safe_substitute(names)
        for stream, name in NAMES.items():
            if self._outputs.tee.get(local, 0) & stream:
                self._tails.append(_Tail(self._folder / str(local) / f"{name}.log", stream, prefix))
                if stream not in self._descriptors:
                    self._descriptors[stream] = _without_waiting(stream)

    def copy(self) -> None:
        """Copy what the ranks have written and the console takes now."""
        for one in self._tails:
            self._copy(one, last=False)

    def close(self, touch: Callable[[], None]) -> None:
        """Copy what is left, after the ranks have ended, unless the console takes nothing for LAST_SECONDS.

        `touch`: is called meanwhile, at least each TOUCH_SECONDS.
        """
        now = time.monotonic()
        left, until, end = [*self._tails], now + LAST_SECONDS, now + LONGEST_SECONDS
        while left and time.monotonic() < min(until, end):
            touch()
            one = left[0]
            if self._copy(one, last=True):
                until = time.monotonic() + LAST_SECONDS
            elif self._unwritten[one.stream]:
                select.select([], [self._descriptors[one.stream]], [], TOUCH_SECONDS)
            elif one.ended:
                left.pop(0)
        for tail in self._tails:
            tail.close()
        for file in self._filtered.values():
            with contextlib.suppress(OSError):  # a full disk was reported
                file.close()
        for stream, descriptor in self._descriptors.items():
            if descriptor != stream:
                os.close(descriptor)

    def _copy(self, tail: _Tail, last: bool) -> bool:
        """Copy some lines, unless the console takes nothing now. Returns whether something was read or written."""
        lines = list[str]()
        if not self._unwritten[tail.stream]:
            lines = tail.lines(last)
            texts = self._outputs.filters.get(tail.stream, ())
            for line in lines:
                if any(text in line for text in texts):
                    self._filter(tail.stream, line)
            self._unwritten[tail.stream] = "".join(lines).encode(errors="replace")
        return self._write(tail.stream) or bool(lines)

    def _filter(self, stream: int, line: str) -> None:
        """Add a line to the file of those that have one of the texts. A failure is reported, once."""
        try:
            if stream in self._filtered:
                self._filtered[stream].write(line)
        except OSError as error:
            reporting.warning(f"{self._filtered.pop(stream).name} gets no more lines: {error}")

    def _write(self, stream: int) -> bool:
        """Give the console what it takes without waiting. Returns whether it took something."""
        before = data = self._unwritten[stream]
        if stream not in self._descriptors:
            data = b""
        while data and select.select([], [self._descriptors[stream]], [], 0)[1]:
            try:
                data = data[os.write(self._descriptors[stream], data[:CONSOLE_BYTES]) :]
            except BlockingIOError:
                break  # it takes less than it says
            except OSError as error:  # the file of each rank has everything
                if error.errno != errno.EPIPE:
                    reporting.warning(f"the console takes no more output of the ranks: {error}")
                if (descriptor := self._descriptors.pop(stream)) != stream:
                    os.close(descriptor)
                data = b""
        self._unwritten[stream] = data
        return data != before


class _Lines(io.TextIOBase):
    """A stream for lines of the supervisor: what its descriptor does not take within LINE_SECONDS is dropped."""

    def __init__(self, descriptor: int, encoding: str) -> None:
        self._descriptor, self._encoding, self._is_cut = descriptor, encoding, False

    def write(self, text: str) -> int:
        text_from_here = f"\n{text}" if self._is_cut else text  # what was cut has a line of its own
        data = whole = text_from_here.encode(self._encoding, errors="backslashreplace")
        until = time.monotonic() + LINE_SECONDS
        while data and (left := until - time.monotonic()) > 0:
            if select.select([], [self._descriptor], [], left)[1]:
                with contextlib.suppress(BlockingIOError):  # it takes less than it says
                    data = data[os.write(self._descriptor, data) :]
        self._is_cut = (self._is_cut and data == whole) or 0 < len(data) < len(whole)
        return len(text)


@contextlib.contextmanager
def unread_lines_dropped() -> Iterator[None]:
    """In the block, a line on stderr waits for no reader: it is dropped where the console does not take it in time."""
    with contextlib.ExitStack() as made:
        # A program has put something of its own there, or closed it.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream = sys.stderr.fileno()
            descriptor = _without_waiting(stream)
            if descriptor != stream:
                made.callback(os.close, descriptor)
            lines = _Lines(descriptor, sys.stderr.encoding or "utf-8")
            made.enter_context(contextlib.redirect_stderr(lines))  # guard: unread-console-holds-no-supervisor
        yield


def _without_waiting(stream: int) -> int:
    """A descriptor of the console on which a write never waits; `stream` itself where there is none.

    A terminal and a pipe say that they take something, and may wait for more room within the write. The mode of
    `stream` is shared with the ranks, so it stays.
    """
    mode = os.fstat(stream).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{stream}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    return stream
