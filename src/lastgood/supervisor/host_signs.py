"""Signs that this host may fail, collected while ranks run. Decides nothing, and waits for nothing that may hang.

A collector returns what it has found so far. It raises nothing: a source that is not there, or does not answer, has
found nothing. What was there before the supervisor began is no finding, but for the file of a fleet's own tool, which
says how the host is now.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from .. import reporting
from ..policy.health import Finding, described
from . import sign_texts
from .sign_texts import NVIDIA_QUERY, of_file, of_kernel, of_nvidia, of_smart

KERNEL_LOG, BLOCK_DEVICES = "/dev/kmsg", "/sys/class/block"
MESSAGES = 1000
"""messages of the kernel that are read at a time, at most"""
MESSAGE_BYTES, OUTPUT_BYTES = 8192, 65536
"""what is read of one message of the kernel, and of what a tool writes"""
ANSWER_SECONDS = 60.0
"""A command that runs for longer is a sign too: its driver hangs."""
READ_SECONDS, SHORT_SECONDS = 3.0, 0.2
"""How long the file of a fleet's tool is waited for, before anything is started and then: a local one is read in much
less, and signals are passed on again soon enough."""
READ_FILE = f"""
import sys
try:
    sys.stdout.buffer.write(open(sys.argv[1], "rb").read({OUTPUT_BYTES}))
except FileNotFoundError:
    pass
except OSError as error:
    print(f"warning: {{sys.argv[1]}} cannot be read: {{error.strerror}}")
"""
"""the program of the process that reads it"""
MOST_FINDINGS = 100
"""Further ones are not reported: a host with so many has been reported often enough."""
SMART_SECONDS = 600.0
"""how often disks are asked, at most"""


class Collector(Protocol):
    """Where findings come from. `collected` returns those that are known now, at once; it may repeat earlier ones."""

    def collected(self, now: float) -> list[Finding]: ...
    def close(self) -> None: ...


class KernelLog:
    """New messages of the kernel. `descriptor`: of a device like /dev/kmsg, at its end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def collected(self, now: float) -> list[Finding]:
        """Findings in the messages since the last call."""
        found = list[Finding]()
        for _ in range(MESSAGES):
            try:
                message = os.read(self._descriptor, MESSAGE_BYTES)
            except BrokenPipeError:  # the kernel has overwritten messages: the next read goes on after them
                continue
            except OSError:
                break
            if not message:
                break
            lines = message.decode(errors="replace").partition(";")[2].splitlines()
            found += of_kernel(lines[0]) if lines else []
        return found

    def close(self) -> None:
        """Close the device."""
        os.close(self._descriptor)


class Command:
    """A command that reports the state of a part of the host each time it is started.

    `parsed`: makes findings of what it writes. `every_seconds`: how often it is started, at most.
    """

    def __init__(
        self, arguments: Sequence[str], parsed: Callable[[str], list[Finding]], every_seconds: float = 0.0
    ) -> None:
        self._arguments, self._parsed, self._every_seconds = list(arguments), parsed, every_seconds
        self._source = " ".join(arguments)
        self._running: subprocess.Popen[bytes] | None = None
        self._began = self._next = 0.0
        self._before: set[str] | None = None
        """what it has found when the supervisor began; None: it has not ended yet"""

    def collected(self, now: float) -> list[Finding]:
        """What it has found if it has ended since the last call; starts it if it does not run."""
        if self._running is not None and self._running.poll() is None:
            if now - self._began < ANSWER_SECONDS:
                return []
            what = f"it has not answered for {ANSWER_SECONDS:.0f} s"
            return [Finding(source=self._source, what=what, fatal=False)]
        found = self._ended()
        if now >= self._next:
            self._began, self._next = now, now + self._every_seconds
            with contextlib.suppress(OSError):
                self._running = subprocess.Popen(
                    self._arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        return found

    def _ended(self) -> list[Finding]:
        if self._running is None:
            return []
        output, self._running = self._running.stdout, None
        assert output is not None
        with output:
            os.set_blocking(output.fileno(), False)  # what it has started may hold the other end
            text = (output.read(OUTPUT_BYTES) or b"").decode(errors="replace")
        found = self._parsed(text)
        if self._before is None:  # guard: old-faults-are-no-findings
            self._before = {one.what for one in found}
        return [one for one in found if one.what not in self._before]

    def close(self) -> None:
        """End it. It is not waited for: one that hangs in a driver does not end."""
        if self._running is not None:
            assert self._running.stdout is not None
            self._running.stdout.close()
            self._running.kill()
            self._running.returncode = 0


class HealthFile(Command):
    """A file of a fleet's own tool: a line for each finding; empty or absent while the host is healthy.

    A process reads it, because a read stands still as long as the server of a network mount does.
    """

    def __init__(self, path: str) -> None:
        super().__init__([sys.executable, "-I", "-S", "-c", READ_FILE, path], of_file)
        self._source, self._before = f"reading {path}", set()
        self._waits_seconds = READ_SECONDS

    def collected(self, now: float) -> list[Finding]:
        """What stands in the file; if that is not read soon, what stood there at the last call.

        Later calls wait less: they come while ranks train, and a signal that is to be passed on waits meanwhile.
        """
        before, found = self._running, super().collected(now)
        if self._running is not None and self._running is not before:
            seconds, self._waits_seconds = self._waits_seconds, SHORT_SECONDS  # guard: file-delays-no-signal
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.wait(seconds)
                found += self._ended()
        return found


class HostSigns:
    """The findings of several collectors. `host`: this one. `every_seconds`: how often they are asked; 0: never."""

    def __init__(self, collectors: Sequence[Collector], every_seconds: float, host: str) -> None:
        self._collectors, self._every_seconds, self._host = collectors, every_seconds, host
        self._known = set[str]()
        self._next = 0.0

    def poll(self, now: float) -> list[Finding]:
        """Ask the collectors if it is time. Returns findings that are new, each reported once; mostly none."""
        if not self._every_seconds or now < self._next:
            return []
        self._next = now + self._every_seconds
        new = list[Finding]()
        for one in [finding for each in self._collectors for finding in each.collected(now)]:
            few = len(self._known) < (2 if one.fatal else 1) * MOST_FINDINGS  # guard: fatal-sign-after-many-is-met
            if sign_texts.key(one) not in self._known and few:
                self._known.add(sign_texts.key(one))
                new.append(Finding(source=one.source, what=one.what, fatal=one.fatal, host=self._host))
                reporting.warning(described(new[-1]))
        return new

    def close(self) -> None:
        """Close the collectors."""
        for one in self._collectors:
            one.close()


def collectors(health_file: str | None) -> list[Collector]:
    """Those whose source this host has. `health_file`: of a fleet's own tool; None: there is none."""
    found: list[Collector] = [] if health_file is None else [HealthFile(health_file)]
    with contextlib.suppress(OSError):
        descriptor = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(descriptor, 0, os.SEEK_END)
        found.append(KernelLog(descriptor))
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA_QUERY)}", "--format=csv,noheader,nounits"]
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        found.append(Command([*query, f"--id={devices}"] if devices else query, of_nvidia))
    if shutil.which("smartctl") is not None:
        names = sorted(os.listdir(BLOCK_DEVICES)) if os.path.isdir(BLOCK_DEVICES) else []
        for name in names:
            if os.path.isdir(os.path.join(BLOCK_DEVICES, name, "device")):  # neither a partition nor made of others
                command = ["smartctl", "--json", "--health", "--nocheck=standby", f"/dev/{name}"]
                found.append(Command(command, of_smart, SMART_SECONDS))
    return found
