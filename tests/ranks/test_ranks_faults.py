"""Ranks that fail, die, differ, are late or receive a signal: a failure on one rank fails the save on all ranks.

Each world consists of real processes.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lastgood
from lastgood_lab.campaigns import ranks as faults
from lastgood_lab.campaigns.rank_jobs import PATIENCE, made, resaved, whole
from lastgood_lab.worlds import world
from ranked import (
    STEPS_OF_A_SAVE,
    asking_for,
    differing,
    failing,
    half_way,
    leaving_out,
    listing_less,
    losing_holders,
    losing_messages,
    paced,
    preempted,
    reading,
    retried,
    thawing,
    tied,
    timed,
    unfit,
)
from ranked_twice import (
    ended_after_a_bad_loss,
    learning_late,
    leaving_windows_out,
    saved_again,
    unread_when_saved_again,
    updated_at_the_end,
)

pytestmark = pytest.mark.slow


def test_a_save_due_by_time_happens_at_one_step_on_all_ranks(tmp_path):
    # Where the processors are busy with other work a rank may learn too late of a step: then it fails on all of them.
    first, *others = map(sorted, world(3, timed, tmp_path, False))
    assert [kind for kind, _ in first].count("durable") >= 2
    assert all(other == first for other in others)


def test_a_late_announcement_fails_one_save_and_extends_the_lead_time(tmp_path):
    first, second = map(sorted, world(2, timed, tmp_path, True))
    assert first == second and {kind for kind, _ in first} == {"failed", "durable"}
    assert min(first, key=lambda one: one[1])[0] == "failed"


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_signal_to_any_rank_ends_all_ranks_at_one_durable_step(tmp_path, faulty_rank):
    results = world(3, preempted, "ddp", tmp_path, faulty_rank, False)
    assert results[0] == results[1] == results[2] and results[0]["code"] == 75
    assert results[0]["step"] == results[0]["durable"] > 5
    assert lastgood.open(tmp_path).verify(results[0]["durable"]).good


@pytest.mark.parametrize("kind", ["plain", pytest.param("ddp", marks=pytest.mark.long)])
def test_an_end_that_a_rank_receives_late_is_postponed_for_all(tmp_path, kind):
    """Rank 0 ended at the announced step. A rank that had passed it waited for rank 0 in a collective operation."""
    first, second = world(2, preempted, kind, tmp_path, 0, True)
    assert first == second and first["code"] == 75 and first["step"] == first["durable"] > 200
    assert lastgood.open(tmp_path).verify(first["durable"]).good


def test_a_diverged_rank_fails_the_save_on_all_ranks_by_name(tmp_path):
    for outcomes in world(3, differing, tmp_path, "a weight"):
        assert outcomes["1"] == outcomes["3"] == outcomes["4"] == "durable"
        assert outcomes["2"].startswith("ReplicaDiffers: ") and "net.up.weight" in outcomes["2"]
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1, 3, 4]


def test_different_buffers_are_saved_per_rank_from_the_first_save_on(tmp_path):
    results = world(3, differing, tmp_path, "a buffer")
    for rank, one in enumerate(results):
        assert [one[str(n)] for n in (1, 2, 3, 4)] == ["durable"] * 4
        assert one["restored"] == 4 and one["seen"] == [float(rank)] * 3
    run = lastgood.open(tmp_path)
    assert run.verify(2).good and run.verify(4).good
    assert len(list(tmp_path.glob("gen/000000000002-*/*.1.safetensors"))) == 2
    buffers = [name for name in whole(tmp_path, 4) if name == "net.seen"]
    assert buffers and world(4, resaved, "ddp", [tmp_path]) == [[4]] * 4


@pytest.mark.parametrize("every", [1, 10])
def test_a_difference_that_ranks_learn_of_one_after_another_fails_no_save(tmp_path, every):
    """Rank 0 planned a save with what the one before had found, and rank 1 without: it was dropped because "the states
    of the ranks no longer have the structure", although nothing had changed."""
    steps = [every * n for n in range(1, 15)]
    for outcomes in world(2, learning_late, tmp_path, steps):
        assert outcomes == [f"step {n}" for n in steps]
    # Once all ranks plan with the difference, each writes its own with its other tensors.
    assert lastgood.open(tmp_path).verify(steps[-1]).good
    assert not list(tmp_path.glob(f"gen/{steps[-1]:012}-*/*.1.safetensors"))


def test_a_plan_for_another_structure_is_never_used(tmp_path):
    """The state of one rank has grown since the ranks agreed on the partition of the pieces."""
    results = world(2, differing, tmp_path, "its structure")
    for one in results:
        assert one["1"] == one["3"] == one["4"] == "durable"
        assert one["2"].startswith("StepDiffers: ")
    assert results[1]["more"] == [1.0] * 5 and lastgood.open(tmp_path).verify(4).good


def test_a_stage_trained_later_than_the_others_fails_one_save_only(tmp_path):
    """The ranks whose structure had changed waited, on the training thread, for an answer from ranks whose structure
    had not."""
    for one in world(3, thawing, tmp_path):
        assert [one[str(n)] for n in (1, 2, 4, 5)] == ["durable"] * 4
        assert one["3"].startswith("StepDiffers: ")
        assert max(seconds for name, seconds in one.items() if "seconds" in name) < PATIENCE / 2
    assert lastgood.open(tmp_path).verify(5).good


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_rank_that_skips_a_save_fails_it_and_the_next_one_succeeds(tmp_path, faulty_rank):
    for rank, one in enumerate(world(3, leaving_out, tmp_path, faulty_rank)):
        assert one["1"] == one["3"] == one["4"] == "durable"
        if rank != faulty_rank:
            assert one["2"].startswith("StepDiffers: ") and f"rank {faulty_rank}" in one["2"]
            assert one["2 seconds"] < PATIENCE
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1, 3, 4]


@pytest.mark.parametrize("where", ["cut", "seal"])
def test_a_failed_save_can_be_repeated_at_once(tmp_path, where):
    """Rank 0 was still deleting the files of the first attempt, and deleted the files of the second attempt after
    its commit. A rank whose folder had been deleted did not create it again."""
    for one in world(2, retried, tmp_path, where):
        assert one[0].startswith(("Unstorable: ", "TierDown: ")) and one[1:] == ["step 2", "step "]
    assert lastgood.open(tmp_path).verify(2).good


def test_all_ranks_restore_the_choice_of_rank_0_despite_stale_listings(tmp_path):
    assert world(2, listing_less, tmp_path) == [["step 2"]] * 2


def test_ranks_that_ask_for_different_steps_load_nothing(tmp_path):
    for outcome, total in world(2, asking_for, tmp_path):
        assert outcome.startswith("StepDiffers: ranks were about to load different generations") and total == 7.0 * 400


@pytest.mark.parametrize(("placement", "past"), [("replicate", False), ("shard", True)])
def test_shared_tensors_of_the_ranks_of_a_host_use_its_page_cache(tmp_path, placement, past):
    assert world(2, reading, tmp_path, placement) == [[past]] * 2


def test_a_nonfinite_tensor_on_one_rank_is_unfit_on_every_rank(tmp_path):
    assert world(2, unfit, tmp_path) == [["step 2", "step 1"]] * 2


def test_a_rank_that_lost_a_message_agrees_again_in_the_next_restore(tmp_path):
    """The rank counted its restores by itself, so every later agreement was matched with another restore."""
    first, second = world(2, losing_messages, tmp_path)
    assert first[-1] == second[-1] == "step 5"
    assert second[0].startswith("TierDown: ") and second[-2] == first[-2] == "step 1"


def test_ranks_with_different_knowledge_store_no_tensor_twice(tmp_path):
    for one in world(3, losing_holders, tmp_path):
        assert one[2] == "step 4" and not {"step 2", "step 3"} & set(one[:2])
    assert lastgood.open(tmp_path).verify(4).good


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("nothing", "b is float32 [400] on rank 1, and the same as a on rank 0"),
        ("another", "b is the same as c on rank 1, and the same as a on rank 0"),
    ],
)
def test_tensors_tied_on_only_one_rank_are_refused_by_name(tmp_path, to, message):
    """Such saves succeeded, but none of them could be restored."""
    for (one,) in world(2, tied, tmp_path, to):
        assert one.startswith(f"StepDiffers: {message}")


def test_an_aborted_load_is_not_mixed_with_an_older_step(tmp_path):
    """With strict=False, an entry that the older generation lacks keeps its live value, which the aborted load had
    already taken from another step."""
    for outcome, values in world(2, half_way, tmp_path):
        assert "damaged, and had been loaded in part" in outcome or outcome.startswith("HalfLoaded: ")
        assert len(set(values)) == 1


@pytest.mark.parametrize(
    "options", [{"cadence": "auto"}, {"cadence": lastgood.Every(steps=3), "when_full": "skip", "in_flight": 1}]
)
def test_measured_intervals_and_skipped_saves_agree_on_all_ranks(tmp_path, options):
    first, *others = world(3, paced, tmp_path, options)
    assert {"durable"} <= {kind for kind, _ in first} <= {"durable", "skipped"}
    assert ("skipped" in {kind for kind, _ in first}) == ("when_full" in options)
    assert all(sorted(other) == sorted(first) for other in others)


FAULTS = [("state", 0), ("state", 1), *((where, faulty_rank) for where in STEPS_OF_A_SAVE for faulty_rank in (0, 1))]
FAULTS = [one for one in FAULTS if one not in (("commit", 1), ("after the commit", 1))]  # only rank 0 commits


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_failure_on_one_rank_fails_all_by_name_and_the_next_succeeds(tmp_path, faulty_rank):
    stages = [where for where, rank in FAULTS if rank == faulty_rank and where != "after the commit"]
    for rank, one in enumerate(world(2, failing, tmp_path, faulty_rank, stages, "fails")):
        for n, where in zip(range(2, 3 * len(stages), 3), stages, strict=True):
            assert one[f"{n - 1}"] == one[f"{n + 1}"] == "durable", where
            assert one[f"{n}"] != "durable" and one[f"{n} seconds"] < PATIENCE, where
            assert rank == faulty_rank or where == "commit" or f"rank {faulty_rank}: " in one[f"{n}"], f"{where}: {one}"
    run = lastgood.open(tmp_path)
    assert [one.step for one in run.generations()] == [n for n in range(1, 3 * len(stages) + 1) if n % 3 != 2]
    assert run.verify(3 * len(stages)).good


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_seal_of_unknown_outcome_fails_the_save_on_all_ranks_at_once(tmp_path, faulty_rank):
    """The other ranks waited for the seal as long as they wait for a dead rank."""
    for one in world(2, failing, tmp_path, faulty_rank, ["seal"], "cannot tell"):
        assert one["1"] == one["3"] == "durable"
        assert one["2"].startswith("CommitUnknown: ") and one["2 seconds"] < PATIENCE
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1, 3]


@pytest.mark.parametrize("faulty_rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_dead_rank_fails_the_save_in_bounded_time_and_the_run_continues(tmp_path, faulty_rank):
    """One world for each stage of a save at which the rank dies. The worlds mostly wait, so several run at a time."""

    def die(where: str) -> Path:
        root = tmp_path / where.replace(" ", "-")
        for rank, one in enumerate(world(3, failing, root, faulty_rank, [where], "dies", dies=(faulty_rank,))):
            if rank != faulty_rank:
                assert one["1"] == "durable" and one["2"] != "durable", f"{where}: {one}"
                assert one["2 seconds"] < 4 * PATIENCE, f"{where}: {one}"
        return root

    stages = [where for where, rank in FAULTS if rank == faulty_rank]
    with ThreadPoolExecutor(4) as worlds:
        roots = list(worlds.map(die, stages))
    assert len(stages) >= 5
    assert world(2, resaved, "ddp", roots) == [[2 if where == "after the commit" else 1 for where in stages]] * 2


def test_a_random_selection_of_faults_on_one_rank_keeps_the_promises(tmp_path):
    """`python -m lastgood_lab.campaigns.ranks` runs all faults, including the death of a rank."""
    expected, calls = faults.reference(tmp_path, "ddp")
    errnos = [one for one in faults.faults({"ddp": calls}) if one.what != "KILL"]
    chosen = random.Random(1).sample(errnos, 6)
    assert {one.who for one in chosen} == {0, 1}
    for one in chosen:
        assert not faults.trial(tmp_path, {"ddp": expected}, one).problems


@pytest.mark.parametrize(("kind", "changed_ranks"), [("ddp", (0, 1)), ("fsdp", (1,))])
def test_ranks_decide_alike_on_a_step_that_is_saved_twice(tmp_path, kind, changed_ranks):
    """With several ranks nothing was compared: a save(n) after an update returned the earlier save of step n as a
    success."""
    found = world(2, saved_again, kind, tmp_path, changed_ranks)
    assert [same for same, _, _ in found] == [True, True]
    thirds = [third for _, third, _ in found]
    assert thirds[0] == thirds[1] and "step 1 is saved already, and the state has changed since: net." in thirds[0]
    assert [fourth for _, _, fourth in found] == ["step 2", "step 2"]
    kept = lastgood.open(tmp_path).generation(1).commit
    assert kept.milestone and kept.metrics == {"loss": 1.0}


def test_a_saved_step_that_one_rank_cannot_read_ends_no_loop(tmp_path):
    assert world(2, unread_when_saved_again, tmp_path) == [("TierDown", "step 2")] * 2
    assert not lastgood.open(tmp_path).generation(1).commit.milestone


def test_an_update_of_one_rank_after_the_last_step_saves_nothing_at_exit(tmp_path):
    """The rank that was interrupted after its update saved the weights of step 3 as its part of step 2."""
    for texts in world(2, updated_at_the_end, tmp_path):
        assert "step 2 was not saved: Refused: an optimizer has stepped since step 2" in texts[0]
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1]


@pytest.mark.parametrize("preempted", [True, False])
def test_several_ranks_compare_their_last_steps_however_they_end(tmp_path, preempted):
    """The steps since the last comparison were not looked at after a signal, and the last save of a diverged state was
    good; nor at the end of a loop that saves nothing then."""
    assert world(2, ended_after_a_bad_loss, tmp_path, preempted) == ["TrainingDiverged"] * 2
    assert len(lastgood.open(tmp_path).generations()) == 2
    with lastgood.Checkpointer(tmp_path, made("plain", 1).state) as ckpt:
        assert ckpt.restore().step == 1


def test_batches_are_left_out_on_all_ranks_or_on_none(tmp_path):
    """Where rank 0 had the sampler of an evaluation in its state too, it trained the batches that the others left out:
    other samples in each step, and a rank that came one batch short at the end of the epoch."""
    first, second = world(2, leaving_windows_out, tmp_path)
    assert first[:2] == second[:2] == (3, [])
    assert ["a rank has none there, or several" in one for one in first[2]] == [True] and not second[2]
