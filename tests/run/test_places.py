"""Runs in several places: a directory in front of another directory or a bucket of a real S3 server."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch

import lastgood
from harness import flip, reported, reports, steps
from lastgood import errors
from lastgood.format import commit, layout
from lastgood.policy.places import holder, merged
from lastgood.policy.restore import lineage, never_committed
from lastgood.ports import Tier
from lastgood.records import Generation, GenerationId
from lastgood.run import access, agent_work, copying, lower_place
from lastgood.run.claims import common_order
from lastgood.run.known import KnownRun
from lastgood.run.lower_place import LowerPlace
from lastgood.run.writer import RunWriter
from lastgood.storage import object_store
from lastgood.testing.faulty_files import Fault
from lastgood_lab import corrupt
from lastgood_lab.object_faults import FaultyProxy, Request
from lastgood_lab.object_server import ObjectServer
from mounts import small_tmpfs
from training import Training

EVERY = lastgood.Every(steps=1)
QUICK = object_store.Deadlines(connect_seconds=2, request_seconds=4, retry_seconds=4, retries=1)


class Places:
    """A run in two places, in front of each other, and the events of its last opening."""

    def __init__(self, front: Path, last: Path | str) -> None:
        self.front, self.last = front, last
        self.training, self.events = Training(), list[lastgood.Event]()

    def opened(self, every: int = 1, **options: object) -> lastgood.Checkpointer:
        self.training, self.events = Training(), []
        tier = lastgood.Tier(self.front, cadence=EVERY, retention=lastgood.Keep(last=2))
        wanted = {"cadence": lastgood.Every(steps=every), "tiers": [tier], "on_event": self.events.append, **options}
        return lastgood.Checkpointer(self.last, self.training.state, **wanted)

    def train(self, total: int, every: int = 1, **options: object) -> lastgood.Restored:
        """Train until step `total`, with every save complete in all places; returns the result of the restore."""
        with self.opened(every, **options) as ckpt:
            found = ckpt.restore()
            for step in range(found.step + 1, total + 1):
                self.training.step()
                save = ckpt.step(step)
                if save is not None:
                    save.result()
        return found

    def weights_at(self, total: int, folder: Path) -> bool:
        """Whether the weights are those of a run that was never interrupted."""
        other = Training()
        for _ in range(total):
            other.step()
        return self.training.weights() == other.weights()


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "front", tmp_path / "last")


@pytest.fixture
def proxy(object_server: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    monkeypatch.setattr(object_store, "DEADLINES", QUICK)
    monkeypatch.setattr(lower_place, "PAUSES_SECONDS", (0.05,))
    with FaultyProxy(object_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def saved(ckpt: lastgood.Checkpointer, step: int) -> lastgood.Save:
    """The save of a step that is due, after it has reached all places that receive it."""
    save = ckpt.step(step)
    assert save is not None
    save.result()
    return save


def tensor_file(run: Path, step: int) -> Path:
    (found,) = run.glob(f"gen/{step:012d}-*/*.safetensors")
    return found


def files(run: Path) -> dict[str, bytes]:
    return {str(one.relative_to(run)): one.read_bytes() for one in run.glob("gen/*/*") if one.name != layout.VERIFIED}


# ---- which place receives what -------------------------------------------------------------------------------


def test_each_place_receives_what_its_own_cadence_asks_for(places):
    places.train(10, every=4, retention=lastgood.Keep(last=9))
    assert steps(places.front)[-1] == 10 and steps(places.last) == [4, 8, 10], "the last step goes to all places"


def test_a_step_due_only_below_is_saved_in_front_too(tmp_path):
    training, front = Training(), lastgood.Tier(tmp_path / "a", cadence=lastgood.Every(steps=5))
    with lastgood.Checkpointer(
        tmp_path / "b", training.state, cadence=lastgood.Every(steps=3), tiers=[front], save_on_exit=False
    ) as ckpt:
        saved = [one.result().step for one in map(ckpt.step, range(1, 8)) if one is not None]
    assert saved == steps(tmp_path / "a") == [3, 5, 6] and steps(tmp_path / "b") == [3, 6]


def test_a_generation_is_the_same_in_all_places(places):
    places.train(3, retention=lastgood.Keep(last=2))
    assert files(places.front) == files(Path(places.last))


def test_a_save_knows_where_it_is_and_what_it_survives(places):
    with places.opened(every=2) as ckpt:
        first, second = saved(ckpt, 1), saved(ckpt, 2)
        assert first.where() == [str(places.front)] and second.where() == [str(places.front), str(places.last)]
        assert second.durable(survives="process") and second.durable() and not second.durable(survives="node")
        with pytest.raises(errors.Refused, match="survives='region'"):
            second.durable(survives="region")


@pytest.mark.slow
def test_only_a_save_in_an_object_store_survives_its_node(bucket, tmp_path):
    places = Places(tmp_path / "front", bucket)
    with places.opened(every=2) as ckpt:
        first, second = saved(ckpt, 1), saved(ckpt, 2)
        assert not first.durable(survives="node") and second.durable(survives="node")
        assert second.durable(survives="domain") and second.where() == [str(places.front), bucket]


def test_a_save_that_the_user_asks_for_goes_to_all_places(places):
    with places.opened(every=100) as ckpt:
        ckpt.step(1).result()
        assert steps(places.front) == [1] and not steps(places.last)
        ckpt.save(1).result()
        ckpt.save(2, milestone=True).result()
        assert steps(places.last) == [1, 2]


def test_a_label_that_is_added_later_reaches_all_places(places):
    with places.opened(save_on_exit=False) as ckpt:
        ckpt.save(1).result()
        ckpt.save(1, milestone=True).result()
    for run in (places.front, places.last):
        assert [one.commit.milestone for one in lastgood.open(run).generations()] == [True]


def test_each_place_keeps_what_its_own_retention_keeps(places):
    places.train(9, retention=lastgood.Keep(last=1, every=4))
    assert steps(places.front) == [8, 9] and steps(places.last) == [4, 8, 9]


def test_a_place_receives_the_first_save_after_each_multiple(places):
    with places.opened(every=100, retention=lastgood.Keep(last=1, every=10), save_on_exit=False) as ckpt:
        for step in range(3, 28, 4):
            places.training.step()
            ckpt.step(step).result()
    assert steps(places.last) == [11, 23]


def test_a_place_below_writes_the_parity_that_it_is_given(places):
    places.train(2, parity="4+2")
    assert not list(places.front.glob("gen/*/*parity*"))
    flip(tensor_file(Path(places.last), 2))
    shutil.rmtree(places.front)
    assert places.train(2).step == 2 and places.weights_at(2, places.front)


# ---- restoring -----------------------------------------------------------------------------------------------


def test_a_lost_front_is_restored_from_the_place_below(places):
    places.train(5)
    shutil.rmtree(places.front)
    found = places.train(8)
    assert found.step == 5 and list(found.sources) == [str(places.last)]
    assert found.sources[str(places.last)].bytes >= found.bytes // 2
    assert places.weights_at(8, places.front) and lastgood.open(places.front).verify().good


def test_a_lost_last_place_is_filled_again_from_the_front(places):
    places.train(5)
    shutil.rmtree(places.last)
    found = places.train(5)
    assert found.step == 5 and list(found.sources) == [str(places.front)] and steps(places.last) == [5]
    shutil.rmtree(places.front)
    assert places.train(7).step == 5 and places.weights_at(7, places.front)


def test_a_copy_that_was_not_read_back_is_finished_at_the_next_opening(places):
    """A process died after the COMMIT of a copy and before its mark. No later process read the copy back, so it never
    counted as verified: retention below kept an older one for it, and the COMMIT was not even known to be durable. The
    crash model found it."""
    places.train(2)
    mark = tensor_file(Path(places.last), 2).with_name(layout.VERIFIED)
    mark.unlink()
    assert places.train(2).step == 2 and mark.exists()


def test_a_label_that_was_not_copied_reaches_the_place_below_later(places):
    """A process died between writing a milestone in front and copying it. The generation was below already, so the next
    opening copied nothing, and retention below deleted the milestone."""
    with places.opened(save_on_exit=False) as ckpt:
        ckpt.save(1).result()
        ckpt.save(1, milestone=True).result()
    (label,) = Path(places.last).glob("gen/*/LABEL-*")
    label.unlink()
    places.train(1)
    assert label.exists()


def test_a_torn_label_of_a_copy_is_replaced_at_the_next_opening(places):
    """Without hard links a label is created in place. A power loss cut one short in the place below, and no later copy
    replaced it: the milestone counted as copied, and was none there. The crash model found it."""
    with places.opened(save_on_exit=False) as ckpt:
        ckpt.save(1).result()
        ckpt.save(1, milestone=True).result()
    (label,) = Path(places.last).glob("gen/*/LABEL-*")
    whole = label.read_bytes()
    label.write_bytes(whole[:20])
    places.train(1)
    assert label.read_bytes() == whole
    assert [one.commit.milestone for one in lastgood.open(places.last).generations()] == [True]


def test_what_is_left_of_an_interrupted_copy_is_removed(places):
    """Of several generations that wait, the newest is copied first. When a process died in the copy of an older one,
    which the newest names as its predecessor, every later opening took what was left of it for a generation whose
    COMMIT was lost: it kept its files for ever. The crash model found it."""
    places.train(3)
    left = tensor_file(Path(places.last), 2).parent
    for record in (layout.COMMIT, layout.VERIFIED):
        (left / record).unlink()
    assert places.train(3).step == 3 and not left.exists()


def uncommit(run: Path, step: int, *more: str) -> None:
    """Remove COMMIT and the mark of a generation, if it has one, and more of its files."""
    tensors = tensor_file(run, step)
    tensors.with_name(layout.VERIFIED).unlink(missing_ok=True)
    for name in (layout.COMMIT, *more):
        tensors.with_name(name).unlink()


def lost(*runs: Path) -> list[int]:
    """The steps that are called lost by who reads these places."""
    return [at.step for at in lineage(merged([commit.survey(access.for_reading(one)) for one in runs])).lost]


def test_an_interrupted_copy_is_not_called_lost(places, call_json):
    """Three agents of a job that was killed copied their parts of some generations, then the newest whole, and removed
    the memory. The newest names the one before it, whose copy was never finished: `ls` called that one LOST, `verify`
    failed with exit code 4, and `gc` left its files."""
    places.train(3)
    last = Path(places.last)
    uncommit(last, 2, layout.manifest_name(0))
    shutil.rmtree(tensor_file(places.front, 2).parent)  # it has deleted step 2
    assert not lost(last) and not lost(places.front, last)
    assert call_json("verify", "--all", str(last))[0] == 0
    assert [one["why"] for one in call_json("gc", str(last))[1]["deleted"]] == ["never committed"]
    assert steps(last) == [1, 3] and not list(last.glob("gen/*2-*"))


def test_a_copy_whose_commit_is_lost_is_named(places):
    """Agents of several nodes leave no mark on what they copy. An earlier mend took a whole copy whose COMMIT was
    deleted for an interrupted one: `verify` found nothing, and `gc` deleted it."""
    places.train(3)
    last = Path(places.last)
    uncommit(last, 2)
    assert lost(last) == [2] and not lost(places.front, last)
    assert not never_committed(commit.survey(access.for_reading(last)))


def test_a_commit_lost_where_saves_are_written_is_named(places):
    """The place that is written first receives no copies: what a later generation names was whole there."""
    places.train(3)
    last = Path(places.last)
    for run in (places.front, last):
        uncommit(run, 2, layout.manifest_name(0))
    assert lost(places.front) == lost(places.front, last) == [2]


def test_a_commit_lost_in_a_place_that_is_now_the_first_is_named(places):
    places.train(1)
    last, training = Path(places.last), Training()
    with lastgood.Checkpointer(last, training.state, retention=lastgood.Keep(last=9)) as ckpt:
        ckpt.restore()
        for step in (2, 3, 4):
            training.step()
            ckpt.save(step).result()
    uncommit(last, 3, layout.manifest_name(0))
    assert lost(last) == [3]


def test_a_torn_header_of_an_empty_place_is_replaced(places):
    """Without hard links the header is created in place. A process died in that, and every later opening of the places
    was refused, because the place had a header already and it was not that of the run. The crash model found it."""
    Path(places.last).mkdir()
    (Path(places.last) / layout.HEADER).write_bytes(b"{")
    places.train(1)
    assert steps(Path(places.last)) == [1] and lastgood.open(places.last).verify().good


def test_the_newest_step_is_restored_from_whichever_place_has_it(places):
    places.train(4)
    with places.opened(every=100, save_on_exit=False) as ckpt:
        ckpt.restore()
        places.training.step()
        ckpt.step(5).result()
    assert steps(places.last)[-1] == 4
    assert places.train(6).step == 5 and places.weights_at(6, places.front) and steps(places.last)[-2:] == [5, 6]


def test_a_step_is_restored_that_only_the_last_place_keeps(places):
    places.train(6, retention=lastgood.Keep(last=9))
    with places.opened(retention=lastgood.Keep(last=9)) as ckpt:
        found = ckpt.restore(step=2)
        assert found.step == 2 and list(found.sources) == [str(places.last)] and places.weights_at(2, places.front)


def test_a_rewind_holds_in_all_places(places):
    places.train(6, retention=lastgood.Keep(last=9))
    with places.opened(retention=lastgood.Keep(last=9)) as ckpt:
        ckpt.restore(step=2)
        places.training.step()
        ckpt.save(3).result()
    shutil.rmtree(places.front)
    assert places.train(4, retention=lastgood.Keep(last=9)).step == 3 and places.weights_at(4, places.front)


def test_saving_before_a_restore_is_refused_for_every_place(places):
    places.train(3)
    shutil.rmtree(places.front)
    with places.opened() as ckpt, pytest.raises(errors.NotRestored, match=str(places.last)):
        ckpt.step(1)


def test_latest_counts_all_places(places):
    places.train(3)
    shutil.rmtree(places.front)
    with places.opened() as ckpt:
        assert ckpt.latest() == 3 == ckpt.restore().step


# ---- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in corrupt.KINDS if kind != "none"])
@pytest.mark.parametrize("where", ["front", "last"])
def test_damage_of_every_kind_in_one_place_is_repaired(places, kind, where, call_json, monkeypatch):
    """In front at the next restore; in the last place by a scrub, which also finds what no restore would read."""
    run, options = getattr(places, where), {"retention": lastgood.Keep(last=9)}
    places.train(3, **options)
    before = files(run)
    (folder,) = run.glob(f"gen/{3:012d}-*")
    monkeypatch.setattr(corrupt, "OLDER", min(steps(run)))
    corrupt.KINDS[kind](folder, random.Random(kind))
    if where == "last":
        assert call_json("repair", str(run))[0] == 0 or kind == "bitflip in pointer"
    found = places.train(3, **options)
    assert found.step == 3 and not found.stepped_over and places.weights_at(3, places.front)
    assert files(run) == before


def test_damage_in_different_chunks_of_both_copies_is_repaired(tmp_path):
    state = {"big": torch.randn(3 << 20), "other": torch.randn(3 << 20)}
    tiers, kept = [lastgood.Tier(tmp_path / "a")], {name: one.clone() for name, one in state.items()}
    with lastgood.Checkpointer(tmp_path / "b", state, tiers=tiers) as ckpt:
        ckpt.save(1).result()
    flip(tensor_file(tmp_path / "a", 1), 1 << 20)
    flip(tensor_file(tmp_path / "b", 1), 20 << 20)
    for one in state.values():
        one.zero_()
    with lastgood.Checkpointer(tmp_path / "b", state, tiers=tiers) as ckpt:
        assert ckpt.restore().step == 1
    assert all(torch.equal(state[name], one) for name, one in kept.items())


def test_a_damaged_front_that_cannot_be_repaired_is_passed_by(tmp_path):
    """Slots cannot be mended in place; the copy below is read instead."""
    training = Training()
    options = {"tiers": [lastgood.Tier(f"slots://{tmp_path}/front")], "cadence": EVERY}
    with lastgood.Checkpointer(tmp_path / "last", training.state, **options) as ckpt:
        for step in range(1, 4):
            training.step()
            ckpt.save(step).result()
    weights = training.weights()
    for one in (tmp_path / "front" / "slots").iterdir():
        for offset in range(8 << 10, one.stat().st_size, 4 << 10):
            flip(one, offset)
    training = Training()
    with lastgood.Checkpointer(tmp_path / "last", training.state, **options) as ckpt:
        assert ckpt.restore().step == 3 and training.weights() == weights


def test_a_scrub_repairs_the_front_from_the_place_below(places):
    places.train(3)
    before = files(places.front)
    flip(tensor_file(places.front, 3))
    with places.opened(scrub=lastgood.Scrub()) as ckpt:
        scrubber = ckpt._pipeline.upkeep._scrubber
        assert [one.repaired for one in iter(scrubber.scrub_next, None)] == [False, True]
    assert files(places.front) == before and "repaired" in {one.kind for one in places.events}


def test_a_whole_copy_counts_although_a_nearer_one_is_damaged(places):
    places.train(2)
    flip(tensor_file(places.front, 2))
    lastgood.open(places.front).verify(2)
    with access.for_writing(places.front, "atomic_dirsync") as tier:
        near = KnownRun(tier, lower_place.RunWriter(tier, None).known.environment).survey
    far = KnownRun(access.for_reading(places.last), None).survey
    at = max(far.generations)
    assert holder([near.generations, far.generations], at) in (0, 1)
    assert lineage(merged([near, far])).chain[0] == at


# ---- a place that is down, full, or another run's ------------------------------------------------------------


@pytest.mark.slow
def test_training_goes_on_while_the_bucket_is_down_and_it_catches_up(bucket, tmp_path, proxy):
    places = Places(tmp_path / "front", bucket)
    with places.opened(retention=lastgood.Keep(last=3), save_on_exit=False) as ckpt:
        ckpt.restore()
        with reports() as texts, proxy.down():
            for step in range(1, 31):
                places.training.step()
                ckpt.step(step).committed()
            waiting = ckpt._pipeline.places.below[0].waiting()
            held = len(steps(places.front))
            ckpt.wait()
        assert waiting <= 3 + 1 and held <= 4 + 4
        assert sum(bucket in one for one in texts) == 1, "an outage is reported once"
        ckpt.step(31).result()
        ckpt.wait()
    assert [one.step for one in lastgood.open(bucket).generations()] == [29, 30, 31]
    assert {one.kind for one in places.events} >= {"copied", "not_copied"}


@pytest.mark.slow
def test_a_copy_under_way_is_finished_although_newer_ones_wait(bucket, tmp_path, proxy):
    """Its generation was deleted in front while it was read, and MissingBlob was reported; a bucket slower than the
    saves received nothing."""
    places, begun, go_on = Places(tmp_path / "front", bucket), threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if request.method == "PUT" and request.target.endswith("r00000.safetensors"):
            begun.set()
            go_on.wait(QUICK.request_seconds / 2)

    with reports() as texts, places.opened(retention=lastgood.Keep(last=1), save_on_exit=False) as ckpt:
        ckpt.restore()
        proxy.before = hold
        first = ckpt.step(1)
        assert begun.wait(60)
        for step in range(2, 8):
            places.training.step()
            ckpt.step(step).committed()
        go_on.set()
        first.result()
        ckpt.wait()
    assert not [one for one in texts if "Missing" in one]


@pytest.mark.slow
def test_memory_stays_within_its_bound_while_copies_are_slow(bucket, memory, proxy, caplog):
    """The bound was reported, and never compared with what memory takes while saves are made faster than a bucket takes
    them."""
    caplog.set_level("INFO")
    proxy.before = lambda request: request.method == "PUT" and threading.Event().wait(0.3)
    training, taken = Training(), list[int]()
    tiers = [lastgood.Tier("memory://", cadence=EVERY)]
    with lastgood.Checkpointer(bucket, training.state, tiers=tiers, cadence=EVERY) as ckpt:
        ckpt.restore()
        for step in range(1, 61):
            training.step()
            ckpt.step(step).committed()
            files = chain.from_iterable(names for *_, names in os.walk(memory))  # folders may be deleted meanwhile
            taken.append(sum(1 for one in files if one.endswith(".safetensors")))
        proxy.before = None
        ckpt.wait()
    found = re.search(r"memory://\S+ takes at most \((\d) kept \+ (\d) in flight \+ 2\).*, and (\d) more", caplog.text)
    assert found is not None
    bound = sum(map(int, found.groups())) + 2
    assert 3 < max(taken) <= bound, "more than without a place below"


def test_a_full_place_below_makes_room_for_the_next_copy(tmp_path, caplog):
    """Nothing was deleted there, whatever retention could spare: no save was copied any more, and a machine that
    stopped took all that was in memory with it."""
    with small_tmpfs(tmp_path / "small", "3m") as disk:
        state, tiers = {"w": torch.zeros(250_000)}, [lastgood.Tier(tmp_path / "front", cadence=EVERY)]
        options = {"tiers": tiers, "cadence": EVERY, "retention": lastgood.Keep(last=5)}
        with lastgood.Checkpointer(disk / "run", state, **options) as ckpt:
            ckpt.restore()
            for step in range(1, 7):
                ckpt.step(step).result(60)
        assert steps(disk / "run") == [4, 5, 6]
    assert caplog.text.count("is full: step 1") == 1


def test_a_larger_state_does_not_wait_for_copies(places, monkeypatch):
    """A save that had outgrown its memory waited until the places below had all that was saved before: while a bucket
    was down, the loop stood still."""
    saved, awaited, complete = threading.Event(), list[bool](), lower_place.copying.complete

    def slow(*arguments: object) -> object:
        awaited.append(not saved.wait(20))
        return complete(*arguments)

    monkeypatch.setattr(lower_place.copying, "complete", slow)
    with places.opened() as ckpt:
        ckpt.restore()
        ckpt.step(1).committed()
        places.training.state["more"] = torch.zeros(1 << 20)
        ckpt.step(2).committed()
        saved.set()
    assert steps(places.last) == [1, 2] and not any(awaited)


def test_copies_that_were_given_up_leave_nothing_behind(places, monkeypatch):
    """Each outage of a place below left the tensor files of some saves there until the run was opened again: a job that
    ran for weeks filled the disk with them."""
    copy_records, down = commit.copy_records, list[errors.TierDown]()

    def refused(*arguments: object) -> object:
        if down:
            raise down[0]
        return copy_records(*arguments)

    monkeypatch.setattr(commit, "copy_records", refused)
    monkeypatch.setattr(lower_place, "PAUSES_SECONDS", (0.01,))
    with places.opened(retention=lastgood.Keep(last=1)) as ckpt:
        ckpt.restore()
        for step in range(1, 10):
            down[:] = [] if step % 3 == 0 else [errors.TierDown("the place below is down")]
            ckpt.step(step).committed()
            ckpt.wait()
        assert len([*(places.last / "gen").iterdir()]) == 1


def test_a_generation_whose_copy_failed_is_overtaken(places, monkeypatch):
    """It was held in front until the next attempt began, beside those that waited. With a full place below, memory with
    room for just those failed 259 of 300 saves."""

    def full(*_: object) -> None:
        raise errors.NoSpace("no space left")

    monkeypatch.setattr(lower_place.copying, "complete", full)
    monkeypatch.setattr(lower_place, "PAUSES_SECONDS", (600.0,))
    with reports() as texts, places.opened(retention=lastgood.Keep(last=1), save_on_exit=False) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        ckpt.wait()
        ckpt.step(2).committed()
    (lacks,) = (one for one in texts if f"{places.last} has not received" in one)
    assert "older" not in lacks


@pytest.mark.slow
def test_what_a_bucket_lacks_at_the_exit_is_copied_after_the_next_opening(bucket, tmp_path, proxy):
    places = Places(tmp_path / "front", bucket)
    places.train(2)
    with reported(f"{bucket} has not received step 4"), places.opened() as ckpt:
        ckpt.restore()
        with proxy.down():
            for step in (3, 4):
                places.training.step()
                ckpt.step(step).committed()
            ckpt.close()
    assert [one.step for one in lastgood.open(bucket).generations()] == [1, 2]
    assert places.train(4).step == 4
    assert [one.step for one in lastgood.open(bucket).generations()][-1] == 4


@pytest.mark.slow
def test_a_bucket_that_is_down_at_the_opening_is_an_error(bucket, tmp_path, proxy):
    places = Places(tmp_path / "front", bucket)
    places.train(3)
    before = files(places.front)
    with proxy.down(), pytest.raises(errors.TierDown):
        places.opened()
    assert files(places.front) == before and places.train(4).step == 3
    assert not [one for one in threading.enumerate() if "drain" in one.name]


@pytest.mark.slow
def test_a_second_writer_of_the_bucket_stops_the_copies_of_the_first(bucket, tmp_path):
    first, second = Places(tmp_path / "a", bucket), Places(tmp_path / "b", bucket)
    with first.opened(save_on_exit=False) as ckpt:
        first.training.step()
        ckpt.save(1).result()
        with second.opened() as other:
            assert other.restore().step == 1
            second.training.step()
            other.save(2).result()
            first.training.step()
            with pytest.raises(errors.RunReplaced):
                ckpt.save(3).result()
    assert [one.step for one in lastgood.open(bucket).generations()] == [1, 2]
    orders = [one.commit.order for one in lastgood.open(bucket).generations()]
    assert orders == sorted(set(orders)), "two machines never give two incarnations one order"


@pytest.mark.slow
def test_an_incarnation_has_one_order_in_two_buckets(bucket):
    """A process that opens only one of them later must not find an older order there than the run has."""
    for _ in range(3):
        with access.for_writing(f"{bucket}/a", "atomic_dirsync"):
            """Each opening makes a claim."""
    with (
        access.for_writing(f"{bucket}/a", "atomic_dirsync") as first,
        access.for_writing(f"{bucket}/b", "atomic_dirsync") as second,
    ):
        for least, expected in ((1, 4), (1, 5), (9, 9)):
            assert common_order([first, second], least) == expected
            assert {max(one.list("claims")) for one in (first, second)} == {f"{expected:06d}.json"}


def test_places_of_different_runs_are_refused_and_left_alone(places, tmp_path):
    places.train(2)
    other = Places(tmp_path / "other", tmp_path / "other last")
    other.train(3)
    before = files(places.front), files(other.front)
    mixed = Places(places.front, other.last)
    with pytest.raises(errors.Refused, match="hold different runs"):
        mixed.opened()
    assert (files(places.front), files(other.front)) == before
    assert places.train(2).step == 2 and other.train(3).step == 3


def test_a_bug_in_a_copy_is_reported_and_ends_the_wait_for_it(places, monkeypatch):
    """It ended the thread that copies, and with it every wait for a copy hung."""

    def fails(*_: object) -> bool:
        raise ZeroDivisionError("a bug")

    with reported("ZeroDivisionError: a bug"), places.opened(save_on_exit=False) as ckpt:
        monkeypatch.setattr(lower_place.copying, "holds", fails)
        with pytest.raises(ZeroDivisionError):
            ckpt.save(1).result(60)
        monkeypatch.undo()
        ckpt.save(2).result(60)
    assert steps(places.last) == [2]


def test_a_signal_leaves_the_last_step_in_all_places(places):
    with places.opened(every=100, preemption=lastgood.Preemption()) as ckpt, pytest.raises(lastgood.Preempted):
        for step in range(1, 10):
            places.training.step()
            if step == 4:
                signal.raise_signal(signal.SIGTERM)
            ckpt.step(step)
    assert steps(places.front)[-1] == 4 == steps(places.last)[-1]


@pytest.mark.parametrize(
    ("tier", "text"),
    [
        ({"url": "/x", "copies": 2}, 'copies=2.*for "memory://" or with shared=False'),
        ({"url": "memory://", "copies": 0}, "copies=0"),
        ({"url": "memory://", "copies": "2"}, "copies='2'"),
        ({"url": "memory://", "spread": "rack"}, "spread='rack'.*copies=1"),
        ({"url": "memory://", "copies": 2, "spread": "a rack"}, "Give the name of a failure domain"),
        ({"url": "s3://bucket/run", "shared": False}, "shared=False"),
        ({"url": "Memory://"}, "Give the home, and"),
        ({"url": "memory://", "parity": "2"}, "parity='2'"),
        ({"url": "memory://", "parity": "0+1"}, r"parity='0\+1'"),
        ({"url": "memory://", "parity": "2+2", "copies": 2}, r"copies=2, parity='2\+2'"),
        ({"url": "/x", "parity": "4+2", "shared": False, "copies": 2}, "Give one of both"),
        ({"url": "/x", "parity": "4+2", "spread": "rack"}, "spread='rack'"),
        ({"url": "memory://", "retention": lastgood.Keep(every=5)}, "keeps the newest only"),
        ({"url": "s3a://bucket/x"}, "s3"),
        ({"url": "/x", "cadence": 10}, "cadence=10"),
        ({"url": "/x", "retention": 3}, "retention=3"),
        ({"url": "/x", "parity": "ten"}, "parity"),
        ({"url": "slots:///x", "parity": "4+2"}, "slots"),
    ],
)
def test_a_tier_with_a_mistake_is_refused(tier, text):
    with pytest.raises(errors.LastgoodError, match=text):
        lastgood.Tier(**tier)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tiers": ["x"]}, "Give a list"),
        ({"tiers": lastgood.Tier("x")}, "Give a list"),
        ({"tiers": [lastgood.Tier("x/run")]}, "given as two places"),
        ({"tiers": [lastgood.Tier("x"), lastgood.Tier("slots:///y")]}, "slots below"),
        ({"path": "slots:///x/run", "tiers": [lastgood.Tier("x")]}, "slots below"),  # they received no copy, ever
    ],
)
def test_tiers_that_contradict_each_other_are_refused(options, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.Refused, match=text):
        lastgood.Checkpointer(**{"path": "x/run", "state": Training().state} | options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("ascending", [True, False])
def test_each_of_two_saves_in_flight_reaches_all_places(ascending, places, monkeypatch):
    """What was due was one step, the later of the two: the earlier save was committed first, was not copied, and its
    `result()` returned as if it were in all places. So did the earlier one that was committed after the later one:
    the copy of the later one had taken the place of its own."""
    begun, publish = threading.Event(), RunWriter.publish
    order, first, offer = ((1, 2) if ascending else (2, 1)), threading.Event(), LowerPlace.offer

    def in_order(run: RunWriter, at: GenerationId, *arguments: object, **named: object) -> object:
        assert begun.wait(60) and (at.step == order[0] or first.wait(60))
        return publish(run, at, *arguments, **named)

    def offered(place: LowerPlace, generation: Generation, pinned: bool) -> object:
        copied = offer(place, generation, pinned)
        first.set()
        return copied

    monkeypatch.setattr(RunWriter, "publish", in_order)
    monkeypatch.setattr(LowerPlace, "offer", offered)
    with places.opened(retention=lastgood.Keep(last=9)) as ckpt:
        ckpt.restore()
        saves = [ckpt.save(step) for step in (1, 2)]
        begun.set()
        for save in saves:
            save.result()
            assert str(places.last) in save.where()
    assert steps(places.last) == [1, 2]


def test_a_save_that_is_offered_after_a_later_one_is_copied_too(tmp_path, monkeypatch):
    """Two saves were committed in order, and the lane of the first was slow: the copy of the second was taken for that
    of both, and `result()` of the first returned although the home did not have it."""
    committed, second, offer, publish = threading.Event(), threading.Event(), LowerPlace.offer, RunWriter.publish

    def published(run: RunWriter, at: GenerationId, *arguments: object) -> object:
        assert at.step == 1 or committed.wait(60)
        return publish(run, at, *arguments)

    def offered(place: LowerPlace, generation: Generation, pinned: bool) -> object:
        if generation.step == 1:
            committed.set()
            assert second.wait(60)
        copied = offer(place, generation, pinned)
        second.set()
        return copied

    monkeypatch.setattr(RunWriter, "publish", published)
    monkeypatch.setattr(LowerPlace, "offer", offered)
    front = lastgood.Tier(tmp_path / "front", cadence=EVERY, retention=lastgood.Keep(last=8))
    options = {"cadence": EVERY, "tiers": [front], "retention": lastgood.Keep(last=9)}
    with lastgood.Checkpointer(tmp_path / "home", Training().state, **options) as ckpt:
        ckpt.restore()
        for save in [ckpt.step(step) for step in (1, 2)]:
            save.result()
            assert str(tmp_path / "home") in save.where()


@pytest.mark.parametrize("front", ["memory://", "directory"])
def test_a_save_that_is_committed_late_stays_until_its_copy_is_due(front, memory, tmp_path, monkeypatch):
    """Saves that passed it were verified, and the next one deleted it between its commit and the order to copy it: a
    milestone was in no place, and `result()` never returned."""
    released, committed, passed = threading.Event(), threading.Event(), threading.Event()
    publish, offer = RunWriter.publish, LowerPlace.offer

    def published(run: RunWriter, at: GenerationId, *arguments: object) -> object:
        assert at.step != 1 or released.wait(60)
        return publish(run, at, *arguments)

    def offered(place: LowerPlace, generation: Generation, pinned: bool) -> object:
        if generation.step == 1:
            committed.set()
            assert passed.wait(60)
        return offer(place, generation, pinned)

    monkeypatch.setattr(RunWriter, "publish", published)
    monkeypatch.setattr(LowerPlace, "offer", offered)
    above = lastgood.Tier(front) if "://" in front else lastgood.Tier(tmp_path / front, retention=lastgood.Keep(last=1))
    options = {"cadence": EVERY, "tiers": [above], "retention": lastgood.Keep(last=9), "in_flight": 2}
    with lastgood.Checkpointer(tmp_path / "home", Training().state, **options) as ckpt:
        ckpt.restore()
        save = ckpt.save(1, milestone=front == "memory://")
        for step in range(2, 6):
            ckpt.step(step).committed()
        released.set()
        assert committed.wait(60)
        ckpt.step(6).committed()
        passed.set()
        assert save.result(60).step == 1 and str(tmp_path / "home") in save.where()
    assert 1 in steps(tmp_path / "home")


def is_overtaken(save: lastgood.Save) -> bool:
    try:
        save.result(60)
    except errors.Overtaken:
        return True
    return False


def forget_first(ckpt: lastgood.Checkpointer) -> None:
    """A newer save has overwritten the slot of step 1."""
    known = ckpt._pipeline.run.known
    with known.lock:
        known.survey.generations = {at: one for at, one in known.survey.generations.items() if at.step != 1}


def test_a_copy_whose_slot_is_overwritten_is_given_up_at_once(tmp_path, monkeypatch):
    """It was tried again and again as if the place below were down, and `result()` waited until the run was closed."""
    complete = copying.complete

    def overwritten(target: Tier, sources: object, generation: Generation, *arguments: object) -> object:
        if generation.step == 1:
            part = tmp_path / "home" / layout.folder(generation.id) / layout.blob_name(0)
            part.parent.mkdir(parents=True)
            part.write_bytes(bytes(100))
            forget_first(ckpt)
            raise errors.MissingBlob("the slot has another step")
        return complete(target, sources, generation, *arguments)

    monkeypatch.setattr(copying, "complete", overwritten)
    options = {"tiers": [lastgood.Tier(f"slots://{tmp_path}/front")], "cadence": EVERY}
    with lastgood.Checkpointer(tmp_path / "home", Training().state, **options) as ckpt:
        ckpt.restore()
        assert is_overtaken(ckpt.step(1))
        assert [*(tmp_path / "home" / "gen").iterdir()] == [], "no part of the copy is left"
        assert not is_overtaken(ckpt.step(2))
    assert steps(tmp_path / "home") == [2]


def test_closing_gives_up_overwritten_slots_and_tries_the_rest(tmp_path, monkeypatch):
    """The first of them ended the last attempt: the others were said to be kept in front, and were not."""
    complete, close, down = copying.complete, LowerPlace.close, [errors.TierDown("the place below is down")]

    def refused(*arguments: object) -> object:
        if down:
            raise down[0]
        return complete(*arguments)

    def closed(place: LowerPlace) -> None:
        down.clear()
        close(place)

    monkeypatch.setattr(copying, "complete", refused)
    monkeypatch.setattr(LowerPlace, "close", closed)
    options = {"tiers": [lastgood.Tier(f"slots://{tmp_path}/front")], "cadence": EVERY, "in_flight": 1}
    options |= {"retention": lastgood.Keep(last=20), "save_on_exit": False}
    with lastgood.Checkpointer(tmp_path / "home", Training().state, **options) as ckpt:
        ckpt.restore()
        saves = [ckpt.step(step) for step in range(1, 9)]
        saves[-1].committed()
    given_up = [save.step for save in saves if is_overtaken(save)]
    assert sorted([*given_up, *steps(tmp_path / "home")]) == [*range(1, 9)] and 8 not in given_up


def test_damage_of_a_copy_is_reported_though_its_slot_was_overwritten(tmp_path, monkeypatch):
    """It was taken for that of the overwritten slot: the copy was deleted, and nothing said that the disk fails."""
    read = agent_work.AgentWork.read_all

    def damaged(work: agent_work.AgentWork, target: Tier, *arguments: object) -> object:
        if str(tmp_path / "home") in target.place:
            flip(tensor_file(tmp_path / "home", 1))
            forget_first(ckpt)
        return read(work, target, *arguments)

    monkeypatch.setattr(agent_work.AgentWork, "read_all", damaged)
    options = {"tiers": [lastgood.Tier(f"slots://{tmp_path}/front")], "cadence": EVERY, "save_on_exit": False}
    with reported("does not read back"), lastgood.Checkpointer(tmp_path / "home", Training().state, **options) as ckpt:
        ckpt.restore()
        with pytest.raises(errors.Damaged, match="does not read back"):
            ckpt.step(1).result(60)
    assert tensor_file(tmp_path / "home", 1).exists()


def test_saves_after_a_rewind_are_copied_before_what_it_left_behind(places, monkeypatch):
    """They have lower steps. While the place below was down they were given up one after another, and what the rewind
    had left behind was copied when it was back: with the front lost, the steps since the rewind were lost too."""
    complete, down = copying.complete, threading.Event()

    def refused(*arguments: object) -> object:
        if down.is_set():
            raise errors.TierDown("the place below is down")
        return complete(*arguments)

    monkeypatch.setattr(copying, "complete", refused)
    monkeypatch.setattr(lower_place, "PAUSES_SECONDS", (0.05,))
    with places.opened(retention=lastgood.Keep(last=2), save_on_exit=False) as ckpt:
        ckpt.restore()
        ckpt.step(1).result()
        down.set()
        for step in range(2, 8):
            ckpt.step(step).committed()
        ckpt.restore(step=1)
        for step in range(2, 5):
            ckpt.step(step).committed()
        down.clear()
        ckpt.wait()
    shutil.rmtree(places.front)
    with places.opened() as ckpt:
        assert ckpt.restore().step == 4


def test_a_copy_that_was_due_before_a_rewind_is_not_awaited_after_it(tmp_path, faulty_files):
    """A save failed that was to be copied. After a rewind nothing came to the home until its step was reached again."""
    front = lastgood.Tier(tmp_path / "front", cadence=lastgood.Every(steps=1), retention=lastgood.Keep(last=50))
    options = {"tiers": [front], "cadence": lastgood.Every(steps=4), "save_on_exit": False, "on_error": "warn"}
    home = tmp_path / "home"
    with lastgood.Checkpointer(home, {"w": torch.zeros(9)}, **options, retention=lastgood.Keep(last=99)) as ckpt:
        ckpt.restore()
        for n in range(1, 13):
            if n == 12:
                faulty_files.inject(Fault("write", "*.safetensors", nth=1))
            ckpt.step(n)
            ckpt.wait()
        assert steps(home) == [4, 8]
        ckpt.restore(step=4)
        for n in range(5, 11):
            ckpt.step(n)
            ckpt.wait()
    assert steps(home) == [4, 8, 8]


# ---- commands ------------------------------------------------------------------------------------------------


def test_the_command_tiers_lists_what_each_place_holds(places, call_json):
    places.train(6, every=3, retention=lastgood.Keep(last=9))
    code, data = call_json("tiers", str(places.last))
    assert code == 0 and [one["place"] for one in data["places"]] == [str(places.front), str(places.last)]
    held = {row["step"]: set(row["states"]) for row in data["generations"]}
    assert str(places.last) in held[3] and held[6] == {str(places.front), str(places.last)}
    assert data["restores"]["step"] == 6 and all(row["age_seconds"] < 600 for row in data["generations"])
    shutil.rmtree(places.front)
    code, data = call_json("tiers", str(places.last))
    assert code == 5 and "there is nothing at" in data["places"][0]["error"] and data["restores"]["step"] == 6


def test_the_command_tiers_lists_a_run_in_one_place(tmp_path, call_json):
    lastgood.save(tmp_path / "run", {"n": 1}, step=7)
    code, data = call_json("tiers", str(tmp_path / "run"))
    assert code == 0 and [row["step"] for row in data["generations"]] == [7] and len(data["places"]) == 1


def test_the_command_tiers_mixes_no_other_run_in(places, call_json, tmp_path):
    """Generations of two unrelated runs stood in one table, and the other one's was named as what a restore takes."""
    places.train(3)
    lastgood.save(tmp_path / "other", {"n": 1}, step=9)
    code, data = call_json("tiers", str(places.last), str(tmp_path / "other"))
    assert (code, data["error"]) == (3, "Refused") and "holds another run" in data["message"]
    shutil.rmtree(places.front)
    shutil.copytree(tmp_path / "other", places.front)  # a place that the run itself names
    code, data = call_json("tiers", str(places.last))
    assert code == 5 and "holds another run" in data["places"][0]["error"] and data["restores"]["step"] == 3


@pytest.mark.parametrize("command", ["scrub", "repair"])
@pytest.mark.parametrize("damaged", ["front", "last"])
def test_a_command_repairs_a_place_from_the_other_one(places, command, damaged, call_json):
    """Without parity; the run itself names its places."""
    places.train(3)
    run = getattr(places, damaged)
    before = files(run)
    flip(tensor_file(run, 3))
    code, data = call_json(command, str(run))
    assert code == 0 and data["good"] and files(run) == before


def test_a_copy_that_the_run_does_not_name_is_given_with_from(tmp_path, call_json):
    for name in ("a", "other"):
        lastgood.save(tmp_path / name, {"w": torch.randn(1000)}, step=1)
    assert call_json("copy", str(tmp_path / "a"), str(tmp_path / "b"))[0] == 0
    before = files(tmp_path / "a")
    flip(tensor_file(tmp_path / "a", 1))
    assert call_json("repair", str(tmp_path / "a"))[0] == 4
    assert call_json("repair", str(tmp_path / "a"), "--from", str(tmp_path / "other"))[0] == 3
    assert call_json("repair", str(tmp_path / "a"), "--from", str(tmp_path / "b"))[0] == 0
    assert files(tmp_path / "a") == before
