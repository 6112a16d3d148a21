"""Runs whose first tier is the memory of the machine, in front of a directory."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import lastgood
from agents import ended, until
from harness import one_place, reported, steps
from lastgood import errors
from lastgood.format import commit, layout
from lastgood.io import memory_files
from lastgood.records import PlaceList
from lastgood.run import access, memory_place, outcomes, place_list
from training import Training

EVERY = lastgood.Every(steps=1)


class Run:
    """A run with a home, and a tier in memory that every step is saved to."""

    def __init__(self, home: Path) -> None:
        self.home, self.training = home, Training()
        self.memory = Path(memory_place.folder_of(home))

    def opened(self, home_every: int = 100, **options: object) -> lastgood.Checkpointer:
        self.training = Training()
        tiers = [lastgood.Tier("memory://", cadence=EVERY)]
        wanted = {"cadence": lastgood.Every(steps=home_every), "tiers": tiers, **options}
        return lastgood.Checkpointer(self.home, self.training.state, **wanted)

    def train(self, total: int, **options: object) -> lastgood.Restored:
        with self.opened(**options) as ckpt:
            found = ckpt.restore()
            for step in range(found.step + 1, total + 1):
                self.training.step()
                ckpt.step(step)
        return found


@pytest.fixture
def run(tmp_path: Path, memory: Path) -> Run:
    return Run(tmp_path / "home")


KILLED = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from lastgood.run import agent_link
from test_memory_runs import Run
agent_link.AgentLink.check = lambda self: None  # no agent copies what this process leaves
run = Run(Path(sys.argv[2]))
ckpt = run.opened()
ckpt.restore()
for step in range(1, 8):
    run.training.step()
    ckpt.save(step).committed()
os.kill(os.getpid(), 9)
"""


def killed(run: Run, program: str = KILLED) -> None:
    """Train in a process that kills itself, and leaves its newest steps in memory."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    assert subprocess.run([sys.executable, "-c", program, path, str(run.home)]).returncode == -signal.SIGKILL


def test_a_killed_process_loses_no_save_that_was_in_memory_only(run: Run) -> None:
    killed(run)
    assert steps(run.memory)[-1] == 7 and 7 not in steps(run.home)
    found = run.train(9)
    assert found.step == 7 and list(found.sources) == [f"memory://{run.memory}"]
    whole = Training()
    for _ in range(9):
        whole.step()
    assert run.training.weights() == whole.weights()


def test_a_save_in_memory_is_durable_once_its_copy_is(run: Run) -> None:
    with run.opened(home_every=2) as ckpt:
        ckpt.restore()
        run.training.step()
        first = ckpt.step(1)
        first.committed()
        assert first.durable("process") and not first.durable() and first.where() == [f"memory://{run.memory}"]
        run.training.step()
        second = ckpt.step(2)
        second.result()
        assert second.durable() and not second.durable("node")
        assert second.where() == [f"memory://{run.memory}", str(run.home)]


def test_a_normal_end_leaves_the_newest_step_at_home(run: Run) -> None:
    run.train(5)
    assert steps(run.home)[-1] == 5


def test_a_signal_leaves_the_last_step_at_home(run: Run) -> None:
    with run.opened(preemption=lastgood.Preemption()) as ckpt, pytest.raises(lastgood.Preempted):
        ckpt.restore()
        for step in range(1, 10):
            run.training.step()
            if step == 4:
                signal.raise_signal(signal.SIGTERM)
            ckpt.step(step)
    assert steps(run.home)[-1] == 4


def test_a_milestone_is_kept_at_home_and_leaves_memory(run: Run) -> None:
    """Memory is bounded: milestones that stay in it for ever would fill it."""
    with run.opened() as ckpt:
        ckpt.restore()
        for step in range(1, 7):
            run.training.step()
            ckpt.save(step, milestone=step == 2).result()
        ckpt.wait()
        assert 2 not in steps(run.memory) and len(steps(run.memory)) <= 2
    assert 2 in steps(run.home)


def test_deleted_generations_leave_no_files_behind_while_a_job_runs(run: Run, call_json) -> None:
    """GOING.json and the manifest of each deleted generation stayed at home until the next opening.

    A job of one process copies from memory to home. The manifest was created after the newest listing of its folder,
    and the deletion skipped a file that this listing lacked, as if it were in a pack.
    """
    with run.opened(home_every=1, retention=lastgood.Keep(last=1)) as ckpt:
        ckpt.restore()
        for step in range(1, 8):
            run.training.step()
            ckpt.step(step).result()
        ckpt.wait()
        code, listed = call_json("ls", str(run.home))
        states = {row["step"]: row["state"] for row in listed["generations"]}
        assert code == 0 and "deleting" not in states.values() and 7 in states and len(states) <= 3
        assert {folder.name[:12] for folder in (run.home / "gen").iterdir()} == {f"{step:012}" for step in states}


def test_after_a_restart_of_the_machine_the_home_is_restored(run: Run) -> None:
    run.train(5)
    ended(str(run.memory))  # nothing else changes these folders
    shutil.rmtree(run.memory)
    found = run.train(6)
    assert found.step == 5 and list(found.sources) == [str(run.home)]
    assert steps(run.memory)[-1] == 6


def test_memory_that_is_short_sends_saves_to_the_home_disk(run: Run, monkeypatch, caplog) -> None:
    monkeypatch.setattr(memory_files, "available_bytes", lambda: 6000)
    run.train(3)
    assert "memory is short" in caplog.text and "has room for 0 states" in caplog.text
    spilled = Path(memory_place.spill_folder(str(run.home)))
    assert [*spilled.rglob("*.safetensors")] and not [*run.memory.rglob("*.safetensors")]
    monkeypatch.undo()
    assert Run(run.home).train(4).step == 3
    assert one_place(run.home).verify(3).good, "the spill folder is no part of the home"


IN_GROUP = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
import torch, lastgood
state = {"w": torch.zeros(int(sys.argv[3])), "n": 0}
tier = lastgood.Tier("memory://", cadence=lastgood.Every(steps=1), retention=lastgood.Keep(last=8))
with lastgood.Checkpointer(sys.argv[2], state, cadence=lastgood.Every(steps=8), tiers=[tier]) as ckpt:
    ckpt.restore()
    for n in range(1, 9):
        state["w"].fill_(n)
        ckpt.save(n).result()
print(max(map(int, open(sys.argv[1] + "/memory.max_usage_in_bytes"))))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "limit"), [pytest.param(30_000_000, 1_000_000_000, marks=pytest.mark.long), (25_000_000, 560 << 20)]
)
def test_the_limit_of_a_control_group_is_kept_by_spilling(tmp_path, memory, numbers: int, limit: int) -> None:
    """Eight generations of 120 MB do not fit into the group: without the limit it would be killed. A group of 560 MiB
    was killed all the same: the buffers, the agent and pages on their way to the disk need more than was left."""
    group = Path("/sys/fs/cgroup/memory") / f"lastgood-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs root, and version 1 of control groups: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        command = [sys.executable, "-c", IN_GROUP, str(group), str(tmp_path / "home"), str(numbers)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "memory is short" in done.stderr and int(done.stdout) <= limit
        assert steps(tmp_path / "home")[-1] == 8
    finally:
        ended(memory_place.folder_of(tmp_path / "home"))
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_the_memory_of_another_user_is_refused(run: Run, memory: Path) -> None:
    """Another user could have made the folder first, and read the state."""
    parent = run.memory.parent
    parent.mkdir()
    for mode in (0o755, 0o770):
        parent.chmod(mode)
        with pytest.raises(errors.NotWritable, match="others could read or change the state"):
            run.opened()
    parent.rmdir()
    parent.symlink_to(memory)
    with pytest.raises(errors.NotWritable):
        run.opened()


def test_the_folder_of_a_run_is_for_its_user_alone(run: Run) -> None:
    run.train(1)
    for folder in (run.memory, run.memory.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_variable_that_names_a_disk_is_refused(run: Run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(memory_place.VARIABLE, str(tmp_path))
    if memory_place.file_system(str(tmp_path)) == "tmpfs":
        pytest.skip("the temporary directory is in memory")
    with pytest.raises(errors.Refused, match=r"not in memory(?s:.*)Name the mount point of a tmpfs in LASTGOOD_MEMORY"):
        run.opened()


def test_a_variable_that_names_a_file_is_refused(run: Run, tmp_path: Path, monkeypatch, call) -> None:
    """It was TierDown, a disk that failed, and `lastgood agent status` ended with a traceback."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(memory_place.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(errors.Refused, match=r"file is no folder(?s:.*)Name the mount point of a tmpfs"):
        run.opened()
    assert call("agent", "status")[0] == 0


def test_two_nodes_on_one_machine_have_memory_of_their_own(tmp_path: Path) -> None:
    folders = {memory_place.url_of(tmp_path, {"LASTGOOD_NODE": name}) for name in ("a", "b", "")}
    assert len(folders) == 3 and memory_place.url_of("s3://b/gpt/run").startswith("memory:///dev/shm/lastgood-")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to another user")
def test_a_folder_for_files_without_room_is_not_that_of_another_user(tmp_path: Path) -> None:
    """One that a killed agent of another user had left on the shared disk locked this one out of the run."""
    theirs = memory_place.spill_folder(str(tmp_path))
    assert theirs == memory_place.spill_folder(str(tmp_path))
    os.makedirs(theirs)
    os.chown(theirs, 12345, -1)
    own = memory_place.spill_folder(str(tmp_path))
    os.mkdir(own)
    shutil.rmtree(theirs)
    assert own == memory_place.spill_folder(str(tmp_path)) != theirs, "what lies there is found"


def test_memory_is_no_home_of_a_run_and_no_lower_tier(tmp_path: Path) -> None:
    with pytest.raises(errors.Refused, match="the last place of a run has to be durable"):
        lastgood.Checkpointer("memory:///dev/shm/x", {})
    with pytest.raises(errors.Refused, match="not the first tier"):
        lastgood.Checkpointer(tmp_path, {}, tiers=[lastgood.Tier(tmp_path / "a"), lastgood.Tier("memory://")])


def test_a_commit_in_memory_alone_does_not_count_as_durable_in_time() -> None:
    """`durable_within_seconds` would never have raised while no copy was made at home."""
    now = 0.0
    found = outcomes.Outcomes("run", lambda: now)
    found.require_durable(1, 10)
    found.durable(1, in_memory=True)
    found.report()
    now = 11.0
    with pytest.raises(errors.NothingDurable):
        found.require_durable(2, 10)
    found.copied(1)
    found.report()
    found.require_durable(3, 10)


def test_the_tiers_of_a_run_show_what_memory_holds(run: Run, call_json) -> None:
    run.train(3)
    _, data = call_json("tiers", str(run.home))
    assert [one["place"] for one in data["places"]] == [f"memory://{run.memory}", str(run.home)]
    assert call_json("ls", f"memory://{run.memory}")[1]["generations"]


def test_commands_name_memory_that_was_given_back_and_miss_nothing(run: Run, call_json, caplog) -> None:
    """After a clean end, `tiers` ended with exit code 5 and `scrub` and `repair` warned."""
    run.train(3)
    ended(str(run.memory))
    shutil.rmtree(run.memory)
    code, data = call_json("tiers", str(run.home))
    assert code == 0 and data["places"][0]["note"].startswith("not in the memory of this machine")
    assert call_json("tiers", str(run.home), f"memory://{run.memory}")[0] == 5, "it was asked for"
    for command in ("scrub", "repair"):
        caplog.clear()
        assert call_json(command, str(run.home))[0] == 0
        assert [one.levelname for one in caplog.records] == ["INFO"] and "is not in the memory of" in caplog.text


def test_the_home_of_another_run_is_refused_beside_its_old_memory(run: Run) -> None:
    run.train(3)
    ended(str(run.memory))  # nothing else changes these folders
    shutil.rmtree(run.home)
    lastgood.save(run.home, {"n": 1})
    with pytest.raises(errors.Refused, match="hold different runs"):
        run.opened()
    assert steps(run.memory) == [3], "nothing was touched"
    shutil.rmtree(run.home)
    with reported("is empty, and memory:///.* To start anew, remove .*home-"):
        assert run.train(4).step == 3


def test_newer_saves_in_memory_that_is_not_looked_at_are_reported(run: Run, tmp_path: Path) -> None:
    """A run that was renamed, or opened without its tier, went back without a word, and lost its memory later."""
    killed(run)
    moved = tmp_path / "moved"
    run.home.rename(moved)
    for _ in range(2):
        report = reported(f"memory://{run.memory} holds step 7 of this run, which is newer")
        with report, lastgood.Checkpointer(moved, Training().state) as ckpt:
            assert ckpt.restore().step < 7
    shutil.rmtree(run.memory)
    with lastgood.Checkpointer(moved, Training().state) as ckpt:
        ckpt.restore()
    assert place_list.listed(access.for_reading(moved)) == [str(moved)]


def test_a_directory_has_one_memory_however_it_is_written(tmp_path: Path, monkeypatch) -> None:
    """A job that was started in a folder behind a link did not find what it had saved."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to("disk")
    monkeypatch.chdir(tmp_path / "scratch")
    spellings = [tmp_path / "disk" / "gpt", tmp_path / "scratch" / "gpt", "gpt", f"file://{tmp_path}/scratch/gpt"]
    assert len({memory_place.folder_of(one) for one in spellings}) == 1


def test_memory_that_was_removed_under_a_job_is_made_anew(run: Run) -> None:
    """systemd removes it when the user logs out. Every later save was refused, also the last one, although the disk
    below was whole."""
    with run.opened(home_every=4) as ckpt:
        ckpt.restore()
        for step in range(1, 11):
            run.training.step()
            if step == 6:
                ckpt.wait()
                shutil.rmtree(run.memory)
                with reported("was removed while the run was open"):
                    ckpt.save(step).committed()
                    ckpt.wait()
            else:
                ckpt.save(step).committed()
        ckpt.wait()
    assert steps(run.home)[-1] == 10
    again = run.opened()
    with again as ckpt:
        assert ckpt.restore().step == 10


def test_a_listing_of_a_run_names_what_is_newer_in_memory(run: Run, call) -> None:
    """It said that nothing was committed yet, although the memory of the machine had the newest step."""
    killed(run)
    code, out, _ = call("ls", str(run.home))
    assert code == 0 and "holds step 7, which is newer: a start with this tier restores it" in " ".join(out.split())


def test_going_on_without_newer_memory_is_reported(run: Run, call) -> None:
    """A run was opened without its tier in memory, which held a newer step, and trained on. The next opening with that
    tier took the step at home, deleted the newer one without a word, and the listings had promised the newer one: both
    incarnations had the same order."""
    killed(run)
    training = Training()
    with reported("step 7 of this run, which is newer and is not looked at here.*before a save here abandons it"):
        ckpt = lastgood.Checkpointer(run.home, training.state, cadence=EVERY)
    with ckpt:
        first = ckpt.restore().step
        training.step()
        ckpt.step(first + 1)
    memory = commit.survey(access.for_reading(f"memory://{run.memory}"))
    assert commit.survey(access.for_reading(run.home)).order > memory.order
    for command in ("ls", "tiers"):
        out = " ".join(call(command, str(run.home))[1].split())
        assert f"a restore takes step {first + 1} " in out and "a start with this tier restores it" not in out
    with reported(f"step 7, but the run went on without it, to step {first + 1}, .*go back to it now: restore.step=7."):
        ckpt = run.opened()
    with ckpt:
        assert ckpt.restore(step=7).step == 7


def test_a_branch_in_memory_that_is_newer_with_a_lower_step_counts(run: Run) -> None:
    """A run went back to step 5 on purpose, and had step 6 in memory when it was killed. The next opening, without that
    tier, took step 7 at home, which had been left, without a word, and its incarnation had the same order."""
    with run.opened(home_every=1) as ckpt:
        ckpt.restore()
        for step in (5, 6, 7):
            run.training.step()
            ckpt.save(step).result()
    ended(str(run.memory))
    killed(run, KILLED.replace("ckpt.restore()", "ckpt.restore(step=5)").replace("range(1, 8)", "range(6, 7)"))
    training = Training()
    with (
        reported("step 6 of this run, which is newer and is not looked at here"),
        lastgood.Checkpointer(run.home, training.state, cadence=EVERY) as ckpt,
    ):
        assert ckpt.restore().step == 7
        training.step()
        ckpt.step(8)
    memory = commit.survey(access.for_reading(f"memory://{run.memory}"))
    assert commit.survey(access.for_reading(run.home)).order > memory.order
    assert lastgood.load(run.home).restored.step == 8
    lastgood.save(run.home, training.state, step=9)
    assert lastgood.load(run.home).restored.step == 9
    with reported("step 6, but the run went on without it, to step 9"):
        ckpt = run.opened()
    with ckpt:
        assert ckpt.restore().step == 9


def test_a_list_of_places_that_names_none_does_no_harm(run: Run, call) -> None:
    """The list is a hint. With a text in it that is no place the run could not be opened any more."""
    lastgood.save(run.home, Training().state, step=1)
    listed = PlaceList(format=layout.FORMAT, places=["memory://x", str(run.home)])
    (run.home / layout.PLACES).write_bytes(layout.encode(listed))
    assert call("ls", str(run.home))[0] == 0
    assert call("tiers", str(run.home))[0] == 5, "that place cannot be read"
    run.train(2)
    assert call("tiers", str(run.home))[0] == 0


def test_memory_of_a_deleted_run_is_named(run: Run, call) -> None:
    """Commands said that there is nothing, and to check the path, although a start would have gone on from memory."""
    killed(run)
    shutil.rmtree(run.home)
    code, _, err = call("verify", str(run.home))
    assert code == 3 and f"memory://{run.memory} has saves of a run with this path" in " ".join(err.split())


def test_a_listing_of_a_renamed_run_promises_nothing(run: Run, tmp_path: Path, call) -> None:
    """It said that a start restores what lies in memory under the path from before, which a start does not look at."""
    killed(run)
    run.home.rename(tmp_path / "renamed")
    assert "step 7 of this run, which is newer and is not looked at here" in " ".join(
        call("ls", str(tmp_path / "renamed"))[1].split()
    )
    out = " ".join(call("tiers", str(tmp_path / "renamed"))[1].split())
    assert "which a start by this path does not see" in out and "a restore takes step 7" not in out


def test_what_only_memory_has_is_loaded_verified_shown_and_exported(run: Run, tmp_path: Path, call, call_json) -> None:
    """`lastgood.load` returned an older step than `restore()`, and the commands said that nothing was committed."""
    lastgood.save(run.home, Training().state, step=0)
    keeps = "run.opened(retention=lastgood.Keep(last=9))"  # a slow process gets enough copies at home to delete step 0
    killed(run, KILLED.replace("run.opened()", keeps).replace("import Run\n", "import Run, lastgood\n"))
    assert lastgood.load(run.home).restored.step == 7
    assert lastgood.load(run.home, step=0).restored.step == 0, "what the home has is read there"
    opened = lastgood.open(run.home)
    assert opened.generation().step == 7 and opened.verify().good
    assert all(opened.bytes_of(one.name)[0] for one in opened.manifest(opened.generation()).pieces)
    for command in (["verify"], ["show"], ["export", "--to", str(tmp_path / "model.safetensors")]):
        code, out, err = call(command[0], str(run.home), *command[1:])
        assert code == 0 and f"step 7 was read from memory://{run.memory}" in " ".join(err.split()), (command, out)
    assert call_json("show", str(run.home))[1]["step"] == 7
    (blob,) = run.memory.glob("gen/000000000007-*/*.safetensors")
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    assert call_json("verify", str(run.home))[0] == 4
    with reported("stepping over"):
        assert lastgood.load(run.home).restored.step < 7


def test_a_part_in_memory_is_named_where_the_home_has_nothing(run: Run, tmp_path: Path, call) -> None:
    """On a node of several, before the first save at home: `lastgood.load` returned without a word, and the commands
    said that nothing had been committed."""
    killed(run)
    (manifest,) = run.memory.glob("gen/000000000007-*/r00000.manifest.json")
    manifest.unlink()
    for older in {*run.home.glob("gen"), *run.memory.glob("gen/*")} - {manifest.parent}:  # home may have none yet
        shutil.rmtree(older)
    with reported("nothing was loaded: step 7 lies in the memory of several nodes"):
        assert lastgood.load(run.home).restored.generation is None
    scratch = ["--in", str(tmp_path / "scratch")]
    os.mkdir(scratch[1])
    for command in (["show"], ["export", "--to", str(tmp_path / "model.safetensors")], ["verify"], ["drill", *scratch]):
        code, _, err = call(command[0], str(run.home), *command[1:])
        assert code == 3 and "step 7 lies in the memory of several nodes" in " ".join(err.split()), command
    out = " ".join(call("ls", str(run.home))[1].split())
    assert "holds this node's part of step 7" in out and "a start with this tier" not in out


def test_the_memory_of_another_run_is_not_loaded(run: Run) -> None:
    """The home was removed and a new run was begun there; the memory of the old one was left."""
    run.train(3)
    ended(str(run.memory))
    shutil.rmtree(run.home)
    lastgood.save(run.home, {"n": 1}, step=1)
    assert lastgood.load(run.home).restored.step == 1


def test_what_another_user_may_have_put_into_memory_is_not_loaded(run: Run, call) -> None:
    """Any user can make the folder of another one in /dev/shm who has none there. A copy of the run with a newer step
    of other weights was loaded from it in place of the newest step at home."""
    lastgood.save(run.home, Training().state, step=0)
    killed(run)
    run.memory.parent.chmod(0o770)
    assert lastgood.load(run.home).restored.step < 7 and lastgood.open(run.home).generation().step < 7
    assert "which is newer" not in call("ls", str(run.home))[1]
    run.memory.parent.chmod(0o700)
    assert lastgood.load(run.home).restored.step == 7


def test_a_part_of_a_newer_save_in_memory_is_named_and_not_read(tmp_path, memory, call, call_json) -> None:
    """Of a job on several nodes each has the files of its ranks: a load of a part would have found damage."""
    golden = Path(__file__).parents[1] / "golden" / "ranks"
    home = Path(shutil.copytree(golden, tmp_path / "home"))
    assert call_json("agent", "stage", str(home), "--ranks", "1")[0] == 0
    shutil.rmtree(next((home / "gen").glob("000000000004-*")))
    (home / "POINTER.json").unlink(missing_ok=True)
    code, _, err = call("show", str(home))
    assert code == 0 and "step 4 is newer, and lies in the memory of several nodes" in " ".join(err.split())
    _, _, err = call("drill", str(home), "--in", str(tmp_path))
    assert "step 4 is newer, and lies in the memory of several nodes" in " ".join(err.split())
    assert lastgood.load(home).restored.step == 2
