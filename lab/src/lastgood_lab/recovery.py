"""Measures how long a training process that was killed and restarted needs to reach the step of the kill again.

The child trains and reports each step on its standard output. The parent kills it during a step that is drawn from a
seed, restarts it and waits until the last step before the kill is completed again. The peer process of Gemini outlives
both children.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .chunked_copy import Snapshot
from .policies import POLICIES
from .policy import Settings
from .stores import end_peer, start_peer


class Spec(NamedTuple):
    """The network that the child trains, and the policy with which it saves."""

    model: str
    scale: float
    work: float
    device: str
    policy: str
    interval: int
    place: str
    settings: Settings


def killed_and_restarted(spec: Spec, seed: int, save_steps: float) -> dict[str, Any]:
    """Kill a run in its third interval or later, restart it, and return the measured seconds and steps.

    `save_steps` is the duration of a save in steps (Tw / t). The kill happens late enough for a save to be durable.
    Raises RuntimeError if the first process ends before it is killed, or the second one before it is back at the step.
    """
    chance = random.Random(f"{seed} {spec.policy} {spec.interval}")
    first = max(2 * spec.interval, math.ceil(1.5 * save_steps) + spec.interval)
    fatal = first + chance.randrange(spec.interval)
    peer = _peer(spec) if spec.policy == "Gemini" else None
    try:
        with _life(spec) as process:
            reached = _killed_after(process, spec, fatal, chance)
        begun = time.perf_counter()
        with _life(spec) as process:
            return {"killed_after": reached, **_back_at(process, spec, reached, begun)}
    finally:
        if peer is not None:
            end_peer(peer)


def _killed_after(process: subprocess.Popen[bytes], spec: Spec, fatal: int, chance: random.Random) -> int:
    """Kill the first child at a random time within the step after `fatal`. Returns the last step that it completed."""
    for kind, step, seconds in _messages(process):
        if kind == "step" and step == fatal:
            time.sleep(chance.random() * seconds)
            process.send_signal(signal.SIGKILL)
            return max([fatal, *(step for kind, step, _ in _messages(process) if kind == "step")])
    raise _ended(process, spec, f"the first process ended before it had completed step {fatal}")


def _back_at(process: subprocess.Popen[bytes], spec: Spec, reached: int, begun: float) -> dict[str, Any]:
    """Wait until the second child has loaded a state and completed step `reached`, then kill it. Returns its times."""
    restart = load = redone_seconds = since = 0.0
    resumed = 0
    for kind, step, seconds in _messages(process):
        if kind == "ready":
            restart = time.perf_counter() - begun
        elif kind == "loaded":
            resumed, load, since = step, seconds, time.perf_counter()
            if resumed >= reached:
                break
        elif step >= reached:
            redone_seconds = time.perf_counter() - since
            break
    else:
        raise _ended(process, spec, f"the second process ended before it was back at step {reached}")
    process.send_signal(signal.SIGKILL)
    return {
        "resumed_from": resumed,
        "load_seconds": load,
        "restart_seconds": restart,
        "recovery_seconds": load + redone_seconds,
    }


def _ended(process: subprocess.Popen[bytes], spec: Spec, what: str) -> RuntimeError:
    return RuntimeError(f"{spec.policy} every {spec.interval}: {what}; its exit code is {process.wait()}")


def _peer(spec: Spec) -> subprocess.Popen[bytes]:
    from .models import Workload

    length = Snapshot(Workload(spec.model, spec.scale, spec.work, "cpu"), spec.settings.chunk_bytes).slot_bytes
    return start_peer(Path(spec.place) / "peer", length)


def _life(spec: Spec) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", "lastgood_lab.recovery", json.dumps(spec._asdict())]
    return subprocess.Popen(program, stdout=subprocess.PIPE, env={**os.environ, "PYTHONWARNINGS": "ignore"})


def _messages(process: subprocess.Popen[bytes]) -> Iterator[tuple[str, int, float]]:
    """Yield the messages of a child until it ends, without a truncated last line."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith(b"\n"):
            kind, step, seconds = line.split()
            yield kind.decode(), int(step), float(seconds)


def live(spec: Spec) -> None:
    """Load the newest state, then train and save until this process is killed."""
    from .models import Workload

    workload = Workload(spec.model, spec.scale, spec.work, spec.device)
    place = Path(spec.place)
    policy = POLICIES[spec.policy](workload, place, spec.settings, place / "peer")
    _send("ready", 0, 0.0)
    begun = time.perf_counter()
    step = policy.load()
    _send("loaded", step, time.perf_counter() - begun)
    while True:
        begun = time.perf_counter()
        workload.step(policy.fence)
        step += 1
        if step % spec.interval == 0:
            policy.save(step)
        _send("step", step, time.perf_counter() - begun)


def _send(kind: str, step: int, seconds: float) -> None:
    print(kind, step, f"{seconds:.6f}", flush=True)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    live(Spec(**{**given, "settings": Settings(*given["settings"])}))
