"""A process that has imported torch once, and forks the ranks of each attempt: `python -m lastgood.supervisor.zygote`.

    zygote -> supervisor   Ready: what could not be imported
    supervisor -> zygote   Fork: what a rank runs, with the descriptors of its stdout and stderr
    zygote -> supervisor   the process id of the rank; 0: it could not be forked

The zygote forks a child that forks the rank and ends, so the rank becomes a child of the supervisor (program.py), which
learns of its end by itself. The zygote never touches a device, and has one thread.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ..errors import Cancelled, Refused, TierDown
from ..io import os_errors
from ..records import Record
from . import framed, program
from .placement import TOUCH_SECONDS
from .program import Program
from .signals import Signals

THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's library would start threads when it is imported, which a fork does not copy."""
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "lastgood.loop.checkpointer")
"""what is imported in any case; torch._dynamo, because torch imports it when it reports an error"""


class Fork(Record, frozen=True, kw_only=True):
    """The start of one rank. `environment`: all variables of its process. `supervisor`: its process id."""

    program: Program
    environment: dict[str, str]
    supervisor: int


class Ready(Record, frozen=True, kw_only=True):
    """The first message of a zygote. `failed`: modules that could not be imported, each with the reason."""

    failed: dict[str, str]


class Zygote:
    """The zygote, as the supervisor sees it. It begins at once.

    `modules`: what it imports beside PRELOAD. `environment`: variables that libraries read when they are imported.
    `signals`: once they ask for the end of the job, nothing is waited for. Raises TierDown if it cannot be started.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], signals: Signals) -> None:
        self._modules, self._signals = modules, signals
        with os_errors.needed("the process from which ranks are forked cannot be started", ""):
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [*program.PYTHON, "lastgood.supervisor.zygote", str(theirs.fileno()), *PRELOAD, *modules],
                    pass_fds=[theirs.fileno()],
                    env={**environment, **os.environ, **THREADS},
                    start_new_session=True,
                )

    def ready(self, touch: Callable[[], None]) -> None:
        """Wait until it has imported everything. `touch`: is called meanwhile, because that may take minutes.

        Raises Refused if one of `modules` could not be imported, and what `fork` and `touch` raise.
        """
        failed = msgspec.json.decode(self._answer(touch), type=Ready).failed
        for name in self._modules:
            if name in failed:
                raise Refused(
                    f"{name} cannot be imported before ranks are forked: {failed[name]}",
                    safe="Nothing was started.",
                    todo="Correct --preload, or leave it out.",
                )

    def fork(self, start: Fork, stdout: int, stderr: int) -> int:
        """Start a rank; returns its process id. `stdout`, `stderr`: its descriptors.

        Raises TierDown if that failed, and Cancelled if the job is to end.
        """
        # Not by msgspec: the environment may have bytes that are not UTF-8.
        message = json.dumps(msgspec.to_builtins(start)).encode()
        try:
            framed.send(self._socket, message, [stdout, stderr])
        except OSError as error:
            raise _ended(error) from error
        if (pid := int(self._answer(lambda: None))) == 0:
            raise TierDown("a rank could not be forked", safe="", todo="Look at the limit of processes: ulimit -u.")
        return pid

    @property
    def alive(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it. The ranks go on."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self, touch: Callable[[], None]) -> bytes:
        waiting = [self._socket.fileno(), self._signals.descriptor]
        while waiting[0] not in select.select(waiting, [], [], TOUCH_SECONDS)[0]:
            self._signals.drain()
            if self._signals.end is not None:
                raise Cancelled("the job was asked to end")
            touch()
        try:
            return framed.receive(self._socket)
        except (OSError, EOFError) as error:
            raise _ended(error) from error


def _ended(error: Exception) -> TierDown:
    return TierDown(
        f"the process from which ranks are forked has ended: {error}", safe="", todo="Try again, or give --spawn."
    )


# ---- in the zygote ---------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> Fork | None:
    """Fork a rank for each request. Returns in each rank, with what it is to run; None at the end of the zygote."""
    while True:
        try:
            head, descriptors, _, _ = socket.recv_fds(connection, framed.LENGTH_BYTES, 2)
            if not head:
                return None
            head += framed.exactly(connection, framed.LENGTH_BYTES - len(head))
            text = framed.exactly(connection, int.from_bytes(head, "big"))
        except (OSError, EOFError):
            return None
        pid = _forked()
        if pid is None:
            connection.close()
            start = msgspec.convert(json.loads(text), Fork)
            _become(start, descriptors)
            return start
        for one in descriptors:
            os.close(one)
        try:
            framed.send(connection, str(pid).encode())
        except OSError:
            return None


def _forked() -> int | None:
    """Fork a process whose parent has ended. Returns its process id, or 0 if that failed; None in the new process."""
    read, write = os.pipe()
    with open(read, "rb") as reader:
        try:
            child = os.fork()
        except OSError:
            os.close(write)
            return 0
        if child == 0:
            between = os.getpid()
            with contextlib.suppress(OSError):
                pid = os.fork()
                if pid == 0:
                    os.close(write)
                    while os.getppid() == between:
                        os.sched_yield()
                    return None
                os.write(write, str(pid).encode())
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        return int(reader.read() or b"0")


def _become(start: Fork, descriptors: Sequence[int]) -> None:
    os.setsid()
    program.become_rank(start.supervisor, start.environment)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # otherwise every rank would draw the same numbers, in every attempt
    for number, one in enumerate(descriptors, start=1):
        os.dup2(one, number)
        os.close(one)


def main() -> None:
    """Import the modules, then fork ranks until the supervisor ends."""
    program.forget_current_folder()
    connection, failed = socket.socket(fileno=int(sys.argv[1])), dict[str, str]()
    for name in sys.argv[2:]:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - the program may do without it, and says so itself otherwise
            failed[name] = f"{type(error).__name__}: {error}"
    framed.send(connection, msgspec.json.encode(Ready(failed=failed)))
    start = _serve(connection)
    if start is not None:
        program.run(start.program)


if __name__ == "__main__":
    main()
