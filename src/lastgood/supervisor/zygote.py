"""A process that has imported torch once, and forks the ranks of each attempt: `python -m lastgood.supervisor.zygote`.

    zygote -> supervisor   Ready: what could not be imported
    supervisor -> zygote   Fork: what a rank runs, with the descriptors of its stdout and stderr; or, of a process that
                           waits to become one (ahead.py), with its connection to the supervisor
    zygote -> supervisor   the process id of the rank; 0: it could not be forked

The zygote forks a child that forks the rank and ends, so the rank becomes a child of the supervisor (program.py), which
learns of its end by itself. The zygote never touches a device, and has one thread.
"""

from __future__ import annotations

import contextlib
import gc
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
from ..io import os_errors, processes
from ..records import Record
from . import framed, program
from .ahead import Ahead, awaited
from .placement import TOUCH_SECONDS
from .program import Program
from .signals import Signals

THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's library would start threads when it is imported, which a fork does not copy."""
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "lastgood.loop.checkpointer")
"""what is imported in any case; torch._dynamo, because torch imports it when it reports an error"""
FORK_SECONDS = 60.0
"""how long one fork may take"""


class Fork(Record, frozen=True, kw_only=True):
    """The start of one rank. `environment`: all variables of its process. `supervisor`: its process id. `waits`:
    whether the process waits for another `Fork`, and becomes that rank."""

    program: Program
    environment: dict[str, str]
    supervisor: int
    waits: bool = False


class Ready(Record, frozen=True, kw_only=True):
    """The first message of a zygote. `failed`: modules that could not be imported, each with the reason."""

    failed: dict[str, str]


class Zygote:
    """The zygote, as the supervisor sees it. It begins at once.

    `modules`: what it imports beside PRELOAD. `environment`: variables that libraries read when they are imported.
    `signals`: once they ask for the end of the job, nothing is waited for. Raises TierDown if it cannot be started.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], signals: Signals) -> None:
        self._modules, self._signals, self._ahead = modules, signals, Ahead()
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

        Raises Refused if one of `modules` could not be imported, Cancelled if the job is to end, and what `fork` and
        `touch` raise.
        """
        failed = msgspec.json.decode(self._answer(touch), type=Ready).failed
        for name in self._modules:
            if name in failed:
                raise Refused(
                    f"{name} cannot be imported before ranks are forked: {failed[name]}",
                    safe="Nothing was started.",
                    todo="Correct --preload, or leave it out.",
                )

    def fork(self, start: Fork, local: int, stdout: int, stderr: int) -> int:
        """Start a rank, in the process that waits for this local rank if one does. Returns its process id.

        `stdout`, `stderr`: its descriptors. Raises TierDown if that failed.
        """
        message = _encoded(start)
        if pid := self._ahead.start(local, message, [stdout, stderr]):
            return pid
        self._send(message, [stdout, stderr])
        return self._new_process()

    def fork_ahead(self, start: Fork, local: int) -> None:
        """Fork a process that waits for the start of this local rank. `start`: with `waits`. Raises TierDown."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as failed:
            failed.enter_context(ours)
            with theirs:
                self._send(_encoded(start), [theirs.fileno()])
            self._ahead.add(local, self._new_process(), ours)
            failed.pop_all()

    @property
    def alive(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it, and the processes that wait. The ranks go on."""
        self._ahead.close()
        self._socket.close()
        processes.end_group(self._process)

    def _answer(self, touch: Callable[[], None]) -> bytes:
        waiting = [self._socket.fileno(), self._signals.descriptor]
        while waiting[0] not in select.select(waiting, [], [], TOUCH_SECONDS)[0]:
            self._signals.drain()
            if self._signals.end is not None:
                raise Cancelled("the job was asked to end")
            touch()
        return self._received()

    def _new_process(self) -> int:
        """The process id that it answers. No signal interrupts this: a rank that has begun has to be known, or nobody
        ends it; and ranks that train are to save first. A zygote that does not answer in time is ended, because its
        answer would be taken for that of the next fork."""
        if not select.select([self._socket], [], [], FORK_SECONDS)[0]:  # guard: fork-is-not-awaited-for-ever
            processes.end_group(self._process)  # guard: late-fork-is-no-other-rank
            raise _ended(TimeoutError(f"it has not answered for {FORK_SECONDS:.0f} s"))
        return _forked_as(self._received())

    def _received(self) -> bytes:
        try:
            return framed.receive(self._socket)
        except (OSError, EOFError) as error:
            raise _ended(error) from error

    def _send(self, message: bytes, descriptors: Sequence[int]) -> None:
        try:
            framed.send(self._socket, message, descriptors)
        except OSError as error:
            raise _ended(error) from error


def _encoded(start: Fork) -> bytes:
    # Not by msgspec: the environment may have bytes that are not UTF-8.
    return json.dumps(msgspec.to_builtins(start)).encode()


def _decoded(text: bytes) -> Fork:
    return msgspec.convert(json.loads(text), Fork)


def _forked_as(answer: bytes) -> int:
    if (pid := int(answer)) == 0:
        raise TierDown("a rank could not be forked", safe="", todo="Look at the limit of processes: ulimit -u.")
    return pid


def _ended(error: Exception) -> TierDown:
    return TierDown(
        f"the process from which ranks are forked does not answer: {error}", safe="", todo="Try again, or give --spawn."
    )


# ---- in the zygote ---------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> Fork | None:
    """Fork a rank for each request. Returns in each rank, with what it is to run; None at the end of the zygote."""
    while True:
        try:
            text, descriptors = framed.receive_with(connection, 2)
        except (OSError, EOFError):
            return None
        pid = _forked()
        if pid is None:
            connection.close()
            os.setsid()
            start = _decoded(text)
            if start.waits:
                program.become_rank(start.supervisor, start.environment)
                with socket.socket(fileno=descriptors[0]) as to_supervisor:
                    text, descriptors = awaited(int(start.environment["LOCAL_RANK"]), to_supervisor)
                start = _decoded(text)
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
    program.become_rank(start.supervisor, start.environment)
    # Otherwise every rank would draw the same numbers, in every attempt. Python seeds its own generator at a fork.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # guard: forked-ranks-draw-own-numbers
    for number, one in enumerate(descriptors, start=1):
        os.dup2(one, number)
        if one != number:  # which it is where the zygote itself had no such descriptor
            os.close(one)


def main() -> None:
    """Import the modules, then fork ranks until the supervisor ends."""
    program.forget_current_folder()
    # Blocked and not ignored, so that the ranks are forked with the handlers that Python has set.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, processes.JOB_ENDS)  # guard: zygote-outlives-signals
    connection, failed = socket.socket(fileno=int(sys.argv[1])), dict[str, str]()
    for name in sys.argv[2:]:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - the program may do without it, and says so itself otherwise
            failed[name] = f"{type(error).__name__}: {error}"
    gc.freeze()  # else each rank's collections pass over all of torch, and copy pages that it shares with the zygote
    framed.send(connection, msgspec.json.encode(Ready(failed=failed)))
    start = _serve(connection)
    if start is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)  # guard: ranks-receive-signals
        program.run(start.program)


if __name__ == "__main__":
    main()
