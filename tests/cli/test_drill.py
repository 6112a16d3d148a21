"""`lastgood drill`: real copies, processes and agents; the run stays as it was, and nothing of the drill is left."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agents import until
from cli_runs import DATA, at, contents, writing
from harness import flip
from lastgood.errors import NotWritable
from lastgood.format import layout
from lastgood.ports import Tier
from lastgood.records import PlaceList
from lastgood.run import access, agent_link, drill, drill_acts, drill_scratch, drill_victim, memory_place, paths

pytestmark = pytest.mark.slow

KILLED, AGENT = "killed within a save to the disk", "the agent is killed while it copies"
BYTE, CUT, MISSING = (f"{one}, on the disk" for one in drill_acts._DAMAGES.values())


@pytest.fixture
def home(tmp_path: Path, memory: Path) -> Path:
    """A run of two steps. It has memory on this machine once `in_memory` was called."""
    writing(tmp_path / "home", 1, 2)
    return tmp_path / "home"


def in_memory(home: Path) -> Path:
    """Put the run into the memory of this machine too."""
    folder = Path(memory_place.folder_of(home))
    memory_place.make(str(folder))
    shutil.copytree(home, folder, dirs_exist_ok=True)
    return folder


def by_act(document: dict) -> dict[str, dict]:
    return {one["what"]: one for one in document["acts"]}


def left(home: Path) -> list[str]:
    """What a drill has left beside the run, and in memory."""
    user = Path(memory_place.folder_of_user())
    beside = [one.name for one in home.parent.iterdir() if one != home]
    return sorted(beside + [one.name for one in user.glob("*/") if not one.name.startswith(f"{home.name}-")])


def test_each_way_back_of_a_run_in_a_directory_works(home, call_json):
    before = contents(home)
    code, document = call_json("drill", home)
    acts = by_act(document)
    assert code == 0 and document["good"] and document["step"] == 2
    assert {what for what, one in acts.items() if one["good"]} == {KILLED, BYTE, CUT, MISSING}
    assert all(one["seconds"] > 0 for one in acts.values() if one["good"])
    assert acts[KILLED]["way_back"] == "the next opening removed half of step 3; step 2 loaded"
    assert acts[BYTE]["way_back"] == "found, and stepped over: step 2 loaded, the one before"
    assert acts[AGENT]["good"] is None and "no tier in the memory" in acts[AGENT]["why"]
    assert contents(home) == before and not left(home)


def test_each_way_back_of_a_run_in_memory_works(home, call_json):
    folder = in_memory(home)
    before = contents(home), contents(folder)
    code, document = call_json("drill", home)
    acts = by_act(document)
    assert code == 0 and all(one["good"] for one in acts.values()) and len(acts) == 9
    assert acts[MISSING]["way_back"] == "found, and mended from memory; step 2 loaded"
    assert acts["a byte of a file differs, in memory"]["way_back"] == "found, and mended from the disk; step 2 loaded"
    assert acts["the disk is gone"]["way_back"] == "step 2 loaded from memory, and copied back"
    assert acts[AGENT]["way_back"].endswith("the copy of step 3, and removed the memory")
    assert (contents(home), contents(folder)) == before and not left(home)


def test_parity_mends_the_copy_of_the_newest_good_step(run, call_json):
    before = contents(run)
    code, document = call_json("drill", run)
    assert code == 0 and document["step"] == 3, "step 4 is not good"
    assert by_act(document)[BYTE]["way_back"] == "found, and mended from parity; step 3 loaded"
    assert contents(run) == before


def test_a_way_back_that_fails_is_shown_and_has_its_exit_code(home, call, call_json, monkeypatch):
    in_memory(home)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))  # no process and no agent can be started
    code, document = call_json("drill", home)
    acts = by_act(document)
    assert code == 4 and not document["good"] and acts[KILLED]["good"] is False and acts[BYTE]["good"]
    assert acts[AGENT]["good"] is False and "could not save" in acts[AGENT]["why"]
    code, out, err = call("drill", home)
    assert code == 4 and "FAILED" in out and "3 failed" in out and "removed" not in out and "copying step 2" in err
    assert not left(home)


def test_a_copy_that_is_not_the_original_fails_the_drill(home, monkeypatch):
    found = drill.newest_good

    def other(*args: object) -> drill_acts.Original:
        return found(*args)._replace(digest="0" * 32)

    monkeypatch.setattr(drill, "newest_good", other)
    acts = drill.drill(str(home), None, print).acts
    assert {one.why for one in acts if one.good is False} == {"step 2 was loaded, and is not the original"}


def test_the_newest_good_generation_is_found_before_damage(home, call_json, call):
    flip(at(home, 2) / DATA)
    assert call_json("drill", home)[1]["step"] == 1
    flip(at(home, 1) / DATA)
    code, _, err = call("drill", home)
    assert code == 4 and "no generation of this run is good" in err and not left(home)
    assert "each node" not in err


def test_the_part_of_one_node_names_the_way_to_the_run(home, call):
    """Of the directory that each node has for itself it said that nothing is good, and not what to do."""
    for one in home.glob("gen/*/*.manifest.json"):
        one.unlink()
    code, _, err = call("drill", home)
    assert code == 4 and "If each node has this directory for itself, give the last place" in " ".join(err.split())


def test_a_full_disk_refuses_a_drill_before_a_byte_is_copied(home, call, monkeypatch):
    """The copies took all that was free, and the next save of the job deleted generations to have room."""
    monkeypatch.setattr(drill, "free_bytes", lambda folder: 4 * drill_acts.RECORDS_BYTES)
    code, _, err = call("drill", home)
    assert code == 5 and "free are 67,108,864, of which it gets one part of 4" in err and not left(home)


def test_too_little_memory_leaves_out_the_acts_in_memory(home, call_json, monkeypatch):
    in_memory(home)
    monkeypatch.setattr(drill.memory_limits, "available_bytes", lambda: 4 * drill_acts.RECORDS_BYTES)
    code, document = call_json("drill", home)
    acts = by_act(document)
    assert code == 0 and acts[AGENT]["good"] is None and "of 67.1 MB that are free a drill" in acts[AGENT]["why"]


def test_a_job_that_fills_the_disk_meanwhile_ends_the_acts(home, call_json, monkeypatch):
    monkeypatch.setattr(drill_acts.files, "free_bytes", lambda folder: 100_000)
    code, document = call_json("drill", home)
    acts = by_act(document)
    assert code == 0 and {one["good"] for one in acts.values()} == {None}
    assert "the next save of the job need" in acts[KILLED]["why"]


def test_a_full_disk_is_not_the_failure_of_a_way_back(home, call_json, monkeypatch):
    """The process that saves met a full disk, and the drill said that the way back failed, with exit code 4."""
    make_whole, (_, most) = drill_acts.Stage.make_whole, resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_a_full_disk(stage: drill_acts.Stage, *source: Tier) -> None:
        make_whole(stage, *source)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))  # its copies are longer

    monkeypatch.setattr(drill_acts.Stage, "make_whole", on_a_full_disk)
    try:
        code, document = call_json("drill", home)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    acts = by_act(document)
    assert code == 0 and {one["good"] for one in acts.values()} == {None}
    assert "a process could not save into the scratch run: longer than a file may be" in acts[KILLED]["why"]


def test_a_generation_without_a_tensor_file_is_not_damaged(home, call_json, monkeypatch):
    """The longest of no files was asked for, which ended the drill in a traceback. Only another writer leaves none."""
    monkeypatch.setattr(drill_acts.commit, "read_manifests", lambda *_: [])
    code, document = call_json("drill", home)
    assert code == 0 and by_act(document)[BYTE]["why"] == "this generation has no tensor file"


def test_another_directory_for_the_copies_can_be_named(home, tmp_path, call, call_json):
    (tmp_path / "other").mkdir()
    assert call_json("drill", home, "--in", tmp_path / "other")[0] == 0
    assert not list((tmp_path / "other").iterdir())
    assert call("drill", home, "--in", tmp_path / "none")[0] == 3
    assert call("drill", home, "--in", "")[0] == 3, "the current folder was never named"
    assert call("drill", f"{paths.MEMORY}{in_memory(home)}")[0] == 3, "nothing is beside memory"


def test_slots_and_object_stores_are_copied_to_a_directory(tmp_path, bucket, call, call_json):
    slots = f"{paths.SLOTS}{tmp_path / 'slots'}"
    writing(slots, 1, 2)
    assert call("copy", slots, bucket)[0] == 0
    code, document = call_json("drill", slots)
    assert code == 0 and document["good"] and document["step"] == 2
    assert call("drill", bucket)[0] == 3, "there is no directory beside it"
    code, document = call_json("drill", bucket, "--in", tmp_path)
    assert code == 0 and document["good"] and document["place"] == bucket
    assert [one.name for one in tmp_path.iterdir()] == ["slots"]


def started(home: Path) -> subprocess.Popen[bytes]:
    """A drill in another process, which has begun to copy."""
    command = [sys.executable, "-m", "lastgood", "drill", str(home)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until(lambda: process.poll() is not None or list(home.parent.glob("home.drill-*/run/gen/*")))
    return process


def test_an_interrupted_drill_leaves_nothing(home):
    """By SIGTERM, as from a scheduler, which left everything behind."""
    in_memory(home)
    process = started(home)
    process.send_signal(signal.SIGTERM)
    assert b"interrupted" in process.communicate()[1] and process.returncode == 130
    assert not left(home)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_drill_ends_by_other_signals_as_by_ctrl_c(home, call, monkeypatch, number):
    monkeypatch.setattr(drill_acts.Stage, "make_whole", lambda stage: os.kill(os.getpid(), number))

    def before(*_: object) -> None:
        pytest.fail("the process would have ended, and left the copies")

    default = signal.signal(number, before)
    try:
        assert call("drill", home)[0] == 130 and not left(home) and signal.getsignal(number) is before
    finally:
        signal.signal(number, default)


def test_the_next_drill_removes_what_a_killed_one_has_left(home, call_json):
    in_memory(home)
    process = started(home)
    process.kill()
    process.communicate()
    (folder,) = left(home)[:1]
    other = home.parent / "home.drill-00000000"
    (other / "photos").mkdir(parents=True)
    code, document = call_json("drill", home)
    assert code == 0 and document["cleared"] == [folder]
    assert left(home) == [other.name], "a folder with other files is not a drill's"


def test_a_process_of_a_killed_drill_makes_no_folder(tmp_path):
    # A drill was killed while the process that it saves with was starting. The next drill removed the folder, and then
    # that process opened its place in it, which made it anew.
    place = tmp_path / "home.drill-00000000" / "run"
    ended = subprocess.run([sys.executable, "-m", "lastgood.run.drill_victim", place, "1"], check=False)
    assert ended.returncode == 1 and not place.parent.exists()


def test_the_process_that_saves_takes_no_module_from_here(home, tmp_path, monkeypatch):
    """A `queue.py` in the current folder was imported in place of Python's."""
    (tmp_path / "queue.py").write_text("raise SystemExit('of somebody else')")
    monkeypatch.chdir(tmp_path)
    with drill_victim.halfway(str(home)) as process:
        assert process.poll() is None


def test_a_folder_that_leads_to_a_run_is_left_alone(home):
    """`run` was a link to a real run: its agent was killed, and its memory removed, which may be the only copy."""
    folder, other = home.parent / "home.drill-00000000", home.parent / "home.drill-00000001"
    for one, name in ((folder, "run"), (other, "away")):
        one.mkdir()
        (one / name).symlink_to(home)
    memory = in_memory(home)
    assert drill_scratch.clear(str(home.parent), "home") == []
    assert memory.exists() and (folder / "run").is_symlink() and (other / "away").is_symlink()


def test_folders_of_other_users_are_left_alone(home, monkeypatch):
    """The folder of a drill of another user, which only he may list, ended each drill in a traceback."""
    (home.parent / "home.drill-00000000").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(drill_scratch.os, "geteuid", lambda: os.getuid() + 1)
        assert drill_scratch.clear(str(home.parent), "home") == []
    assert drill_scratch.clear(str(home.parent), "home") == ["home.drill-00000000"]


def test_a_folder_that_cannot_be_locked_is_removed(home, monkeypatch):
    def no_lock(path: str) -> None:
        raise OSError(errno.ENOLCK, "No locks available", path)

    monkeypatch.setattr(drill_scratch, "Lock", no_lock)
    with pytest.raises(NotWritable, match="No locks"), drill_scratch.opened(str(home.parent), "home"):
        pass
    assert not left(home)


def test_copies_never_lie_in_a_place_of_the_run(home, tmp_path, call, monkeypatch):
    """`--in '~'` led into the run, and so did slots, and the other places of the run."""
    monkeypatch.setenv("HOME", str(home))
    assert call("drill", home, "--in", "~")[0] == 3
    assert call("drill", home, "--in", home / "gen")[0] == 3
    (tmp_path / "disk" / "below").mkdir(parents=True)
    record = PlaceList(format=layout.FORMAT, places=[str(tmp_path / "disk"), str(home)])
    (home / layout.PLACES).write_bytes(layout.encode(record))
    assert call("drill", home, "--in", tmp_path / "disk" / "below")[0] == 3
    writing(f"{paths.SLOTS}{tmp_path / 'slots'}", 1)
    assert call("drill", f"{paths.SLOTS}{tmp_path / 'slots'}", "--in", tmp_path / "slots")[0] == 3


def test_a_second_drill_of_a_node_is_refused(home, call):
    """Each had the other one's copies on other nodes removed, so no act was a proof."""
    folder = in_memory(home)
    with drill_scratch.alone(str(folder)):
        code, _, err = call("drill", home)
        assert code == 3 and "another drill of this run plays on this node" in err and not left(home)
    with drill_scratch.alone(str(folder)):
        pass


def test_a_run_has_one_name_for_drills_through_links(tmp_path):
    """A killed drill of the link left its copies, and no drill of the run itself removed them."""
    (tmp_path / "gpt").mkdir()
    (tmp_path / "latest").symlink_to("gpt")
    assert drill_scratch.name_of(str(tmp_path / "latest")) == drill_scratch.name_of(str(tmp_path / "gpt")) == "gpt"
    assert drill_scratch.name_of("s3://bucket/gpt/") == "gpt"


@pytest.mark.parametrize("first", ["memory", "disk"])
def test_the_first_place_of_a_run_is_what_a_drill_plays_with(home, tmp_path, first):
    """The disk of the node was the first place once: a drill found its AGENT.json, and left the memory out."""
    memory, disk = Path(memory_place.folder_of(home)), tmp_path / "disk"
    disk.mkdir()
    (disk / agent_link.SPEC).write_text("{}")
    urls = [f"{paths.MEMORY}{memory}"] * (first == "memory") + [str(disk), str(home)]
    urls += [f"{paths.MEMORY}{memory}"] * (first == "disk")  # left from an earlier opening
    (home / layout.PLACES).write_bytes(layout.encode(PlaceList(format=layout.FORMAT, places=urls)))
    front, lacks = drill.front_of(str(home), access.for_reading(home))
    expected = paths.Place(str(memory), "memory") if first == "memory" else paths.Place(str(disk), "directory")
    assert front == expected and not lacks


def test_a_running_drill_is_not_removed_by_another(home):
    parent = str(home.parent)
    with drill_scratch.opened(parent, "home") as places:
        assert drill_scratch.clear(parent, "home") == [] and os.path.isdir(os.path.dirname(places.disk.root))
    assert not left(home)
