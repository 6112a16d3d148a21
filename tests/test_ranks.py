"""Ranks: one state, many writers, any number of readers. Worlds of real processes."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "prove"))

import ranks as faults

import lastgood
from harness import save
from lastgood.engine.inline import Inline
from lastgood.errors import TierDown
from lastgood.lab.worlds import world
from lastgood.rawio.files import PosixFiles
from lastgood.records import Manifest
from lastgood.run.content import Content
from lastgood.run.follower import Leader
from lastgood.run.ranks import Announcements, Ranks
from lastgood.tiers.disk import Disk
from lastgood.train.merging import homeless, merged
from ranked import (
    PATIENCE,
    STEPS_OF_A_SAVE,
    differing,
    failing,
    made,
    preempted,
    resaved,
    timed,
    trained,
    trained_in_parts,
    whole,
)

WORLDS = {
    "one process": ("plain", 1),
    "two of DDP": ("ddp", 2),
    "two of FSDP2": ("fsdp", 2),
    "two of tensor parallel": ("tp", 2),
    "three of FSDP2": ("fsdp", 3),
    "four of HSDP": ("hsdp", 4),
    "two by two of FSDP2 and tensor parallel": ("fsdp_tp", 4),
}
STEPS = 4


Factory = pytest.TempPathFactory


def runs_of(worlds: dict[str, tuple[str, int]], paths: Factory) -> dict[str, Path]:
    """A run of each world."""
    runs = {name: paths.mktemp("runs") / kind.replace(" ", "-") for name, (kind, _) in worlds.items()}
    for name, (kind, size) in worlds.items():
        world(size, trained, kind, runs[name], STEPS)
    return runs


def copied(root: Path, to: Path) -> Path:
    return Path(shutil.copytree(root, to, symlinks=True))


def goes_on(kind: str, size: int, run: Path, at: Path) -> None:
    """A run that was interrupted makes the very losses that it would have made."""
    straight = world(size, trained, kind, at / "straight", STEPS + 3)
    resumed = world(size, trained, kind, copied(run, at / "stopped"), STEPS + 3)
    assert resumed == [losses[STEPS:] for losses in straight]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Factory) -> dict[str, Path]:
    return runs_of(WORLDS, tmp_path_factory)


@pytest.mark.parametrize("name", WORLDS)
def test_what_any_world_saved_any_other_loads_to_the_bit(saved, tmp_path, name):
    kind, size = WORLDS[name]
    roots = [copied(root, tmp_path / str(number)) for number, root in enumerate(saved.values())]
    assert world(size, resaved, kind, roots) == [[STEPS] * len(roots)] * size
    for root in roots:
        before, after = whole(root, STEPS), whole(root, STEPS + 1)
        assert before == after
        assert {name.partition(".")[0] for name in before} == {"net", "optimizer"}
        assert lastgood.open(root).verify(STEPS + 1).good


@pytest.mark.parametrize("name", ["two of DDP", "two of FSDP2", "two of tensor parallel", "four of HSDP"])
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(saved, tmp_path, name):
    goes_on(*WORLDS[name], saved[name], tmp_path)


STAGED = {
    "one process": ("stages", 1),
    "a rank for each stage": ("pipeline", 2),
    "two by two by two of stages, FSDP2 and tensor parallel": ("pipeline of meshes", 8),
}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: Factory) -> dict[str, Path]:
    return runs_of(STAGED, tmp_path_factory)


@pytest.mark.parametrize("name", STAGED)
def test_the_stages_of_a_pipeline_go_to_any_other_and_on_as_if_nothing_had_been(staged, tmp_path, name):
    kind, size = STAGED[name]
    roots = [copied(root, tmp_path / root.name) for root in staged.values()]
    assert world(size, resaved, kind, roots) == [[STEPS] * len(roots)] * size
    for root in roots:
        assert whole(root, STEPS) == whole(root, STEPS + 1)
        assert {one.partition(".")[0] for one in whole(root, STEPS)} == {"stage0", "stage1", "optimizer0", "optimizer1"}
    goes_on(kind, size, staged[name], tmp_path)


def test_what_no_stage_has_a_place_for_is_refused_on_every_rank(tmp_path):
    loop = made("stages", 1)
    lastgood.save(tmp_path, {**loop.state, "odd": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"unexpected in the generation: odd\s*Nothing was loaded"):
        world(2, resaved, "pipeline", [tmp_path])


@pytest.mark.parametrize(
    ("of_ranks", "found"),
    [
        ([["stage1", "odd"], ["stage0", "odd"]], ["odd"]),
        ([["stage1", "stage0.more"], ["stage0"]], ["stage0.more"]),
        ([["stage0more.x"], ["stage0"]], []),
        ([[], ["stage0"]], []),
    ],
)
def test_a_name_that_a_rank_has_no_place_for_speaks_of_all_below_it(of_ranks, found):
    assert homeless(of_ranks) == found


HANDED = {"one process": ("app plain", 1), "two of FSDP2": ("app fsdp", 2), "three of FSDP1": ("app fsdp1", 3)}


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory: Factory) -> dict[str, Path]:
    return runs_of(HANDED, tmp_path_factory)


@pytest.mark.parametrize("name", HANDED)
def test_an_object_that_hands_out_shards_is_handed_them_back_in_any_world(handed_out, tmp_path, name):
    """As torch's helpers for state dicts make them; those of FSDP1 are spread no other way. They came back as plain
    tensors."""
    kind, size = HANDED[name]
    roots = [copied(root, tmp_path / root.name) for root in handed_out.values()]
    assert world(size, resaved, kind, roots) == [[STEPS] * len(roots)] * size
    for root in roots:
        assert whole(root, STEPS) == whole(root, STEPS + 1)
    goes_on(kind, size, handed_out[name], tmp_path)


def test_flat_parameters_of_several_ranks_are_refused_with_a_way_out(tmp_path):
    with pytest.raises(RuntimeError, match=r"FSDP1 with several ranks: net .*get_state_dict"):
        world(2, trained, "fsdp1", tmp_path, STEPS)


def test_digests_of_everything_at_the_cut_are_those_of_the_parts_that_each_rank_writes(tmp_path):
    """A tensor that several ranks write in parts was digested whole at the cut, and each of its parts then torn."""
    world(3, trained_in_parts, tmp_path, STEPS)
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [2, 4]
    assert world(2, resaved, "ddp", [tmp_path]) == [[STEPS]] * 2
    assert whole(tmp_path, STEPS) == whole(tmp_path, STEPS + 1)


@pytest.mark.parametrize("name", ["two of DDP", "four of HSDP"])
def test_what_several_ranks_hold_is_written_once(saved, name):
    run = lastgood.open(saved[name])
    generation = run.generation(STEPS)
    manifests = [run.manifest(generation, rank) for rank in range(WORLDS[name][1])]
    pieces = [piece for one in manifests for piece in one.pieces if not piece.name.startswith("rng.")]
    content = Content(run.tier, generation)
    names = {piece.name for piece in pieces}
    assert sum(one.extent.length for one in pieces) == sum(len(content.tensor(name)[1]) for name in names)


class Board:
    """`ports.Store` in one process."""

    def __init__(self) -> None:
        self.posts: dict[str, bytes] = {}

    def set(self, key, data):
        self.posts[key] = data

    def has(self, key):
        return key in self.posts

    def get(self, keys, seconds):
        return [self.posts[key] for key in keys]

    def delete(self, keys):
        for key in keys:
            self.posts.pop(key, None)


@pytest.mark.parametrize(("step_seconds", "ahead"), [(1 / 128, 257), (1.0, 3), (16.0, 1)])
def test_what_all_ranks_are_to_do_is_told_as_far_ahead_as_they_need_to_hear_of_it(step_seconds, ahead):
    """Of steps that take seconds three were waited for: the grace of a preemption was over before them."""
    board, now = Board(), [0.0]
    asking, telling = (Announcements(Ranks(rank, 2, lambda: board, "run"), "end", lambda: now[0]) for rank in (1, 0))
    n = 0

    def step(*ranks):
        nonlocal n
        n, now[0] = n + 1, now[0] + step_seconds
        for one in ranks:
            one.passed(n)
            one.look(n)

    while n < 200:
        step(asking, telling)
    asking.ask()
    while telling.coming is None:
        step(telling)
    assert telling.coming == n + ahead
    while asking.coming is None:
        step(asking)
    assert n <= asking.coming == telling.coming


class Deaf(Board):
    """It can be asked, and takes no verdict."""

    def set(self, key, data):
        if key.endswith("verdict"):
            raise TierDown("the store is gone")
        super().set(key, data)


def test_what_was_committed_stays_where_the_others_could_not_be_told(tmp_path):
    """Rank 0 took a verdict that it could not post for a save that had failed, and removed what it had committed."""
    disk = Disk(PosixFiles(), str(tmp_path))
    writer = Leader(disk, Inline(), ranks=Ranks(0, 1, Board, "run"))
    writer.begin(None)
    deaf = Deaf()
    told = save(writer, 1, {"w": b"x" * 100}, together=Ranks(0, 1, lambda: deaf, "run").topic("save"))
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [told.step] == [1]


def test_what_a_module_says_of_itself_is_each_ranks_own():
    """The last rank's went to all of them."""
    manifests = [
        Manifest(
            format=1, step=1, incarnation="0" * 8, rank=rank, digest="xxh3_128", blobs=[], pieces=[], aliases={},
            values={"net": {"!module": {"net._extra_state": rank, f"net.{rank}": rank}}, f"stage{rank}": rank},
        )
        for rank in range(3)
    ]  # fmt: skip
    for rank in range(3):
        found = merged(manifests, rank, ["net", "stage2"])
        assert found["net"]["!module"]["net._extra_state"] == rank and len(found["net"]["!module"]) == 4
        assert found["stage2"] == 2 and found.keys() == {"net", "stage2", f"stage{rank}"}


def test_what_is_due_by_time_is_saved_by_all_ranks_at_one_step(tmp_path):
    first, *others = world(3, timed, tmp_path, False)
    assert len(first) >= 2 and {kind for kind, _ in first} == {"durable"}
    assert all(other == first for other in others)


def test_a_rank_that_hears_too_late_of_a_step_fails_that_save_and_the_next_is_told_earlier(tmp_path):
    first, second = world(2, timed, tmp_path, True)
    assert first[0][0] == second[0][0] == "failed" and first[0][1] == second[0][1]
    assert "durable" in {kind for kind, _ in first}
    assert [one for one in first if one[0] == "durable"] == [one for one in second if one[0] == "durable"]


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_any_rank_ends_all_of_them_at_one_step_which_is_durable(tmp_path, who):
    told = world(3, preempted, "ddp", tmp_path, who, False)
    assert told[0] == told[1] == told[2] and told[0]["code"] == 75
    assert told[0]["step"] == told[0]["durable"] > 5
    assert lastgood.open(tmp_path).verify(told[0]["durable"]).good


def test_a_rank_that_hears_too_late_of_the_end_ends_all_the_same_and_what_was_durable_stays(tmp_path):
    told = world(2, preempted, "plain", tmp_path, 0, True)
    assert [(one["code"], one["durable"]) for one in told] == [(75, 0), (75, 0)] and told[0]["step"] < told[1]["step"]
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [0]


def test_a_rank_that_has_diverged_fails_the_save_on_all_ranks_by_name(tmp_path):
    for told in world(3, differing, tmp_path, "a weight"):
        assert told["1"] == told["3"] == told["4"] == "durable"
        assert told["2"].startswith("ReplicaDiffers: ") and "net.up.weight" in told["2"]
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1, 3, 4]


def test_buffers_that_differ_are_kept_by_each_rank_from_the_first_save_on(tmp_path):
    told = world(3, differing, tmp_path, "a buffer")
    for rank, one in enumerate(told):
        assert [one[str(n)] for n in (1, 2, 3, 4)] == ["durable"] * 4
        assert one["restored"] == 4 and one["seen"] == [float(rank)] * 3
    run = lastgood.open(tmp_path)
    assert run.verify(2).good and run.verify(4).good
    before = [name for name in whole(tmp_path, 4) if name == "net.seen"]
    assert before and world(4, resaved, "ddp", [tmp_path]) == [[4]] * 4


def test_a_plan_for_another_structure_is_never_used(tmp_path):
    """One rank's state has grown since who writes what was agreed on."""
    told = world(2, differing, tmp_path, "what it is made of")
    for one in told:
        assert one["1"] == one["3"] == one["4"] == "durable"
        assert one["2"].startswith("StepDiffers: ")
    assert told[1]["more"] == [1.0] * 5 and lastgood.open(tmp_path).verify(4).good


FAULTS = [("state", 0), ("state", 1), *((where, who) for where in STEPS_OF_A_SAVE for who in (0, 1))]
FAULTS = [one for one in FAULTS if one not in (("commit", 1), ("after the commit", 1))]  # rank 0 alone commits


@pytest.mark.parametrize(("where", "who"), [one for one in FAULTS if one[0] != "after the commit"])
def test_what_fails_on_one_rank_fails_on_all_with_its_name_and_the_next_save_works(tmp_path, where, who):
    told = world(2, failing, tmp_path, who, where, "fails")
    for rank, one in enumerate(told):
        assert one["1"] == one["3"] == "durable"
        assert one["2"] != "durable" and one["2 seconds"] < PATIENCE
        assert rank == who or f"rank {who}: " in one["2"] or who == 0
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1, 3]
    assert lastgood.open(tmp_path).verify(3).good


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_tell_whether_it_has_sealed_says_so_to_all_at_once(tmp_path, who):
    """The others waited for it as long as for one that is dead."""
    for one in world(2, failing, tmp_path, who, "seal", "cannot tell"):
        assert one["1"] == one["3"] == "durable"
        assert one["2"].startswith("CommitUnknown: ") and one["2 seconds"] < PATIENCE
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1, 3]


@pytest.mark.parametrize(("where", "who"), FAULTS)
def test_a_rank_that_dies_fails_that_save_for_the_others_in_bounded_time_and_the_run_goes_on(tmp_path, where, who):
    told = world(3, failing, tmp_path, who, where, "dies", dies=(who,))
    for rank, one in enumerate(told):
        if rank != who:
            assert one["1"] == "durable" and one["2"] != "durable" and one["2 seconds"] < 4 * PATIENCE
    assert world(2, resaved, "ddp", [tmp_path]) == [[2 if where == "after the commit" else 1]] * 2


def test_a_seeded_slice_of_the_faults_on_one_rank(tmp_path):
    """All of them, and deaths among them: prove/ranks.py."""
    expected, calls = faults.reference(tmp_path, "ddp")
    errnos = [one for one in faults.faults({"ddp": calls}) if one.what != "KILL"]
    chosen = random.Random(1).sample(errnos, 6)
    assert {one.who for one in chosen} == {0, 1}
    for one in chosen:
        assert not faults.trial(tmp_path, {"ddp": expected}, one).problems


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "dcp_drop_in"])
def test_the_examples_run_as_they_stand_and_go_on_where_they_were(tmp_path, name):
    script = Path(__file__).resolve().parents[1] / "examples" / f"{name}.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    for processes, steps in (("2", "40"), ("1", "60")):
        done = subprocess.run(
            [*torchrun, processes, str(script), str(tmp_path / "run"), "--steps", steps],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 and f"step {steps}, loss " in done.stdout, done.stderr
    assert [one.step for one in lastgood.open(tmp_path / "run").generations()] == [20, 40, 60]
