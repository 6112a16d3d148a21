"""One rank of a supervised job, in its own process: its environment is set, then the user's program runs as `__main__`.

Invariants
  1. The process ends when its supervisor ends, however that happens.
  2. An exception that ends the program is written to the rank's error file at once, before other ranks can notice it.
     Once it is printed too, the supervisor is shown that the program has failed, and need not wait for its end.
     Where it cannot be written, as on a full disk, it is written beside the heartbeat page, in memory.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import importlib.util
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
import zipfile
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal

import msgspec

from .. import errors
from ..io import heartbeat, processes
from ..records import Record

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Names the file to which a rank writes the error that ends it, in the format of torch.distributed.elastic."""
PYTHON = [sys.executable, "-u", *processes.SAFE_PATH, "-m"]
"""How Python is started: as torchrun does, with output that is not held back."""
CPUS = "LASTGOOD_CPUS"
"""The variable with the processors to which a rank is bound, with commas between them; a rank does not see it."""
STACKS = signal.SIGRTMIN + 9
"""The signal that makes a rank write the stacks of its threads. Neither Python, torch nor a scheduler uses it."""
STACKS_FILE = "stacks.txt"
"""beside the error file; it is there once the rank can write its stacks"""


class Program(Record, frozen=True, kw_only=True):
    """What a rank runs. `kind`: what `name` is: a script, a module, or a command. `arguments`: those that follow it."""

    kind: Literal["script", "module", "command"]
    name: str
    arguments: list[str]


def error_in_memory(page: str) -> str:
    """Where a rank writes its error if its error file has no room. `page`: path of its heartbeat page."""
    return f"{page}.error"


def become_rank(supervisor: int, environment: Mapping[str, str]) -> None:
    """Turn this process, a new one, into a rank. Ends it if its supervisor has ended.

    `supervisor`: its process id. `environment`: all variables of the rank.
    """
    processes.die_with(supervisor)
    processes.readable_by(supervisor)
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    sys.excepthook = _noting(environment.get(ERROR_FILE, ""))


def run(program: Program) -> None:
    """Run the program as `__main__` in this process. Returns at its end; raises what it raises."""
    error_file, rank = os.environ.get(ERROR_FILE, ""), os.getpid()
    try:
        _run(program, error_file)
    except SystemExit as error:  # Python gives it to no hook
        # guard: forked-child-is-no-rank
        if os.getpid() == rank and error.code is not None and not isinstance(error.code, int):
            _write_error(error_file, SystemExit, error, error.__traceback__)
        raise


def _run(program: Program, error_file: str) -> None:
    if cpus := os.environ.pop(CPUS, ""):
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    if program.kind == "command":
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and a command would inherit that
            signal.signal(number, signal.SIG_DFL)
        os.execvp(program.name, [program.name, *program.arguments])
    write_stacks_on_signal(error_file)
    heartbeat.begin()
    _show_name(f"rank{os.environ.get('RANK', '')} {os.path.basename(program.name)}")
    sys.argv = [program.name, *program.arguments]
    if program.kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(program.name)
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    if _is_compiled(path):
        runpy.run_path(path, run_name="__main__")
        return
    # Not by runpy, which replaces sys.argv[0], and takes the program from sys.modules again at its end.
    sys.modules["__main__"] = main_module = types.ModuleType("__main__")
    main_module.__dict__.update({"__file__": path, "__builtins__": builtins})
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)  # not with the future statements of this file
    exec(code, main_module.__dict__)


def _is_compiled(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(importlib.util.MAGIC_NUMBER)) == importlib.util.MAGIC_NUMBER


def write_stacks_on_signal(error_file: str) -> None:
    """Let this process write the stacks of its threads to STACKS_FILE when it receives STACKS.

    Python's faulthandler does that within the signal handler, also while the main thread waits in C.
    """
    if error_file:
        path = os.path.join(os.path.dirname(error_file), STACKS_FILE)
        descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        faulthandler.register(STACKS, file=descriptor, all_threads=True)
        os.rename(f"{path}.new", path)  # guard: stacks-asked-only-of-who-can


def forget_current_folder() -> None:
    """Remove the current folder from sys.path, where `python -m` has put it: modules of the user may lie there."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]


def _show_name(name: str) -> None:
    """Let `top`, `ps` and `pgrep` show this process under a name, of which the kernel keeps 15 bytes."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb") as file:
        file.write(os.fsencode(name)[:15])  # a name may have bytes that are no text


def _noting(path: str) -> Hook:
    """A `sys.excepthook` that writes the error file, unless the program has written it, and then prints as usual.

    The frames that lead to the program are left out: the user did not write them. A process that the program has forked
    has the hook too, and only prints.
    """
    rank = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = _from_program(error, trace)
        # Otherwise the program itself prints an error by this hook.
        ends = error is getattr(sys, "last_value", None) and os.getpid() == rank
        noted = ends and _write_error(path, kind, error, trace)
        sys.__excepthook__(kind, error.with_traceback(trace), trace)
        if noted:  # else its end is awaited: nothing else shows the cause
            heartbeat.note_failed()

    return hook


def _write_error(path: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> bool:
    """Write the error file, unless the program has written it. `path`: of the file; empty: there is none.

    Returns whether the supervisor can read the error; otherwise it is only printed: the rank ends as it would have.
    """
    name, text = kind.__name__, _text(error)
    named_alike = getattr(errors, name, kind) is not kind
    if not path or (os.path.exists(path) and not (named_alike and _message(path) == f"{name}: {text}")):
        return bool(path)  # what is replaced is of torch's @record, which leaves the module of the class out
    lines = "".join(traceback.format_exception(kind, error, _from_program(error, trace)))
    extra = {"py_callstack": lines, "timestamp": str(int(time.time())), "monotonic": time.monotonic()}
    if named_alike:  # guard: user-error-named-with-module
        name = f"{kind.__module__}.{name}"  # the policy of restarts knows the errors of lastgood by their names
    what = f"{name}: {text}" if text else name
    page = os.environ.get(heartbeat.VARIABLE)
    for place in [path] if page is None else [path, error_in_memory(page)]:
        try:
            with open(place, "w") as file:
                json.dump({"message": {"message": what, "extraInfo": extra}}, file)
            return True
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(place)  # a part of it shows no cause
    return False


def _message(path: str) -> str:
    """The type and message in an error file; empty if it has another format, or cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path) as file:
        return str(json.load(file)["message"]["message"])
    return ""


def _text(error: BaseException) -> str:
    """The text of an error, also where its `__str__` raises: then the words of Python's tracebacks."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - any class of the program
        return "<exception str() failed>"


def _from_program(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that lead to the program. The last one stays unless the error names its place by
    itself, as that of a script that cannot be compiled does."""
    while trace is not None and _leads_to_program(trace):
        if trace.tb_next is None and not isinstance(error, SyntaxError):
            break
        trace = trace.tb_next
    return trace


def _leads_to_program(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file == "<frozen runpy>" or os.path.dirname(file) == os.path.dirname(__file__)


def main() -> None:
    """`python -m lastgood.supervisor.program SUPERVISOR PROGRAM`: a rank that is started without a zygote."""
    forget_current_folder()
    become_rank(int(sys.argv[1]), dict(os.environ))
    # Not by msgspec: arguments may have bytes that are not UTF-8.
    run(msgspec.convert(json.loads(sys.argv[2]), Program))


if __name__ == "__main__":
    main()
