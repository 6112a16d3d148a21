"""Preemption: a signal ends a run at its next step, and that step is made durable within the grace period."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lastgood
from agents import until
from lastgood.errors import Refused, TornSnapshot
from lastgood.io import heartbeat
from lastgood.loop.preemption import EXIT_CODE, EndRequest, Preempted, Preemption
from lastgood.run import access
from lastgood.testing import Clock
from lastgood_lab import forked

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restores the handlers that a run installs and keeps when a signal has ended it."""
    before = {one: signal.getsignal(one) for one in Preemption().signals}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


LOOP = """
import sys, torch, lastgood
from lastgood.loop import preemption
preemption.SAME_SECONDS = 0.0
root, stuck = sys.argv[1], sys.argv[2] == "stuck"
net = torch.nn.Linear(4, 4)
wish = lastgood.Preemption(grace_seconds=60)
with lastgood.Checkpointer(root, {"net": net}, cadence=lastgood.Every(steps=10**6), preemption=wish) as ckpt:
    step = ckpt.restore().step
    reported = False
    while True:
        if ckpt.preempted and not reported:
            print("requested", flush=True)
            reported = True
        if not stuck:
            step += 1
            torch.nn.init.constant_(net.weight, step)
            ckpt.step(step)
        if step == 3 or stuck and not reported:
            print("going", flush=True)
"""


class Program:
    """A script that runs in a process of its own, with the run `folder/run`."""

    def __init__(self, script: str, folder: Path, *arguments: str) -> None:
        self._output = folder / "output"
        self._output.touch()
        (folder / "script.py").write_text(script)
        self._process = forked.started(folder / "script.py", [str(folder / "run"), *arguments], self._output)

    def until(self, line: str) -> None:
        until(lambda: line in self._output.read_text().splitlines())

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> tuple[int | None, str]:
        """Its exit code, once it has ended, and all that it has printed."""
        self._process.join(60)
        return self._process.exitcode, self._output.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts a script in `tmp_path`. It does not outlive the test: one that trained on took half of the processors of
    the tests that came later."""
    started: list[Program] = []

    def start(script: str, *arguments: str) -> Program:
        started.append(Program(script, tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_preempted_run_saves_its_next_step_and_exits_as_documented(tmp_path, program, number):
    loop = program(LOOP, "steps")
    loop.until("going")
    loop.signal(number)
    code, output = loop.end()
    assert code == EXIT_CODE == 75, output
    newest = lastgood.open(tmp_path / "run").generations()[-1]
    assert newest.step > 3 and f"step {newest.step} is durable, exit 75" in output
    net = torch.nn.Linear(4, 4)
    assert lastgood.load(tmp_path / "run", {"net": net}).step == newest.step
    assert torch.equal(net.weight, torch.full((4, 4), float(newest.step)))


def test_a_second_signal_ends_a_loop_that_never_calls_step_at_once(program):
    loop = program(LOOP, "stuck")
    loop.until("going")
    loop.signal(signal.SIGTERM)
    loop.until("requested")
    loop.signal(signal.SIGTERM)
    code, output = loop.end()
    assert code == EXIT_CODE and "a second signal" in output


def test_repeated_preemption_requests_keep_the_first_deadline():
    clock = Clock(100.0)
    request = EndRequest(Preemption(signals=[signal.SIGUSR1], grace_seconds=30), clock)
    try:
        assert request.at is None and request.left_seconds == 30
        signal.raise_signal(signal.SIGUSR1)
        clock.advance(0.9)  # a launcher forwards a signal that the whole process group had received already
        signal.raise_signal(signal.SIGUSR1)
        assert request.at == 100.0 and request.left_seconds == pytest.approx(29.1)
        clock.advance(100)
        assert request.left_seconds == 0
    finally:
        request.close()


def test_the_handler_of_a_run_that_has_ended_is_not_called():
    """After a signal the handlers of a run stay installed. That of the first run in a process was called as the earlier
    handler of the second one, took the signal for a second one of its own, and ended the process without a save."""
    clock = Clock(100.0)
    wish = Preemption(signals=[signal.SIGUSR1], grace_seconds=30)
    first = EndRequest(wish, clock)
    signal.raise_signal(signal.SIGUSR1)
    first.close()
    clock.advance(50)
    second = EndRequest(wish, clock)
    try:
        signal.raise_signal(signal.SIGUSR1)
        assert second.at == 150.0
    finally:
        second.close()


def test_a_previously_installed_handler_is_called_once():
    """The SIGTERM handler of a scheduler or logger was replaced, and was never called."""
    calls: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    clock = Clock(100.0)
    request = EndRequest(Preemption(signals=[signal.SIGUSR1, signal.SIGINT], grace_seconds=30), clock)
    try:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert calls == [signal.SIGUSR1] and request.at == 100.0
    finally:
        request.close()
    request = EndRequest(Preemption(signals=[signal.SIGINT], grace_seconds=30), clock)
    try:
        signal.raise_signal(signal.SIGINT)  # this raises no KeyboardInterrupt
        assert request.at == 100.0
    finally:
        request.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_the_last_save_survives_a_handler_that_ends_the_process(tmp_path, capfd):
    """The usual `signal.signal(SIGTERM, lambda *_: sys.exit(0))` ended the loop without a save, and with exit code
    0."""
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    state = {"w": torch.zeros(3)}
    with (
        pytest.raises(lastgood.Preempted) as ended,
        lastgood.Checkpointer(tmp_path, state, preemption=Preemption(signals=[signal.SIGUSR1])) as ckpt,
    ):
        ckpt.step(1)
        signal.raise_signal(signal.SIGUSR1)
        ckpt.step(2)
    assert ended.value.durable == 2 and ended.value.code == 75
    assert "the earlier handler of signal" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, 7)])
def test_a_forked_worker_dies_of_sigterm_and_of_no_other_handled_signal(number, code):
    """Data loaders end their workers with SIGTERM: a worker that only recorded the signal hung for ever. A SIGUSR1
    to the whole process group killed the workers, and their death ended the loop before its last save."""
    request = EndRequest(Preemption())
    try:
        child = os.fork()
        if child == 0:
            signal.raise_signal(number)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
        assert request.at is None
    finally:
        request.close()


def test_a_handler_installed_later_is_left_in_place(tmp_path):
    with lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(2)}, preemption=Preemption()):
        signal.signal(signal.SIGTERM, later := lambda *_: None)
    assert signal.getsignal(signal.SIGTERM) is later


def test_previous_signal_handlers_are_restored_at_the_end(tmp_path):
    signal.signal(signal.SIGTERM, before := lambda *_: None)
    with lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(2)}, preemption=Preemption()):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_preemption_outside_the_main_thread_is_refused_and_the_run_closed(tmp_path):
    found: list[BaseException] = []

    def open_it() -> None:
        try:
            lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(2)}, preemption=Preemption())
        except Refused as error:
            found.append(error)

    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])
    with access.for_writing(tmp_path / "run", "atomic_dirsync"):
        pass


@pytest.mark.parametrize(
    "wrong", [{"signals": ()}, {"signals": [signal.SIGKILL]}, {"grace_seconds": 0}, {"exit_code": 256}]
)
def test_invalid_preemption_options_are_refused(wrong):
    with pytest.raises(Refused):
        Preemption(**wrong)


def opened(root: Path, grace_seconds: float = 60.0, **options) -> lastgood.Checkpointer:
    wish = Preemption(grace_seconds=grace_seconds)
    cadence = lastgood.Every(steps=10**6)
    return lastgood.Checkpointer(root, {"w": torch.zeros(2)}, cadence=cadence, preemption=wish, **options)


def request_end(ckpt: lastgood.Checkpointer) -> None:
    signal.raise_signal(signal.SIGUSR1)
    assert ckpt.preempted


def test_preemption_waits_for_a_running_save_of_the_same_step(tmp_path):
    with pytest.raises(Preempted) as ended, opened(tmp_path / "run") as ckpt:
        ckpt.save(1)
        request_end(ckpt)
        ckpt.step(1)
    assert ended.value.durable == 1 and [one.step for one in lastgood.open(tmp_path / "run").generations()] == [1]


def test_preemption_starts_no_save_that_cannot_be_durable_in_time(tmp_path):
    with pytest.raises(Preempted) as ended, opened(tmp_path / "run") as ckpt:
        save = ckpt.save(1)
        save.result()
        save._begun -= 1000.0  # the save has taken that long
        request_end(ckpt)
        ckpt.step(2)
    assert ended.value.durable == 1 and [one.step for one in lastgood.open(tmp_path / "run").generations()] == [1]


HANGS = """
import os, signal, sys, threading, torch, lastgood
from lastgood.io.files import PosixFile, PosixFiles
root, where, when_full, in_flight = sys.argv[1:]
wish = lastgood.Preemption(grace_seconds=1.0)
ckpt = lastgood.Checkpointer(root, {"w": torch.zeros(2)}, cadence=lastgood.Every(steps=10**6), on_error="raise",
                             in_flight=int(in_flight), when_full=when_full, preemption=wish)
ckpt.save(1).result()
ckpt.wait()
hang = lambda *_: threading.Event().wait()
setattr(*{"sync": (PosixFile, "sync"), "write": (PosixFile, "write_at"), "commit": (PosixFiles, "link")}[where], hang)
ckpt.save(2)
signal.raise_signal(signal.SIGUSR1)
ckpt.step(3)
"""


@pytest.mark.parametrize("where", ["sync", "write", "commit"])
@pytest.mark.parametrize(
    ("when_full", "in_flight"),
    [
        ("wait", 1),
        ("wait", 2),
        pytest.param("skip", 1, marks=pytest.mark.long),
        pytest.param("raise", 1, marks=pytest.mark.long),
    ],
)
def test_a_hanging_disk_delays_the_exit_no_longer_than_the_grace_period(tmp_path, program, where, when_full, in_flight):
    """The last save waited for memory that a hanging save held, and the exit waited for the lock of a hanging
    commit."""
    code, output = program(HANGS, where, when_full, str(in_flight)).end()
    assert code == EXIT_CODE and "the grace period is over: the process ends at once" in output
    assert [one.step for one in lastgood.open(tmp_path / "run").generations()] == [1]


WITHOUT_WITH = """
import atexit, signal, sys, threading, torch, lastgood
atexit.register(print, "what atexit has")
wish = lastgood.Preemption(grace_seconds=float(sys.argv[2]))
runs = [lastgood.Checkpointer(f"{sys.argv[1]}/{name}", {"w": torch.zeros(2)}, preemption=wish) for name in "ab"]
if len(sys.argv) > 3:
    threading.Thread(target=threading.Event().wait).start()
print("what stdout holds")
signal.raise_signal(signal.SIGTERM)
runs[1].step(1)
"""


def test_a_loop_without_with_ends_as_soon_as_its_last_save_is_durable(tmp_path):
    """The interpreter waited for the timer, which ended the process at the end of the grace period: what a script had
    printed to a pipe was lost, and nothing that atexit had was called."""
    command = [sys.executable, "-c", WITHOUT_WITH, str(tmp_path)]
    done = subprocess.run([*command, "20"], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_CODE and done.stdout == "what stdout holds\nwhat atexit has\n", done.stderr
    assert "step 1 is durable, exit 75" in done.stderr and "the grace period is over" not in done.stderr


def test_a_thread_that_hangs_delays_the_exit_by_the_grace_period(tmp_path):
    command = [sys.executable, "-c", WITHOUT_WITH, str(tmp_path), "2", "hang"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_CODE and "the grace period is over: the process ends at once" in done.stderr


def test_a_torn_last_save_is_repeated(tmp_path, monkeypatch):
    with pytest.raises(Preempted) as ended, opened(tmp_path / "run") as ckpt:
        real, torn = ckpt._saver.save, iter([True])

        def failing(*arguments: object, **options: object) -> object:
            if next(torn, False):
                raise TornSnapshot("the state changed while it was copied")
            return real(*arguments, **options)

        monkeypatch.setattr(ckpt._saver, "save", failing)
        request_end(ckpt)
        ckpt.step(1)
    assert ended.value.durable == 1


def test_an_impossible_last_save_is_reported_and_the_process_still_ends(tmp_path, capsys):
    state = {"w": torch.zeros(2)}
    cadence = lastgood.Every(steps=10**6)
    with (
        pytest.raises(Preempted) as ended,
        lastgood.Checkpointer(tmp_path / "run", state, cadence=cadence, preemption=Preemption()) as ckpt,
    ):
        ckpt.save(1).result()
        state["odd"] = object()
        request_end(ckpt)
        ckpt.step(2)
    assert ended.value.durable == 1 and ended.value.code == EXIT_CODE
    assert "step 1 is durable, exit 75. Unstorable: " in capsys.readouterr().err


def test_a_repeated_signal_during_the_exit_changes_nothing(tmp_path):
    """The previous handlers were restored before the last save had ended, and a launcher's second SIGTERM killed it."""
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Preempted), opened(tmp_path / "run") as ckpt:
        request_end(ckpt)
        ckpt.step(1)
    assert signal.getsignal(signal.SIGUSR1) is not before
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(("supervised", "code"), [(True, 75), (False, 99)])
def test_under_lastgood_run_a_last_save_ends_with_75(tmp_path, monkeypatch, supervised, code):
    """With `exit_code=99` a job that had saved ended with "the ranks failed", and a leaving node used up a restart."""
    if supervised:
        monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path / "page"))
        heartbeat.create(str(tmp_path / "page"))
    preemption, state = Preemption(signals=(signal.SIGUSR2,), exit_code=99), {"w": torch.zeros(1)}
    with (
        pytest.raises(Preempted) as ended,
        lastgood.Checkpointer(tmp_path / "run", state, preemption=preemption) as ckpt,
    ):
        ckpt.restore()
        os.kill(os.getpid(), signal.SIGUSR2)
        ckpt.step(1)
    assert ended.value.code == code


def test_a_repeated_signal_while_the_interpreter_ends_changes_no_exit_code(tmp_path):
    """Python restores the default actions of signals before it deletes modules: a second SIGTERM that came then
    ended the process with status -15, and not with 75."""
    script = """
import os, signal, sys, torch, lastgood

class Last:
    def __del__(self, kill=os.kill, process=os.getpid()):
        kill(process, 15)

sys.last = Last()
with lastgood.Checkpointer(sys.argv[1], {"w": torch.zeros(2)}, preemption=lastgood.Preemption()) as ckpt:
    signal.raise_signal(signal.SIGTERM)
    ckpt.step(1)
"""
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == EXIT_CODE
