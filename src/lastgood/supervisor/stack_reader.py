"""Where the ranks of a healthy job are: their stacks, read from outside by py-spy, for which nobody waits.

Each py-spy is a process of its own. It reads the memory of one rank (process_vm_readv), which is neither stopped nor
sent a signal; what it finds of a rank that runs may be wrong at times, so a single sample shows nothing. Ranks that
hang write their stacks themselves (watch.py). In a healthy job that could end a rank: faulthandler follows the frames
of threads that run on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .. import reporting
from ..policy.hang import Stuck
from .program import STACKS_FILE
from .watch import RankProcess, signs, state

READ_SECONDS = 5.0
"""A py-spy that runs for longer is ended; most take some hundredths of a second."""
MOST_FAILURES = 3
"""After so many readings in a row that have found no stack, none is begun any more."""


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _Thread(msgspec.Struct):
    os_thread_id: int | None
    frames: list[_Frame]


_DUMP = msgspec.json.Decoder(list[_Thread])


class _PySpy:
    """One py-spy, which reads one rank. It writes into memory, so that it never waits for a reader. Raises OSError."""

    def __init__(self, command: str, rank: RankProcess) -> None:
        self._signs, self._state, self._pid = signs(rank.rank, rank.shown), state(rank.pid), rank.pid
        with contextlib.ExitStack() as opened:
            self._found, self._problem = _memory("found", opened), _memory("problem", opened)
            self.process = subprocess.Popen(
                [command, "dump", "--nonblocking", "--json", "--pid", str(rank.pid)],
                stdin=subprocess.DEVNULL,
                stdout=self._found,
                stderr=self._problem,
                start_new_session=True,
            )
            opened.pop_all()

    def result(self) -> tuple[Stuck, str]:
        """The rank, with the stack of its main thread; with none, and the reason, if it was not found. Ends it."""
        if self.process.poll() is None:
            self.process.kill()
        found, problem = _taken(self._found), _taken(self._problem).decode(errors="replace").strip()
        try:
            calls = main_stack(found, self._pid) if self.process.returncode == 0 else []
        except msgspec.DecodeError as error:
            calls, problem = [], str(error)
        why = problem.partition("\n")[0] or f"it has not answered for {READ_SECONDS:.0f} s"
        return Stuck(self._signs, self._state, calls), "" if calls else why


class Reading:
    """Where ranks were at one moment. `began`: when."""

    def __init__(self, reader: StackReader, dumps: Sequence[_PySpy], now: float) -> None:
        self._reader, self._dumps, self.began = reader, dumps, now

    def poll(self, now: float) -> list[Stuck] | None:
        """All ranks, once all were read; None before that. The stack of one that could not be read is empty."""
        if now - self.began < READ_SECONDS and any(one.process.poll() is None for one in self._dumps):
            return None
        return self._reader.ended(self._dumps)

    def drop(self) -> None:
        """End it, because its result is not wanted any more."""
        self._reader.dropped(self._dumps)


class StackReader:
    """Reads the stacks of ranks. `command`: the path of py-spy; None: it is not installed.

    Where they cannot be read that is reported, each reason once, `usable` is False for the rest of the attempt, and the
    job goes on without.
    """

    def __init__(self, command: str | None) -> None:
        self._command, self.usable = command, True
        self._failures = 0
        """how many readings in a row have found nothing"""
        self._started = list[_PySpy]()
        """those whose results were not taken"""
        self._python = set[Path]()
        """the folders of ranks that are Python programs and have begun"""
        self._reported = set[str]()

    def read(self, ranks: Sequence[RankProcess], now: float) -> Reading | None:
        """Begin to read. None: it cannot be done, or not all ranks are Python programs that have begun."""
        if not self.usable or not self._have_begun(ranks):
            return None
        if self._command is None:
            self._give_up("py-spy is not installed", "Install it: pip install 'lastgood[stacks]'")
            return None
        dumps = list[_PySpy]()
        try:
            for one in ranks:
                dumps.append(_PySpy(self._command, one))
                self._started.append(dumps[-1])
        except OSError as error:
            self.dropped(dumps)
            why = f"{self._command} cannot be started: {error.strerror}"
            self._give_up(why, "Install py-spy again, if another attempt says so too")
            return None
        return Reading(self, dumps, now)

    def _have_begun(self, ranks: Sequence[RankProcess]) -> bool:
        """Whether these ranks are Python programs that have begun, as far as is seen now."""
        try:
            for one in ranks:
                if one.folder not in self._python and (one.folder / STACKS_FILE).exists():
                    self._python.add(one.folder)
        except OSError:  # a disk that does not answer now
            return False
        return all(one.folder in self._python for one in ranks)

    def ended(self, dumps: Sequence[_PySpy]) -> list[Stuck]:
        """What they have found."""
        self._started = [one for one in self._started if one not in dumps]
        found = [one.result() for one in dumps]
        self._failures = 0 if any(one.stack for one, _ in found) else self._failures + 1
        if self._failures == MOST_FAILURES:
            allow = "Let it read other processes of this user: in a container by the capability SYS_PTRACE"
            self._give_up(f"py-spy cannot read the stacks of ranks: {found[0][1]}", allow)
        return [one for one, _ in found]

    def dropped(self, dumps: Sequence[_PySpy]) -> None:
        """End these, whose results are not wanted. They are not waited for."""
        for one in dumps:
            if one in self._started:
                self._started.remove(one)
                one.result()

    def close(self) -> None:
        """End every py-spy whose result was not taken, at the end of an attempt. The next one tries anew."""
        self.dropped([*self._started])
        self._python.clear()
        self._failures, self.usable = 0, True

    def _give_up(self, what: str, todo: str) -> None:
        self.usable = False
        if what not in self._reported:
            self._reported.add(what)
            reporting.info(
                f"{what}, so slow ranks, and one that never opens its run, are not named. The job goes on without. "
                f"{todo}."
            )


def _memory(name: str, opened: contextlib.ExitStack) -> int:
    """A file in memory, which is closed with `opened`."""
    descriptor = os.memfd_create(name)
    opened.callback(os.close, descriptor)
    return descriptor


def _taken(descriptor: int) -> bytes:
    """The whole content of a file, which is closed."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def py_spy() -> str | None:
    """The path of py-spy, beside this Python or in PATH; None: it is not installed."""
    own = Path(sys.executable).with_name("py-spy")
    return str(own) if os.access(own, os.X_OK) else shutil.which("py-spy")


def main_stack(dump: bytes, pid: int) -> list[str]:
    """The calls of the main thread in a dump, as faulthandler writes them, the innermost first; empty: there are none.

    `pid`: of the process; its main thread has the same number, where py-spy knows those (Python 3.11).
    Else it is the last one: threads are listed from the newest to the oldest. Raises msgspec.DecodeError.
    """
    threads = _DUMP.decode(dump)
    main = [one for one in threads if one.os_thread_id == pid] or threads[-1:]
    frames = [frame for one in main for frame in one.frames]
    return [f'File "{one.filename}", line {one.line} in {one.name.rpartition(".")[2]}' for one in frames]
