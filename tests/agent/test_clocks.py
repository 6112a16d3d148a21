"""A clock of the day that jumps: nothing that a save or an agent decides depends on it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_runs import STATE, writing
from harness import one_place, save, steps
from lastgood.agent.server import Server
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.format import layout
from lastgood.io.files import Lock
from lastgood.policy.retention import KEEP, Keep
from lastgood.run import access, agent_link, memory_place
from lastgood.run.agent_messages import AgentSpec, CopyTo
from lastgood.run.known import Environment
from lastgood.run.paths import Place
from lastgood.run.writer import RunWriter

YEAR_SECONDS = 365 * 86_400.0


@pytest.mark.parametrize("jump_seconds", [YEAR_SECONDS, -YEAR_SECONDS], ids=["ahead", "back"])
def test_saves_and_agent_go_on_while_the_clock_jumps_by_a_year(
    tmp_path: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    call_json: Callable[..., tuple[int, Any]],
    jump_seconds: float,
) -> None:
    """Each look at the clock finds it a year further on, or back: when it is set after the start of a machine, say.
    The newest save counts as the newest and is kept, and the agent copies it, waits, removes the memory and ends."""
    now = [time.time()]

    def jumping() -> float:
        now[0] += jump_seconds
        return now[0]

    monkeypatch.setattr(time, "time", jumping)
    home = tmp_path / "home"
    writing(home, 1)
    folder = memory_place.folder_of(home)
    memory_place.make(folder)
    shutil.copytree(home, folder, symlinks=True, dirs_exist_ok=True)
    with access.for_writing(f"memory://{folder}", "atomic_dirsync") as tier:
        run = RunWriter(tier, Inline(), keep=Keep(last=2), environment=Environment(wall_seconds=jumping))
        run.begin(run.lineage()[0].id)
        for step in 2, 3, 4:
            save(run, step, STATE)
            run.verify(Arena(1 << 16, 8192))
            run.clean()
        times = [one.commit.created for one in run.lineage()]
        assert times == sorted(times, reverse=jump_seconds > 0), "the clock has jumped between the saves"
        assert [one.step for one in run.lineage()] == [4, 3]
    spec = AgentSpec(format=layout.FORMAT, places=[CopyTo(url=str(home), keep=KEEP)], order=0, spill=None)
    Path(folder, agent_link.SPEC).write_bytes(layout.encode(spec))
    lock = Lock(os.path.join(folder, agent_link.LOCK))
    Server(Place(folder, "memory"), lock, agent_link.listening(folder), linger_seconds=0.05, first_seconds=0.0).run()
    lock.close()
    assert steps(home)[-1] == 4 and one_place(home).verify(4).good and not os.path.exists(folder)
    code, held = call_json("tiers", home)
    assert code == 0 and all(one["age_seconds"] >= 0 for one in held["generations"])
