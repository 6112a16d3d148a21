"""What `lastgood run --stage RUN` puts into the memory of a node in reserve, and removes again."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import lastgood
from agents import agent
from lastgood.format import layout
from lastgood.io import memory_files
from lastgood.io.files import Lock
from lastgood.records import PlaceList
from lastgood.run import access, agent_start, memory_place, staged
from lastgood.supervisor.staging import Reserve, unneeded_removed

GOLDEN = Path(__file__).parents[1] / "golden" / "ranks"
"""a run of two ranks, with the steps 2 and 4"""
WAITS = """
import sys
from lastgood.supervisor.staging import Reserve
reserve = Reserve(sys.argv[1])
reserve.refresh()
print("staged", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run that was last opened with a tier in memory."""
    made = Path(shutil.copytree(GOLDEN, tmp_path / "home"))
    opened_in_memory(made)
    return made


def opened_in_memory(home: Path) -> None:
    places = PlaceList(format=layout.FORMAT, places=["memory:///dev/shm/lastgood-0/home-000000000000", str(home)])
    (home / layout.PLACES).write_bytes(layout.encode(places))


@contextlib.contextmanager
def waiting(home: Path) -> Iterator[None]:
    """A supervisor in reserve, which has staged the newest generation. It is killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "staged\n"
        yield
    finally:
        process.kill()
        process.communicate()


def held(home: Path) -> Path:
    return Path(memory_place.folder_of(home))


def there(home: Path) -> set[int]:
    """The steps in memory."""
    return {int(one.name[:12]) for one in held(home).glob("gen/*")}


# ---- the end ---------------------------------------------------------------------------------------------------


def test_the_last_of_two_supervisors_removes_what_no_start_has_used(home: Path, memory: Path) -> None:
    """It stayed in memory until the machine was restarted."""
    with unneeded_removed(str(home)) as hold:
        with waiting(home):
            assert there(home) == {4} and staged.remove_unneeded() == [], "the one that stages may need it"
            hold()
        assert staged.remove_unneeded() == [], "this one may need it too"
    assert not held(home).exists()


def test_what_a_killed_supervisor_left_goes_with_the_next_one_of_any_run(home: Path, memory: Path) -> None:
    with waiting(home):
        pass
    interrupted = held(home).with_name(f"other-000000000000{memory_place.REMOVED}")
    interrupted.mkdir()
    assert there(home) == {4}
    Reserve(str(home)).remove_left()
    assert there(home) == {4}, "the next one of the same run uses it"
    Reserve(str(home.with_name("other"))).remove_left()
    assert not held(home).exists() and not interrupted.exists()


def test_an_older_copy_goes_though_the_run_has_deleted_its_generation(home: Path, memory: Path) -> None:
    """A job that saved often filled the memory: of each generation that retention had deleted the copy stayed."""
    older, newest = sorted((home / "gen").iterdir())
    newest.rename(home / "aside")
    reserve = Reserve(str(home))
    reserve.refresh()
    assert there(home) == {2}
    (home / "aside").rename(newest)
    shutil.rmtree(older)
    reserve.refresh()
    assert there(home) == {4}


def test_a_copy_that_somebody_has_removed_is_made_anew(home: Path, memory: Path) -> None:
    """systemd removes what a user has in /dev/shm when he logs out. The node then waited with nothing in memory."""
    reserve = Reserve(str(home))
    reserve.refresh()
    shutil.rmtree(held(home))
    reserve.refresh()
    assert there(home) == {4}


def by_hand(call_json: Callable[..., tuple[int, object]], home: Path, *step: str) -> None:
    assert call_json("agent", "stage", str(home), *step)[0] == 0


def test_an_older_generation_that_was_there_before_stays(home: Path, memory: Path, call_json) -> None:
    by_hand(call_json, home, "2")
    with waiting(home):
        assert there(home) == {2, 4}
    assert staged.remove_unneeded() == [str(held(home))] and there(home) == {2}


def test_the_same_generation_that_was_there_before_stays(home: Path, memory: Path, call_json) -> None:
    by_hand(call_json, home)
    with waiting(home):
        pass
    staged.remove_unneeded()
    assert there(home) == {4}


def test_what_is_staged_by_hand_too_stays(home: Path, memory: Path, call_json) -> None:
    with waiting(home):
        by_hand(call_json, home)
    assert staged.remove_unneeded() == [] and there(home) == {4}


def test_a_folder_that_was_there_before_stays(home: Path, memory: Path) -> None:
    memory_place.make(str(held(home)))
    (held(home) / agent_start.LOG).write_text("of an earlier agent")
    with waiting(home):
        pass
    assert staged.remove_unneeded() == [str(held(home))]
    assert there(home) == set() and (held(home) / agent_start.LOG).exists()


def test_what_a_start_has_used_stays(home: Path, memory: Path) -> None:
    with waiting(home):
        pass
    with access.for_writing(memory_place.url_of(home), "atomic_dirsync"):
        """As a training process opens it, which has no agent yet."""
    assert staged.remove_unneeded() == [] and there(home) == {4}


def test_memory_is_not_removed_while_an_agent_or_a_process_has_it(home: Path, memory: Path) -> None:
    with waiting(home):
        pass
    with agent(held(home)):
        assert staged.remove_unneeded() == []
    with contextlib.closing(Lock(str(held(home) / access.LOCK))):
        assert staged.remove_unneeded() == []
    assert staged.remove_unneeded() == [str(held(home))] and not held(home).exists()


@pytest.mark.parametrize("is_link", [True, False], ids=["link", "file"])
def test_nothing_is_removed_through_what_another_user_has_made(home, tmp_path, memory, is_link: bool) -> None:
    """Any user can make a name in /dev/shm. Folders of the victim went that lay behind a link, if their names ended in
    .removed; and a file in place of the folder ended the supervisor with an error in place of its exit code."""
    (victim := tmp_path / "thesis.removed").mkdir()
    above = Path(memory_place.folder_of_user())
    above.symlink_to(tmp_path) if is_link else above.write_text("")
    with unneeded_removed(str(home)) as hold:
        hold()
    assert victim.exists()


# ---- before a copy ---------------------------------------------------------------------------------------------


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records]


def test_memory_that_is_too_small_is_reported_once_and_nothing_comes(home, memory, monkeypatch, caplog) -> None:
    """Each rank's file was compared by itself, and the first ones filled the memory before one did not fit."""
    free = itertools.count(4000)
    monkeypatch.setattr(memory_files, "available_bytes", lambda: next(free))
    reserve = Reserve(str(home))
    reserve.refresh()
    reserve.refresh()
    (text,) = reported(caplog)
    assert text.startswith("nothing is staged in the memory of this node now: step 4 takes") and "--ranks A-B" in text
    assert not held(home).exists()


def test_a_copy_needs_room_for_itself_only(tmp_path, memory, monkeypatch, call_json) -> None:
    """A file was compared with twice its length, as if it came from a buffer of that length."""
    home = tmp_path / "home"
    lastgood.save(home, {"w": np.zeros(3 << 20, np.uint8)})
    monkeypatch.setattr(memory_files, "available_bytes", lambda: 4 << 20)
    by_hand(call_json, home)


def test_half_a_copy_goes_when_the_memory_becomes_short(home, memory, monkeypatch, caplog) -> None:
    def free() -> int:
        """Nothing is free any more once the file of the first rank has its memory."""
        return 0 if any(one.stat().st_size for one in held(home).glob("gen/*/r00000.safetensors")) else 1 << 30

    monkeypatch.setattr(memory_files, "available_bytes", free)
    Reserve(str(home)).refresh()
    assert "not enough memory" in reported(caplog)[0] and there(home) == set()


def test_nothing_is_staged_for_a_job_without_a_tier_in_memory(home: Path, memory: Path, caplog) -> None:
    """It filled the memory of the node with what no start read."""
    caplog.set_level("INFO")
    (home / layout.PLACES).unlink()
    reserve = Reserve(str(home))
    reserve.refresh()
    reserve.refresh()
    (text,) = reported(caplog)
    assert "had no tier in memory" in text and not held(home).exists()
    opened_in_memory(home)
    reserve.refresh()
    assert there(home) == {4}
