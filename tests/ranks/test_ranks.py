"""Several ranks write one state, and any number of ranks reads it. Each world consists of real processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import lastgood
from harness import flip
from lastgood.policy.merge_values import merged, unplaced
from lastgood.records import Manifest
from lastgood.run import memory_place
from lastgood.run.content import Content
from lastgood_lab.campaigns.rank_jobs import Pipeline, made, resaved, whole
from lastgood_lab.ranks import replicas
from lastgood_lab.worlds import world
from ranked import ending, reports_of_a_restore, reports_of_saves, trained, trained_in_parts

pytestmark = pytest.mark.slow

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


class Saved(NamedTuple):
    """What a world has saved. `losses`: of each rank, in the three steps that it trained after its last save."""

    run: Path
    losses: list[list[float]]


def runs_of(worlds: dict[str, tuple[str, int]], paths: Factory) -> dict[str, Saved]:
    """The run that each kind of world has saved, by the world's name."""
    found = {}
    for name, (kind, size) in worlds.items():
        run = paths.mktemp("runs") / kind.replace(" ", "-")
        losses = world(size, trained, kind, run, STEPS, 3)
        found[name] = Saved(run, [one[STEPS:] for one in losses])
    return found


def copied(root: Path, to: Path) -> Path:
    return Path(shutil.copytree(root, to, symlinks=True))


def assert_continues(kind: str, size: int, saved: Saved, at: Path) -> None:
    """Assert that an interrupted run continues with exactly the losses that it had without the interruption."""
    resumed = world(size, trained, kind, copied(saved.run, at / "stopped"), STEPS + 3)
    assert resumed == saved.losses and all(len(one) == 3 for one in resumed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Factory) -> dict[str, Saved]:
    return runs_of(WORLDS, tmp_path_factory)


@pytest.mark.parametrize("name", WORLDS)
def test_a_save_of_any_world_size_loads_exactly_in_any_other(saved, tmp_path, name):
    kind, size = WORLDS[name]
    roots = [copied(one.run, tmp_path / str(number)) for number, one in enumerate(saved.values())]
    assert world(size, resaved, kind, roots) == [[STEPS] * len(roots)] * size
    for root in roots:
        tensors_before, tensors_after = whole(root, STEPS), whole(root, STEPS + 1)
        assert tensors_before == tensors_after
        assert {name.partition(".")[0] for name in tensors_before} == {"net", "optimizer"}
        assert lastgood.open(root).verify(STEPS + 1).good


@pytest.mark.parametrize("name", ["two of DDP", "two of FSDP2", "two of tensor parallel", "four of HSDP"])
def test_an_interrupted_run_continues_like_an_uninterrupted_one(saved, tmp_path, name):
    assert_continues(*WORLDS[name], saved[name], tmp_path)


def test_generations_that_all_ranks_step_over_are_reported_once(saved, tmp_path):
    """Each rank printed: resumed from step 2, stepping over step 4, with the same reason."""
    root = copied(saved["two of FSDP2"].run, tmp_path / "run")
    (file,) = root.glob("gen/000000000004-*/r00001.safetensors")
    flip(file)
    first, second = world(2, reports_of_a_restore, "fsdp", root)
    assert [one for one in first if one.startswith("resumed from step 2, stepping over\n  step 4: ")]
    assert not [one for one in second if "stepping over" in one]


@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_a_sharded_state_lacks_nothing_that_its_optimizer_trains(tmp_path, kind):
    for texts in world(2, reports_of_saves, kind, tmp_path / "run"):
        assert not [one for one in texts if "the state" in one]


STAGED = {
    "one process": ("stages", 1),
    "a rank for each stage": ("pipeline", 2),
    "two by two by two of stages, FSDP2 and tensor parallel": ("pipeline of meshes", 8),
}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: Factory) -> dict[str, Saved]:
    return runs_of(STAGED, tmp_path_factory)


@pytest.mark.parametrize("name", STAGED)
def test_pipeline_stages_restore_into_any_other_and_continue_exactly(staged, tmp_path, name):
    kind, size = STAGED[name]
    roots = [copied(one.run, tmp_path / one.run.name) for one in staged.values()]
    assert world(size, resaved, kind, roots) == [[STEPS] * len(roots)] * size
    for root in roots:
        assert whole(root, STEPS) == whole(root, STEPS + 1)
        assert {one.partition(".")[0] for one in whole(root, STEPS)} == {"stage0", "stage1", "optimizer0", "optimizer1"}
    assert_continues(kind, size, staged[name], tmp_path)


def test_an_entry_of_another_rank_can_be_renamed_in_a_restore(staged):
    """The restore searched for the entry under its new name and reported it as missing."""
    loop = Pipeline("stages", 1)
    loop.state["second"] = loop.state.pop("stage1")
    found = lastgood.load(staged["a rank for each stage"].run, loop.state, rename={"stage1.": "second."})
    assert found.step == STEPS and not found.skipped
    head = lastgood.open(staged["a rank for each stage"].run).tensor("stage1.2.weight")
    assert torch.equal(loop.state["second"][2].weight, head)


def test_an_entry_that_no_stage_accepts_is_refused_on_every_rank(tmp_path):
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
def test_a_name_missing_on_a_rank_covers_everything_below_it(of_ranks, found):
    assert unplaced(of_ranks) == found


HANDED = {"one process": ("app plain", 1), "two of FSDP2": ("app fsdp", 2), "three of FSDP1": ("app fsdp1", 3)}


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory: Factory) -> dict[str, Saved]:
    return runs_of(HANDED, tmp_path_factory)


@pytest.mark.parametrize("name", HANDED)
def test_an_object_that_returns_shards_receives_them_in_any_world_size(handed_out, tmp_path, name):
    """torch's helpers for state dicts return such objects, and shards of FSDP1 are described in no other way. They
    were restored as plain tensors."""
    kind, size = HANDED[name]
    roots = [copied(one.run, tmp_path / one.run.name) for one in handed_out.values()]
    assert world(size, resaved, kind, roots) == [[STEPS] * len(roots)] * size
    for root in roots:
        assert whole(root, STEPS) == whole(root, STEPS + 1)
    assert_continues(kind, size, handed_out[name], tmp_path)


def test_flat_parameters_of_several_ranks_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(RuntimeError, match=r"FSDP1 with several ranks: net .*get_state_dict"):
        world(2, trained, "fsdp1", tmp_path, STEPS)


def test_full_torn_checks_compare_the_parts_that_each_rank_writes(tmp_path):
    """When the ranks write parts of one tensor, the digest at the start of the save covered the whole tensor, so
    each part was reported as torn."""
    world(3, trained_in_parts, tmp_path, STEPS)
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [2, 4]
    assert world(2, resaved, "ddp", [tmp_path]) == [[STEPS]] * 2
    assert whole(tmp_path, STEPS) == whole(tmp_path, STEPS + 1)


@pytest.mark.parametrize("name", ["two of DDP", "four of HSDP"])
def test_replicated_tensors_are_written_once(saved, name):
    run = lastgood.open(saved[name].run)
    generation = run.generation(STEPS)
    manifests = [run.manifest(generation, rank) for rank in range(WORLDS[name][1])]
    pieces = [piece for one in manifests for piece in one.pieces if not piece.name.startswith("rng.")]
    content = Content(run.tier, generation)
    names = {piece.name for piece in pieces}
    assert sum(one.extent.length for one in pieces) == sum(len(content.tensor(name)[1]) for name in names)


def test_tensors_needed_by_all_ranks_of_a_host_are_read_once(tmp_path):
    """Each rank read all of a replicated state past the page cache."""
    found, *others = world(4, replicas, tmp_path / "run", 24)
    assert found["read"] < 1.5 * found["unique"] and {one["read"] for one in others} == {found["read"]}
    assert found["read"] >= 0.9 * found["unique"] or memory_place.file_system(tmp_path) == "tmpfs"


def test_the_extra_state_of_a_module_belongs_to_each_rank():
    """The extra state of the last rank was restored on all ranks."""
    manifests = [
        Manifest(
            format=1, step=1, incarnation="0" * 8, rank=rank, digest="xxh3_128", blobs=[], pieces=[], aliases={},
            values={"net": {"!module": {"net._extra_state": rank, f"net.{rank}": rank}}, f"stage{rank}": rank},
        )
        for rank in range(3)
    ]  # fmt: skip
    for rank in range(3):
        found = merged(manifests, rank, 3, {"net", "stage2"}.__contains__)
        assert found["net"]["!module"]["net._extra_state"] == rank and len(found["net"]["!module"]) == 4
        assert found["stage2"] == 2 and found.keys() == {"net", "stage2", f"stage{rank}"}


def test_ranks_end_whose_ddp_model_outlives_the_process_group(tmp_path):
    """17 of 40 jobs never ended whose ranks destroyed their gloo group before the DDP model, as tutorials do.

    torch joins the threads of the group when its last owner goes. The model held the interpreter lock meanwhile, for
    which a thread may wait. Under `lastgood run` such a job ended an hour later.
    """
    assert world(4, ending, tmp_path, 6) == [6] * 4
