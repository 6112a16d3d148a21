"""Agreement between ranks through an in-process store, and the steps at which they save because of it."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch.distributed as dist
from msgspec import structs

import lastgood
from boards import Board, ThreadedBoard
from harness import save
from lastgood.coordination.announcements import Announcements
from lastgood.coordination.rendezvous import join
from lastgood.coordination.rounds import MessageStore, RankGroup
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import (
    Damaged,
    HeardLate,
    LastgoodError,
    Overtaken,
    RankFailed,
    Refused,
    StepDiffers,
    TierDown,
    TimedOut,
)
from lastgood.format import layout
from lastgood.io.files import PosixFiles
from lastgood.limits import MAX_IN_FLIGHT, VERDICT_HISTORY
from lastgood.loop.adaptive_interval import Pace
from lastgood.loop.schedule import AgreedSchedule
from lastgood.policy.cadence import Every
from lastgood.policy.tune import FIRST_STEPS, Auto
from lastgood.ports import never
from lastgood.ranks.torch_store import Clients, GroupStore
from lastgood.run.follower import Follower
from lastgood.run.known import Environment
from lastgood.run.part_copies import OtherRanks, PartServer
from lastgood.run.pipeline import Save
from lastgood.run.thread_pools import Workers
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood.testing import Clock


def two_on(board):
    return [RankGroup(rank, 2, board, "run") for rank in (0, 1)]


# ---- rendezvous ------------------------------------------------------------------------------------------------


def rendezvous_results(board, ranks, size, timeout_seconds=6.0):
    """Run the rendezvous in one thread for each of these ranks, and return each rank's result."""

    def joined(rank):
        try:
            return join(MessageStore(board), "run", rank, size, timeout_seconds)
        except RankFailed as error:
            return error.what

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(joined, ranks))


def test_restarted_ranks_find_each_other_beside_keys_of_dead_processes():
    """torchrun restarts workers with the same store. Each worker counted in it how often it had opened the run: once
    a worker had died between two openings, the ranks never completed a rendezvous again."""
    board = ThreadedBoard()
    board.set({"run/joining/1": b'"of a dead one"', "run/joining/2": b'"of another"'})
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(rendezvous_results, board, [0], 3)
        with board.news:  # the other ranks join after rank 0 has polled for them several times
            assert board.news.wait_for(lambda: board.calls >= 12, 20.0)
        first = {*rendezvous_results(board, [1, 2], 3), *leading.result()}
    second = set(rendezvous_results(board, range(3), 3))
    assert len(first) == len(second) == 1 and first != second
    assert len(board.posts) == 4  # the two answers to dead processes, and one end of each rendezvous


def test_every_rank_learns_the_node_of_every_rank():
    board, nodes = ThreadedBoard(), ("a", "b", "a")
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: join(MessageStore(board), "run", rank, 3, 6.0, nodes[rank]), range(3)))
    assert {one.nodes for one in found} == {nodes} and len({one.name for one in found}) == 1


def test_a_rendezvous_timeout_names_the_missing_ranks():
    assert rendezvous_results(ThreadedBoard(), [0, 2], 3, 0.5) == ["rank 1 has not opened the run within 0 s"] * 2
    assert rendezvous_results(ThreadedBoard(), [0], 3, 0.0) == [
        "rank 1 (and 1 more rank) has not opened the run within 0 s"
    ]
    assert rendezvous_results(ThreadedBoard(), [1], 2, 0.0) == ["rank 0 has not opened the run within 0 s"]


def test_a_rank_that_died_after_it_joined_is_named():
    board = ThreadedBoard()
    board.set({"run/joining/1": b'"of a dead one"'})
    assert rendezvous_results(board, [0, 2], 3, 0.5) == ["rank 1 has not opened the run within 0 s"] * 2


@pytest.mark.slow
def test_a_timeout_through_a_file_store_is_reported_as_a_timeout(tmp_path):
    """In a group with a FileStore, a timeout was reported as a lost store: the error named no missing rank, and a
    rank that replaced a dead one was not found."""
    store = GroupStore(Clients(dist.FileStore(str(tmp_path / "store"), 3).clone), 20.0)
    assert rendezvous_results(store, [0, 2], 3, 3.0) == ["rank 1 has not opened the run within 3 s"] * 2


def test_a_survivor_does_not_wait_for_the_store_of_a_dead_rank():
    """A survivor of rank 0 saved nothing for it: a message that nobody would read was under way to its store."""
    begun, abandoned, ended = threading.Event(), threading.Event(), threading.Event()

    def connect():
        begun.set()
        ended.wait(300)
        raise RuntimeError("the store cannot be reached")

    ranks = RankGroup(1, 2, GroupStore(Clients(connect), 300.0, abandoned), "run", 300.0, abandoned=abandoned)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(ranks.post, "a", 1), pool.submit(ranks.receive, ["b"], 300.0)]
        try:
            assert begun.wait(60)
            ranks.abandoned.set()
            errors = [type(call.exception(60)) for call in calls]
        finally:
            ended.set()
    assert errors == [TierDown, TimedOut]


# ---- topics ----------------------------------------------------------------------------------------------------


def test_a_rank_that_skips_a_step_is_named_and_the_next_step_succeeds():
    """Saves were matched by their number: after a rank had skipped one, each save was matched with another step and
    failed."""
    first, second = two_on(Board())
    later = second.step_topic("save", 3)
    with pytest.raises(RankFailed, match="rank 0 published no verdict"):
        later.agree("of 3", len)
    with pytest.raises(StepDiffers, match="rank 1: has begun step 3 and skipped step 2"):
        first.step_topic("save", 2).agree("of 2", len)
    assert first.step_topic("save", 3).agree("of 3", list) == ["of 3", "of 3"]


def test_a_step_that_rank_0_skipped_fails_at_once_on_the_others():
    first, second = two_on(Board())
    with pytest.raises(TimedOut, match="rank 1: posted nothing"):
        first.step_topic("save", 3).agree("of 3", len)
    with pytest.raises(StepDiffers, match="rank 0 has begun step 3 and skipped step 2"):
        second.step_topic("save", 2).agree("of 2", len)


def test_the_ranks_wait_for_a_late_rank():
    first, second = two_on(Board())
    with pytest.raises(RankFailed):
        # Rank 1 has reached step 1 already, and may still go on to step 2.
        second.step_topic("save", 1).agree("of 1", len)
    with pytest.raises(TimedOut, match="rank 1: posted nothing within 120 s"):
        first.step_topic("save", 2).agree("of 2", len)


def test_messages_from_before_a_rewind_are_ignored_after_it():
    first, second = two_on(Board())
    second.step_topic("save", 1).fail(StepDiffers("of before"))
    for one in (first, second):
        one.begin_restore(1)
    with pytest.raises(TimedOut, match="rank 1: posted nothing"):
        first.step_topic("save", 1).agree("of now", list)


def test_a_failed_verdict_ends_the_wait_of_every_rank():
    """When the coordinator ran out of memory or met a bug, the other ranks waited for twice their timeout."""
    board = Board()
    first, second = two_on(board)

    def decide(_):
        raise MemoryError("for the verdict")

    with pytest.raises(RankFailed):
        second.step_topic("save", 1).agree("mine", len)
    with pytest.raises(MemoryError):
        first.step_topic("save", 1).agree("mine", decide)
    with pytest.raises(RankFailed, match="MemoryError: for the verdict"):
        RankGroup(1, 2, board, "run").step_topic("save", 1).agree("mine", len)


def test_a_message_that_is_deleted_while_it_is_read_is_not_awaited():
    """A rank posted that its part of a generation was good, and deleted that once it had read a newer one. Rank 0 had
    just seen the post: it waited two minutes for it, and saves waited behind that. Found in one of 500 trials of nodes,
    under load."""

    class Deleting(Board):
        def has(self, keys):
            found = super().has(keys)
            self.delete(keys)
            return found

        def get(self, keys, timeout_seconds, cancelled=lambda: False, poll_seconds=None):
            assert cancelled() and poll_seconds < 1.0, "the wait ends as soon as the key is gone"
            raise TimedOut("no other rank posts")

    board = Deleting()
    board.set({"part": b"true"})
    assert MessageStore(board).read("part") is None


def test_a_message_that_is_deleted_after_the_wait_for_it_is_none():
    """torch's store answers with empty data then, on which a save failed with "Input data was truncated"."""

    class Emptied(Board):
        def get(self, keys, timeout_seconds, cancelled=lambda: False, poll_seconds=None):
            return [b"" for _ in keys]

    board = Emptied()
    board.set({"part": b"true"})
    assert MessageStore(board).read("part") is None


def at_barrier(board: ThreadedBoard, rank: int, size: int, until) -> str:
    """Work until `until()`, as one of `size` ranks with a timeout of 0.3 s; returns the error, or ""."""
    try:
        with RankGroup(rank, size, board, "run", 0.3).topic("load").barrier(), board.news:
            assert board.news.wait_for(until, 20.0)
            if isinstance(until(), LastgoodError):
                raise until()
    except LastgoodError as error:
        return f"{type(error).__name__}: {error.what}"
    return ""


def all_at_barrier(until) -> list[str]:
    """What ranks find that work until each of these is true, or has an error."""
    board = ThreadedBoard()
    with ThreadPoolExecutor(len(until)) as pool:
        ranks = range(len(until))
        return list(pool.map(lambda rank: at_barrier(board, rank, len(until), lambda: until[rank](board)), ranks))


def at_once(board: Board) -> bool:
    return True


def after_rounds(board: Board) -> bool:
    """True after much more than the timeout."""
    return "run/0/load/1/5/verdict" in board.posts


@pytest.mark.parametrize("until", [[after_rounds, at_once], [at_once, after_rounds]], ids=["rank 0", "rank 1"])
def test_a_rank_that_works_longer_than_the_timeout_is_waited_for(until):
    """A rank whose node was replaced reads from other nodes for minutes, while the others have loaded within seconds:
    they gave it up, with their states half loaded."""
    assert all_at_barrier(until) == ["", ""]


def test_a_failure_at_a_barrier_waits_for_the_slow_ranks():
    """Two ranks went on to examine what had failed, and gave up the third one, which was still loading."""
    found = all_at_barrier([at_once, lambda board: Damaged("its file"), after_rounds])
    assert found == ["Damaged: rank 1: its file", "Damaged: its file", "Damaged: rank 1: its file"]


def test_ranks_that_fail_at_a_barrier_in_different_ways_raise_the_same():
    found = all_at_barrier([at_once, lambda board: Damaged("its file"), lambda board: TierDown("its disk")])
    assert found == ["Damaged: rank 1: its file", "Damaged: its file", "Damaged: rank 1: its file"]


# ---- announcements ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step_seconds", "ahead"), [(1 / 128, 257), (1.0, 3), (16.0, 1)])
def test_announcements_reach_every_rank_before_their_step(step_seconds, ahead):
    """The lead was three steps even where a step takes seconds: the grace period of a preemption expired before the
    announced step."""
    board, clock = Board(), Clock()
    leading, asking = (Announcements(one, clock) for one in two_on(board))
    n = 0

    def step(*ranks, ends=False):
        nonlocal n
        n += 1
        clock.advance(step_seconds)
        for one in ranks:
            one.poll(n, ends and one is asking)

    while n < 200:
        step(asking, leading)
    while leading.end is None:
        step(asking, leading, ends=True)
    assert leading.end == n + ahead
    while asking.end is None:
        step(asking)
    assert n <= asking.end == leading.end


@pytest.mark.parametrize(
    ("slow_steps", "slow_seconds", "announced_at"),
    [(range(300, 301), 600.0, 320), (range(1, 18), 1.5, 22)],
    ids=["after a pause", "after slow steps"],
)
def test_announcements_reach_every_rank_after_the_loop_was_slow(slow_steps, slow_seconds, announced_at):
    """After an evaluation of ten minutes the speed since the restore was low, so the lead was a few steps, and the save
    that was announced next failed on all ranks. After 20 s of slow steps it was three steps of a sixteenth of a
    second."""
    board, clock = Board(), Clock()
    leading, following = (Announcements(one, clock) for one in two_on(board))
    for n in range(1, 500):
        clock.advance(slow_seconds if n in slow_steps else 1 / 16)
        leading.poll(n)
        if n == announced_at:
            leading.announce(n, "save")
        clock.advance(1 / 64)
        following.poll(n)
        if leading.pending and n == leading.pending[0].step:
            break
    assert [one.step for one in following.pending] == [n], "the other rank knows of it at its step"


def test_a_loop_that_has_become_slow_is_announced_to_few_steps_ahead():
    """Steps that only skip samples take a millisecond. With their speed the end of a job whose steps take a minute
    would be announced hours ahead."""
    board, clock = Board(), Clock()
    leading, _ = (Announcements(one, clock) for one in two_on(board))
    for n in range(1, 1005):
        clock.advance(1 / 256 if n <= 1000 else 60.0)
        leading.poll(n)
    leading.announce(1004, "save")
    assert [one.step for one in leading.pending] == [1005]


def test_a_barrier_without_a_thread_fails_on_all_ranks(monkeypatch):
    """The error was hidden by an UnboundLocalError, and the other ranks waited for the timeout."""

    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refused)
    board = Board()
    with pytest.raises(Refused, match="no thread could be started"), two_on(board)[1].topic("load").barrier():
        raise AssertionError("the block is not entered")
    assert any(b"no thread" in one for one in board.posts.values()), "the other ranks learn of it"


def test_an_end_that_a_rank_receives_late_is_postponed():
    """The loop became faster after its first steps, so a rank passed the step of the end before it polled. It waited
    for rank 0 in a collective operation, and rank 0 waited for its answer until the grace period was over."""
    board, clock = Board(), Clock()
    leading, following = (Announcements(one, clock) for one in two_on(board))
    for n in range(1, 6):
        clock.advance(0.1)
        leading.poll(n)
        following.poll(n)
    clock.advance(1.0)
    leading.poll(6, request_end=True)
    first = leading.end
    assert not leading.end_holds(first) and leading.end > first
    following.poll(first + 50)
    assert following.end == leading.end, "the clock stands still, and the last poll was a second ago"
    assert not leading.end_holds(leading.end), "the other rank is known to have passed this step too"
    assert leading.end > first + 50
    assert not following.end_holds(first + 50) and following.end is None
    following.poll(first + 51)
    assert following.end == leading.end, "after an announcement of the end, a rank polls at each step"
    assert leading.end_holds(leading.end) and following.end_holds(following.end)


def test_ranks_end_without_a_decision_while_the_store_is_down():
    board, clock = Board(), Clock()
    leading, following = (Announcements(one, clock) for one in two_on(board))
    clock.advance(1.0)
    leading.poll(1, request_end=True)
    following.poll(1)
    board.down = True
    assert leading.end_holds(leading.end) and following.end_holds(following.end)


def test_the_end_is_posted_again_after_pauses_that_double():
    """Rank 0, which requests the end itself, waited four times as long after each failed call of the store."""
    board, clock = Board(), Clock()
    coordinator, _ = (Announcements(one, clock) for one in two_on(board))
    coordinator.poll(1)
    board.down, failed_at = True, list[float]()
    for n in range(2, 1000):
        clock.advance(0.1)
        try:
            coordinator.poll(n, request_end=True)
        except TierDown:
            failed_at.append(clock())
    pauses = [after - before for before, after in itertools.pairwise(failed_at)]
    assert len(pauses) >= 4
    assert all(later == pytest.approx(2 * pause, abs=0.25) for pause, later in itertools.pairwise(pauses))


def test_a_request_during_a_store_outage_is_repeated_afterwards():
    """The request was recorded before it was posted, so it was never repeated, and the last save was missing."""
    board, clock = Board(), Clock()
    leading, asking = (Announcements(one, clock) for one in two_on(board))
    board.down, failed = True, 0
    for n in range(1, 601):
        clock.advance(0.1)
        for one in (leading, asking):
            try:
                one.poll(n, request_end=one is asking)
            except TierDown:
                failed += 1
    assert 5 <= failed <= 20, "each call fails, at growing intervals"
    assert board.calls == failed
    board.down = False
    for n in range(601, 3000):
        clock.advance(0.1)
        leading.poll(n)
        asking.poll(n, request_end=True)
    assert leading.end == asking.end is not None


def test_a_post_of_unknown_outcome_is_published_unchanged():
    """A repeated post named another step under the same number: rank 0 used one step, and the other ranks the other."""
    board, clock = Board(), Clock()
    first, second = two_on(board)
    leading, following = Announcements(first, clock), Announcements(second, clock)
    leading.poll(1)
    real = board.set

    def post_then_fail(posts):
        real(posts)
        raise TierDown("the answer was lost")

    board.set = post_then_fail
    with pytest.raises(TierDown):
        leading.announce(1, "save")
    board.set = real
    for n in range(2, 12):
        clock.advance(1)
        leading.poll(n)
        following.poll(n)
    assert not leading.announce(12, "ended", 5), "the announcement that was begun must be published first"
    assert leading.pending == following.pending and leading.pending[0].kind == "save"
    assert leading.announce(12, "ended", 5)


def test_an_explicitly_saved_step_is_not_saved_again_when_announced():
    """The announced save of such a step raised StepTaken inside the training loop."""
    board, clock = Board(), Clock()
    first, second = (Rank(one, clock, Every(seconds=20.0)) for one in two_on(board))
    n = 0
    while not any(one.kind == "save" for one in second.ahead.pending):
        n += 1
        run((first, second), clock, 1, first=n)
    announced = second.ahead.pending[0].step
    run((first, second), clock, announced - 1 - n, first=n + 1)
    for one in (first, second):
        one.timing.begun(Save(announced), clock(), clock(), 0.0)
    run((first, second), clock, 1, first=announced)
    assert not first.saved + second.saved


# ---- the steps at which ranks save -----------------------------------------------------------------------------


class Rank:
    """The loop of one rank, reduced to its schedule: it records the steps it saved, failed and skipped."""

    def __init__(self, ranks, clock, cadence, in_flight=None):
        self.ahead = Announcements(ranks, clock)
        self.saved, self.failed, self.flying, self.skipped = [], [], [], []
        self.timing = AgreedSchedule(cadence, self, ranks, self.ahead, in_flight)
        self.timing.restored(0, clock())
        self.clock, self.board = clock, False

    def emit(self, kind, step, detail):
        if kind == "failed":
            self.failed.append(step)

    def step(self, n, save_seconds=0.0):
        for one, until in self.flying:
            if until <= self.clock() and not one.ended():
                one.note_outcome(None, Overtaken(""))
        if not self.board:
            self.ahead.poll(n)
            self.timing.announce(n, self.clock())
        if not self.timing.due(n, self.clock()):
            return
        if self.timing.full():
            self.skipped.append(n)
            self.timing.left_out(n)
            return
        self.saved.append(n)
        self.timing.admitted(n)
        one = Save(n)
        self.timing.begun(one, self.clock(), self.clock(), 0.0)
        self.flying.append((one, self.clock() + save_seconds))


class AnnouncedPace(Pace):
    """A cadence whose interval a test changes."""

    def __init__(self, changes):
        super().__init__(Auto())
        self.changes = changes

    def passed(self, n, now):
        if n not in self.changes:
            return ""
        self.auto = replace(self.auto, interval_steps=self.changes[n])
        return "announced"

    def begun(self, *_):
        pass


def run(ranks, clock, steps, save_seconds=0.0, first=1, stride=1):
    for n in range(first, first + steps):
        clock.advance(0.1)
        for number, one in enumerate(ranks):
            clock.advance(0.01 * number)  # the second rank is always a little later
            one.step(n * stride, save_seconds)


def test_a_cadence_in_seconds_is_due_at_one_step_on_every_rank():
    clock = Clock()
    first, second = (Rank(one, clock, Every(seconds=20.0)) for one in two_on(Board()))
    run((first, second), clock, 2000)
    assert len(first.saved) >= 8 and first.saved == second.saved and not first.failed + second.failed


@pytest.mark.parametrize("cadence", [Every(seconds=20.0), Every(steps=100_000)])
def test_steps_that_count_tokens_are_due_at_one_step_on_every_rank(cadence):
    """The loop's own step counts tokens and never equalled the announced step, so each save due by time was
    announced too late on all ranks."""
    clock = Clock()
    first, second = (Rank(one, clock, cadence) for one in two_on(Board()))
    run((first, second), clock, 1000, stride=4097)
    assert len(first.saved) >= 4 and first.saved == second.saved and not first.failed + second.failed


def test_a_late_announcement_fails_the_missed_save_of_a_token_count():
    clock = Clock()
    first, second = (Rank(one, clock, Every(seconds=5.0)) for one in two_on(Board()))
    run((first, second), clock, 100, stride=4097)
    second.board = True
    run((first, second), clock, 100, first=101, stride=4097)
    second.board = False
    run((first, second), clock, 400, first=201, stride=4097)
    assert second.failed and set(second.failed) <= set(first.saved)
    assert first.saved[-2:] == second.saved[-2:]


def test_a_measured_interval_takes_effect_at_one_step_on_every_rank():
    board, clock = Board(), Clock()
    first, second = (
        Rank(one, clock, AnnouncedPace({100: 30, 400: 70} if not one.rank else {})) for one in two_on(board)
    )
    run((first, second), clock, 1000)
    assert first.saved == second.saved and not second.failed
    apart = [after - before for before, after in zip(first.saved, first.saved[1:], strict=False)]
    assert apart[0] == FIRST_STEPS and {30, 70} <= set(apart) and apart[-1] == 70


def test_after_a_second_restore_the_ranks_save_at_the_same_steps():
    """Rank 0 began again with the interval that it had measured, the others with the first one, and it never announced
    its own: after a second restore() in one process the ranks saved at different steps, and waited for each other."""
    ranks, clock = two_on(Board()), Clock()
    paces = [AnnouncedPace({100: 30} if not one.rank else {}) for one in ranks]
    run([Rank(one, clock, pace) for one, pace in zip(ranks, paces, strict=True)], clock, 500)
    for one in ranks:
        one.begin_restore(1)
    first, second = again = [Rank(one, clock, pace) for one, pace in zip(ranks, paces, strict=True)]
    for one in again:
        one.timing.restored(500, clock())
    run(again, clock, 500, first=501)
    assert first.saved == second.saved and not first.failed + second.failed
    assert first.saved[-1] - first.saved[-2] == 30, "it is announced again"


def test_a_rank_with_a_late_interval_fails_its_missed_saves_and_recovers():
    board, clock = Board(), Clock()
    first, second = (Rank(one, clock, AnnouncedPace({100: 37} if not one.rank else {})) for one in two_on(board))
    run((first, second), clock, 90)
    second.board = True
    run((first, second), clock, 110, first=91)
    second.board = False
    run((first, second), clock, 400, first=201)
    assert second.failed and set(second.failed) <= set(first.saved)
    assert first.saved[-8:] == second.saved[-8:]


def test_a_step_is_skipped_on_all_ranks_or_on_none():
    """Each rank checked by itself for a free lane: one rank found a free lane and another did not."""
    board, clock = Board(), Clock()
    first, second = (Rank(one, clock, Every(steps=10), in_flight=2) for one in two_on(board))
    run((first, second), clock, 1000, save_seconds=3.0)
    assert first.saved == second.saved and first.skipped == second.skipped
    assert len(first.saved) > 20 and len(first.skipped) > 20
    assert first.saved[:2] == [10, 20] and first.skipped[0] == 30


@pytest.mark.parametrize(("cadence", "seconds"), [(Every(steps=10), 3.0), (Every(seconds=5.0), 0.5)])
def test_a_rank_fails_the_saves_it_left_out_before_it_knew_of_a_place(cadence, seconds):
    """A rank skipped a step that the other rank saved, and did not fail the save of that step: the other rank waited
    until its timeout."""
    board, clock = Board(), Clock()
    first, second = (Rank(one, clock, cadence, in_flight=1) for one in two_on(board))
    run((first, second), clock, 100, save_seconds=3.0)
    second.board = True
    run((first, second), clock, 150, save_seconds=seconds, first=101)
    second.board = False
    run((first, second), clock, 400, save_seconds=3.0, first=251)
    assert second.failed and set(first.saved) == {*second.saved, *second.failed}
    assert not set(second.saved) & set(second.failed)
    assert first.saved[-3:] == second.saved[-3:] and first.skipped[-3:] == second.skipped[-3:]


def test_steps_of_announcements_ascend_when_the_loop_slows_down():
    """After a long evaluation the lead shrank, and a later announcement took effect before an earlier one."""
    clock = Clock()
    leader = Announcements(two_on(Board())[0], clock)
    for n in range(1, 101):
        clock.advance(0.01)
        leader.poll(n)
    assert leader.announce(100, "ended", 10)
    clock.advance(600.0)
    leader.poll(101)
    assert leader.announce(101, "ended", 20)
    first, second = (one.step for one in leader.pending)
    assert second >= first > 102


def test_the_saves_that_rank_0_watches_are_bounded():
    """With a cadence in steps nothing is announced, and every save of the run stayed in memory."""
    leader = Rank(two_on(Board())[0], Clock(), Every(steps=1))
    for n in range(1, 200):
        leader.timing.begun(Save(n), 0.0, 0.0, 0.0)
    assert len(leader.timing._started) == MAX_IN_FLIGHT


def test_the_end_of_a_save_is_announced_after_those_of_older_ones():
    """An announced end frees the places of all older saves too, so more saves than allowed would be in flight."""
    leader = Rank(two_on(Board())[0], Clock(), Every(steps=10), in_flight=2)
    saves = [Save(n) for n in (1, 2)]
    for one in saves:
        leader.timing.admitted(one.step)
        leader.timing.begun(one, 0.0, 0.0, 0.0)
    for n, ended in ((3, saves[1]), (4, saves[0])):
        ended.note_outcome(None, Overtaken(""))
        leader.ahead.poll(n)
        leader.timing.announce(n, 0.0)
        announced = [one.value for one in leader.ahead.pending if one.kind == "ended"]
        assert announced == ([] if n == 3 else [2])


def test_a_save_that_only_a_late_rank_made_does_not_keep_its_place():
    """The end of such a save was never announced, so that rank had one place in flight less than the others for
    ever."""
    board, clock = Board(), Clock()
    first, second = (Rank(one, clock, Every(steps=10), in_flight=2) for one in two_on(board))
    second.timing.admitted(5)
    run((first, second), clock, 400, save_seconds=3.0)
    assert first.saved[-10:] == second.saved[-10:]


def test_a_measured_interval_is_announced_further_ahead_after_a_late_one():
    """The lead grew only for a cadence in seconds."""
    leads = []
    for error in (Overtaken(""), HeardLate("")):
        clock = Clock()
        leader = Rank(two_on(Board())[0], clock, AnnouncedPace({100: 30}))
        run((leader,), clock, 60)
        failed = Save(60)
        leader.timing.begun(failed, clock(), clock(), 0.0)
        failed.note_outcome(None, error)
        run((leader,), clock, 40, first=61)
        leads += [one.step - 100 for one in leader.ahead.pending if one.kind == "every"]
    assert leads[1] == pytest.approx(2 * leads[0], abs=2), (
        "each lead is rounded up to a whole step, and one step is added"
    )


# ---- each rank verifies the files that it has written -------------------------------------------------------------


def test_posted_keys_do_not_accumulate():
    board = ThreadedBoard()
    first, second = two_on(board)
    with ThreadPoolExecutor(1) as other:
        for step in range(1, VERDICT_HISTORY + 200):
            theirs = other.submit(second.step_topic("save", step).agree, "mine", len)
            assert first.step_topic("save", step).agree("mine", len) == theirs.result() == 2
    assert len(board.posts) < VERDICT_HISTORY + 20


class Reading(Disk):
    """A tier that records the ranks whose tensor files were read."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.of: set[str] = set()

    def read_into(self, extent, mv, *, fresh=False):
        if extent.blob.endswith(".safetensors"):
            self.of.add(extent.blob.rpartition("/")[2][:6])
        super().read_into(extent, mv, fresh=fresh)


@pytest.fixture
def both(tmp_path):
    """A leader and a follower that have both saved step 1, and the file of each."""
    board = ThreadedBoard()
    first, second = two_on(board)
    clock = Clock()
    environment = Environment(monotonic_seconds=clock, pause=clock.advance)
    leader = RunWriter(Reading(PosixFiles(), str(tmp_path)), Inline(), ranks=first, environment=environment)
    follower = Follower(Reading(PosixFiles(), str(tmp_path)), Inline(), second)

    def saved(run):
        run.begin(None)
        ranks = first if run is leader else second
        return save(run, 1, {f"w{run.rank}": bytes(20_000)}, topic=ranks.step_topic("save", 1))

    with ThreadPoolExecutor(2) as pool:
        first_generation, second_generation = pool.map(saved, (leader, follower))
    assert first_generation == second_generation
    folder = tmp_path / layout.folder(first_generation.id)
    return leader, follower, [folder / layout.blob_name(rank) for rank in (0, 1)]


def verify(run):
    run.verify(Arena(3 * 8192, 8192))


def test_each_rank_verifies_its_own_files_and_rank_0_marks_them(both):
    """Rank 0 read the files of all ranks; with a thousand ranks it would never have finished."""
    leader, follower, _ = both
    verify(follower)
    verify(leader)
    assert (leader.tier.of, follower.tier.of) == ({"r00000"}, {"r00001"})
    assert leader.known.newest_verified().step == 1


@pytest.mark.parametrize("owner", [0, 1])
def test_rank_0_confirms_a_finding_of_another_rank_before_it_marks(both, owner):
    leader, follower, blobs = both
    blobs[owner].write_bytes(blobs[owner].read_bytes()[:-1] + b"?")
    verify(follower)
    with pytest.raises(Damaged, match="step 1 was committed and does not read back"):
        verify(leader)
    assert leader.known.newest_verified() is None
    assert leader.tier.of == ({"r00000"} if owner == 0 else {"r00000", "r00001"})


def test_seals_of_different_generations_are_not_committed(both, tmp_path):
    leader, follower, _ = both
    follower.known.incarnation = structs.replace(follower.known.incarnation, id="deadbeef")

    def saved(run):
        with pytest.raises(StepDiffers, match=r"ranks have sealed gen/000000000002-.*, gen/000000000002-"):
            save(run, 2, {f"w{run.rank}": bytes(100)}, topic=run.ranks.step_topic("save", 2))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(saved, (leader, follower)))
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1]


@pytest.mark.parametrize("broken", [False, True])
def test_rank_0_verifies_the_files_of_a_rank_that_does_not_answer(both, broken):
    leader, _, blobs = both
    if broken:
        blobs[1].write_bytes(blobs[1].read_bytes()[:-1] + b"?")
    with pytest.raises(Damaged) if broken else nullcontext():
        verify(leader)
    assert leader.tier.of == {"r00000", "r00001"} and (leader.known.newest_verified() is None) == broken


class OwnFiles:
    """The disk of the node of rank 0, in a run whose nodes have disks of their own."""

    def list(self, folder):
        return {"r00000.safetensors": None, "r00000.manifest.json": None}


@pytest.fixture
def others(both):
    """Rank 1, as rank 0 asks it to read its files."""
    leader, follower, _ = both
    asked = OtherRanks(leader.ranks, "front", leader.tier)
    server = PartServer(follower.tier, "front", [], follower.ranks, Workers(1, "read"))
    yield asked
    asked.end()
    server.close()


def test_files_of_another_node_are_read_there_and_not_sent(both, others):
    """They came through the store of the job. Beside a slow link each save waited for them, and the loop up to 9 s."""
    leader, follower, _ = both
    leader.tier.own, leader.verifier.others = OwnFiles(), others
    verify(leader)
    assert (leader.tier.of, follower.tier.of) == ({"r00000"}, {"r00001"})
    assert leader.known.newest_verified().step == 1


def test_damage_that_another_node_finds_is_confirmed_before_it_is_marked(both, others):
    """One flipped bit in the COMMIT of one node marked a good generation as damaged on all of them."""
    leader, _, blobs = both
    leader.tier.own, leader.verifier.others = OwnFiles(), others
    good = blobs[1].read_bytes()
    blobs[1].write_bytes(good[:-1] + b"?")
    (generation,) = leader.known.survey.generations.values()
    assert not others.confirm(generation, [1], 60.0, never)
    assert not others.confirm(generation, [0, 1], 60.0, never), "nobody else has the files of rank 0"
    blobs[1].write_bytes(good)
    assert others.confirm(generation, [1], 60.0, never)


def test_a_node_that_does_not_answer_confirms_nothing(both):
    leader, _, _ = both
    leader.tier.own = OwnFiles()
    leader.verifier.others = OtherRanks(leader.ranks, "front", leader.tier)
    verify(leader)
    assert leader.tier.of == {"r00000", "r00001"} and leader.known.newest_verified().step == 1


class VerdictLosingBoard(Board):
    """A board that answers reads, and loses every verdict that is posted to it."""

    def set(self, values):
        if any(key.endswith("verdict") for key in values):
            raise TierDown("the store is gone")
        super().set(values)


def test_a_commit_stays_although_its_verdict_could_not_be_published(tmp_path):
    """When rank 0 could not post a verdict, it treated the save as failed and removed the generation that it had
    committed."""
    disk = Disk(PosixFiles(), str(tmp_path))
    writer = RunWriter(disk, Inline(), ranks=RankGroup(0, 1, Board(), "run"))
    writer.begin(None)
    board = VerdictLosingBoard()
    generation = save(writer, 1, {"w": b"x" * 100}, topic=RankGroup(0, 1, board, "run").step_topic("save", 1))
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [generation.step] == [1]
