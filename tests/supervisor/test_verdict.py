"""The verdict of several nodes: decided once, also if a node is lost or was stopped meanwhile."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lastgood.io import heartbeat
from lastgood.policy.blame import Ended
from lastgood.policy.hang import Signs, Stuck
from lastgood.policy.membership import Bounds, Past, Spares
from lastgood.policy.recovery import PREEMPTED
from lastgood.supervisor import long_values, merged, reported
from lastgood.supervisor.attempt import Hang, Lived
from lastgood.supervisor.membership import Joined, Waiters
from lastgood.supervisor.nodes import POLL_SECONDS, NodeInfo, SeveralNodes
from lastgood.supervisor.placement import Notice, Placement
from lastgood.supervisor.signals import Signals

TIMEOUT_SECONDS = 0.5


class Board:
    """The keys of one round, which all nodes share."""

    order = 0

    def __init__(self, nodes: int) -> None:
        self.nodes, self.keys, self.job_keys = nodes, dict[str, str](), dict[str, str]()
        self.waiters = Waiters(joining=0, reserve=0)


class Member:
    """The membership of one node: the calls of `Membership`, on a board."""

    moves, join_seconds, endpoint = False, 60.0, "127.0.0.1:29400"

    def __init__(self, board: Board, node: int) -> None:
        self._board, self._node = board, node

    def join(self, past: Past, again: bool) -> Joined:
        return Joined(node=self._node, nodes=self._board.nodes, address="127.0.0.1", order=self._board.order)

    def put(self, values: Mapping[str, str], job: bool = False) -> None:
        (self._board.job_keys if job else self._board.keys).update(values)

    def read(self, keys: Sequence[str], job: bool = False) -> list[str | None]:
        return [*map((self._board.job_keys if job else self._board.keys).get, keys)]

    def claim(self, key: str, value: str) -> str:
        return self._board.keys.setdefault(key, value)

    def raise_to(self, key: str, value: str) -> None:
        self._board.job_keys[key] = max(value, self._board.job_keys.get(key, ""))

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._board.keys.pop(key, None)

    def waiting(self) -> Waiters:
        return self._board.waiters


@pytest.fixture
def board() -> Board:
    return Board(3)


@pytest.fixture
def nodes(board: Board) -> list[SeveralNodes]:
    """Three nodes that have begun an attempt, and expect one more in reserve."""
    board.job_keys["verdict/another"] = "of another job with the same --rdzv-id"
    board.keys |= {f"node/{one}": '{"host":"h","ranks":2,"node_rank":null,"address":""}' for one in range(3)}
    made = list[SeveralNodes]()
    for one in range(3):
        info = NodeInfo(host=f"host{one}", ranks=2, node_rank=None, address="")
        node = SeveralNodes(Member(board, one), Bounds(3, 3, spares=1), info, TIMEOUT_SECONDS, Signals([]))  # type: ignore[arg-type]
        node.touch()  # while it imports torch, it has not joined
        assert not board.keys.keys() & {"alive/0", "alive/1", "alive/2"}
        assert node.join("this") is None
        made.append(node)
    assert [one.begin(0).first_rank for one in made] == [0, 2, 4]  # type: ignore[union-attr]
    return made


def test_one_node_decides_and_all_have_its_verdict(nodes: list[SeveralNodes]) -> None:
    assert nodes[2].reports("of 2") is None and nodes[1].reports("of 1") is None
    assert nodes[0].reports("of 0") == {0: "of 0", 1: "of 1", 2: "of 2"}
    assert [one.verdict(None if one is not nodes[0] else "go on") for one in nodes] == ["go on"] * 3


def test_a_verdict_is_known_to_spares_also_if_its_node_is_lost(nodes: list[SeveralNodes], board: Board) -> None:
    """It was lost after its first of two writes. The others went on with the next attempt, and a node that joined them
    waited in the attempt before: neither began, and the job hung."""
    nodes[0]._membership.claim("0/verdict", "go on")
    assert nodes[1].verdict(None) == "go on"
    assert board.job_keys["verdict/this"] == "go on"


def test_a_node_that_is_taken_for_lost_puts_no_old_verdict(nodes: list[SeveralNodes], board: Board) -> None:
    nodes[0]._membership.claim("0/verdict", "of attempt 0")
    board.job_keys["verdict/this"] = "of attempt 2"
    poll = nodes[1]._poll

    def late(*arguments):
        nodes[1].lost.add(nodes[1].node)  # as `_poll` notes, where the others have begun another round
        return poll(*arguments)

    nodes[1]._poll = late  # type: ignore[method-assign]
    nodes[1].verdict(None)
    assert board.job_keys["verdict/this"] == "of attempt 2"


def test_a_report_longer_than_a_value_of_the_store_arrives_whole(nodes: list[SeveralNodes], board: Board) -> None:
    """torch's store ends the connection that sends it 9 MiB, so a report with notes of ranks ended the job."""
    long = "".join(map(str, range(400_000)))
    assert nodes[2].reports(long) is None and nodes[1].reports("of 1") is None
    assert nodes[0].reports("of 0") == {0: "of 0", 1: "of 1", 2: long}
    assert max(map(len, board.keys.values())) <= 1 << 20 < len(long)


def test_a_node_that_sends_or_reads_a_long_report_shows_signs_of_life(board: Board) -> None:
    """What eight ranks had noted took a minute on its way, in which the others took both nodes for lost."""
    member, shown, long = Member(board, 0), list[int](), 3_000_000 * "x"
    long_values.put(member, "key", long, lambda: shown.append(1))  # type: ignore[arg-type]
    assert long_values.read(member, "key", board.keys["key"], lambda: shown.append(2)) == long  # type: ignore[arg-type]
    assert shown == [1, 1, 1, 2, 2, 2]


def test_a_lost_node_is_not_awaited_and_the_next_one_decides_for_it(nodes: list[SeveralNodes]) -> None:
    assert nodes[2].reports("of 2") is None
    assert nodes[1].reports("of 1") is None and nodes[1].verdict(None) is None, "node 0 is silent"
    assert nodes[1].reports("of 1") == {1: "of 1", 2: "of 2"}
    assert nodes[1].lost_text() == (0, "node 0 (host0): no sign of life for 0 s")
    assert nodes[1].verdict("without 0") == nodes[2].verdict(None) == "without 0"


def test_a_node_that_was_stopped_decides_nothing_when_it_comes_back(nodes: list[SeveralNodes]) -> None:
    """A node of which all others had lost sight decided about the attempt a second time, and recorded it twice."""
    nodes[1].over(Notice(kind="lost", lost=[0]))
    nodes[2].reports("of 2")
    assert nodes[2].notice(10.0**9, []) == Notice(kind="lost", lost=[0])
    assert nodes[1].reports("of 1") == {1: "of 1", 2: "of 2"}
    assert nodes[1].verdict("without 0") == "without 0"
    assert nodes[0].reports("of 0") is None and not nodes[0].excluded, "the verdict stands"
    assert nodes[0].verdict(None) == "without 0"


def test_a_node_that_the_others_take_for_lost_joins_anew(nodes: list[SeveralNodes]) -> None:
    nodes[1].over(Notice(kind="lost", lost=[0]))
    assert nodes[0].reports("of 0") is None and nodes[0].verdict(None) is None and nodes[0].excluded


def test_a_node_that_follows_one_it_took_for_lost_begins_with_it(nodes: list[SeveralNodes]) -> None:
    """The node that decides stalled for 10 s and came back with its verdict. Another one, which had begun to decide in
    its place, still took it for lost in the next attempt: both published an address, and the ranks waited at two."""
    assert nodes[2].reports("of 2") is None
    assert nodes[1].reports("of 1") is None and nodes[1].verdict(None) is None, "node 0 is silent"
    assert nodes[0].reports("of 0") is not None and nodes[0].verdict("stay") == "stay"
    assert nodes[1].reports("of 1") is None and nodes[1].verdict(None) == "stay"
    first, second = nodes[0].begin(1), nodes[1].begin(1)
    assert isinstance(first, Placement) and isinstance(second, Placement)
    assert (first.address, first.port) == (second.address, second.port)


def test_a_node_that_the_others_take_for_lost_begins_nothing(nodes: list[SeveralNodes]) -> None:
    nodes[1].over(Notice(kind="lost", lost=[0]))
    assert nodes[0].reports("of 0") is None and nodes[0].excluded
    assert nodes[0].begin(1) == Notice(kind="lost", lost=[0]) and nodes[0].excluded


def test_a_node_that_was_stopped_while_it_joined_ends_no_newer_round(
    nodes: list[SeveralNodes], board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It noted its old round as the newest one, so all nodes of the newer one took themselves for excluded and left."""
    board.job_keys["round"] = newer = "000000000002 of the others"
    monkeypatch.setattr(Board, "order", 1)
    del board.keys["token"]
    nodes[0].join("this")
    assert board.job_keys["round"] == newer
    assert nodes[0].begin(0) and nodes[0].notice(10.0**9, []) == Notice(kind="lost", lost=[0])


def test_reports_of_old_attempts_are_deleted_from_the_store(nodes: list[SeveralNodes], board: Board) -> None:
    """They stayed as long as the round: a job that started again for weeks filled the memory of that node."""
    for number in range(3):
        nodes[2].reports((long_values.PIECE_CHARACTERS + 1) * "x")
        nodes[1].reports("of 1")
        assert nodes[0].reports("of 0") is not None
        assert [one.verdict("stay" if one is nodes[0] else None) for one in nodes] == ["stay"] * 3
        for one in nodes[:2] if number == 2 else nodes:
            one.begin(number + 1)
    left = sorted(one for one in board.keys if "/report/" in one)
    assert left == [
        "1/report/2",  # whose node has not begun the next attempt yet
        "1/report/2/0",
        "1/report/2/1",
        "2/report/0",
        "2/report/1",
        "2/report/2",
        "2/report/2/0",
        "2/report/2/1",
    ]


def test_a_node_that_was_stopped_while_it_read_reads_no_part_of_a_report(
    nodes: list[SeveralNodes], board: Board
) -> None:
    """A report whose pieces the others have deleted since, because another node has decided."""

    class Stopped(Member):
        def read(self, keys: Sequence[str], job: bool = False) -> list[str | None]:
            if keys == ["0/report/2/1"]:
                long_values.drop(self, "0/report/2")  # type: ignore[arg-type]
                board.keys["0/verdict"] = "without 0"
            return super().read(keys, job)

    nodes[2].reports((long_values.PIECE_CHARACTERS + 1) * "x")
    nodes[1].reports("of 1")
    nodes[0]._membership = Stopped(board, 0)  # type: ignore[assignment]
    assert nodes[0].reports("of 0") is None and nodes[0].verdict(None) == "without 0"


def test_the_lost_node_is_the_cause_and_not_the_ranks_that_lost_it() -> None:
    follower = Ended(0, 1.0, 1, "RuntimeError: Connection closed by peer")
    lived = Lived(0.0, ended=[follower], lost=(2, "node 1 (h): no sign of life"))
    cause = reported.cause(lived)
    assert cause is not None and (cause.kind, cause.rank) == ("node", 2)
    lived.ended.append(Ended(1, 2.0, 1, "ValueError: a bad batch"))
    cause = reported.cause(lived)
    assert cause is not None and (cause.kind, cause.rank) == ("exception", 1)


def a_life(rank: int, silent_seconds: float, folder: Path, idle: bool = False) -> Lived:
    """Of a node whose only rank has aborted at 1000 s, silent for so long; or goes on, and has done nothing."""
    page = folder / str(rank)
    heartbeat.create(str(page))
    sign = 1000.0 - silent_seconds
    shown = heartbeat.read(str(page))._replace(rank=rank, step=7, first=1.0, sign=sign, longest_seconds=2.0)
    stuck = Stuck(Signs(rank, sign, "step", 7), "S", ['File "train.py", line 3 in load'])
    life = Lived(0.0, failed=1000.0, over=1001.0, progress=[shown])
    if idle:
        life.suspected = Hang(stuck, None, {rank: "load"})
    else:
        life.ended = [Ended(rank, 1000.0, -signal.SIGABRT)]
    return life


@pytest.mark.parametrize(("aborts", "silent", "hangs"), [(1, 600.0, True), (1, 3.0, False), (2, 3.0, True)])
def test_aborts_of_all_nodes_show_whether_a_rank_hangs(tmp_path: Path, aborts: int, silent: float, hangs: bool) -> None:
    """Each node counted its own aborts, so with one rank a node the first that had waited was blamed; and of two ranks
    the one that had waited, although the steps of both showed no progress for ten minutes."""
    lives = [*(a_life(rank, silent, tmp_path) for rank in range(aborts)), a_life(aborts, silent, tmp_path, idle=True)]
    reports = {node: merged.decoded(merged.encoded("h", False, one)) for node, one in enumerate(lives)}
    cause = reported.cause(merged.merged(reports, None))
    assert cause is not None
    assert (cause.kind, cause.rank) == (("hang", aborts) if hangs else ("signal", 0))


def test_a_rank_that_is_ahead_of_one_that_aborted_does_not_hang(tmp_path: Path) -> None:
    aborted, idle = a_life(0, 600.0, tmp_path), a_life(1, 600.0, tmp_path, idle=True)
    aborted.progress = [one._replace(step=6) for one in aborted.progress]
    reports = {0: merged.Report(host="h", asked=False, lived=aborted)}
    reports[1] = merged.Report(host="h", asked=False, lived=idle)
    assert merged.merged(reports, None).hang is None


def test_a_signal_without_a_name_is_a_cause_too() -> None:
    """A rank that was killed by a real-time signal ended `lastgood run` with a ValueError."""
    cause = reported.cause(Lived(0.0, ended=[Ended(1, 1.0, -40)]))
    assert cause is not None and (cause.what, cause.key) == ("signal 40", "signal signal 40")


@pytest.mark.parametrize(
    ("by", "first"),
    [
        (signal.SIGTERM, Ended(1, 1.0, -signal.SIGTERM)),
        (signal.SIGINT, Ended(1, 1.0, -signal.SIGINT, "KeyboardInterrupt")),
        (signal.SIGINT, Ended(1, 1.0, 1)),
        (signal.SIGHUP, Ended(1, 1.0, -signal.SIGHUP)),
    ],
)
def test_a_rank_that_ended_as_it_was_asked_to_has_not_failed(by: int, first: Ended) -> None:
    """The report of a job that was asked to end read: rank 1 failed first: SIGTERM."""
    assert reported.cause(Lived(0.0, ended=[first], asked_by=by)) is None
    assert reported.cause(Lived(0.0, ended=[first])) is not None, "nobody has asked it to"
    error = Ended(0, 0.5, 1, "ValueError: a bad batch")
    cause = reported.cause(Lived(0.0, ended=[first, error], asked_by=by))
    assert cause is not None and cause.what == error.error


def test_a_job_that_was_asked_to_end_is_not_done() -> None:
    """Lightning ends with code 0 at SIGTERM. `lastgood run` did too: "the job is done", so it was not queued again."""
    ended = [Ended(0, 1.0, 0), Ended(1, 1.0, 0)]
    assert reported.outcome(Lived(0.0, ended=ended), None).code == 0
    assert reported.outcome(Lived(0.0, ended=ended, asked_by=signal.SIGTERM), None).code == -signal.SIGTERM
    saved = [Ended(0, 1.0, PREEMPTED), Ended(1, 1.0, 0)]
    assert reported.outcome(Lived(0.0, ended=saved, asked_by=signal.SIGTERM), None).code == PREEMPTED


def test_a_rank_that_ends_early_with_code_0_is_the_cause() -> None:
    """One rank called os._exit(0) in the middle of the training. The report named the other one, which had only lost
    its connection; while a rank waited for it, the report of the hang did not say that it was gone."""
    left, lost = Ended(1, 1.0, 0), Ended(0, 2.0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:28084.")
    cause = reported.cause(Lived(0.0, ended=[lost, left], stacks={0: "line 7"}))
    assert cause is not None and (cause.rank, cause.key, cause.stack) == (1, "exit exit code 0", "line 7")
    assert cause.what == f"exit code 0 while rank 0 went on, which then failed: {lost.error}"
    soon = reported.cause(Lived(0.0, ended=[lost, Ended(1, 2.1, 0)]))
    assert soon is not None and soon.rank == 1, "a process closes its connections before its end is noticed"
    late = reported.cause(Lived(0.0, ended=[lost, Ended(1, 3.0, 0)]))
    own = reported.cause(Lived(0.0, ended=[left, Ended(0, 2.0, 1, "ValueError: a bad batch")]))
    upload = reported.cause(Lived(0.0, ended=[left, Ended(0, 200.0, 1, "ReadTimeout: Read timed out.")]))
    asked = reported.cause(Lived(0.0, ended=[lost, left], asked_by=signal.SIGINT))
    assert all(one is not None and one.rank == 0 for one in (late, own, upload, asked))
    hang = Hang(Stuck(Signs(0, 1.0, "step", 5)), None, {})
    hung = reported.cause(Lived(0.0, ended=[left], hang=hang))
    assert hung is not None and hung.rank == 0 and hung.what.endswith("; rank 1 had ended with exit code 0")


def test_a_long_cause_ends_between_its_words() -> None:
    """It ended in the middle of a word, as in: expected scalar typ..."""
    text = "RuntimeError: " + " ".join(f"word{number}" for number in range(100))
    cut = reported.short(text)
    assert len(cut) <= reported.LINE_CHARACTERS + 4 and text.startswith(cut.removesuffix(" ...") + " word")
    assert reported.short(200 * "x") == 160 * "x" + "..."
    assert reported.short("RuntimeError: \n\n  Sizes differ.") == "RuntimeError: Sizes differ"
    assert reported.short("RuntimeError: Sizes differ.\nMore") == "RuntimeError: Sizes differ"


def test_a_cause_with_a_list_shows_that_it_goes_on() -> None:
    """Of a run of which each generation is damaged, the report had the newest one, as if it was the only one, and went
    on in the middle of its sentence: differs from its digest., before a state was restored."""
    listed = "NothingGood: no generation of this run is good:\n  step 2: a differs from its digest.\n  step 1: b too."
    assert reported.short(listed).endswith("is good: step 2: a differs from its digest ...")


def test_an_error_brings_no_control_characters_into_the_report() -> None:
    """A message with colours changed those of the terminal, and one with a zero byte made a log a binary file."""
    assert reported.short("ValueError: \x1b[31mred\x1b[0m\x00, größer") == "ValueError:  [31mred [0m , größer"


def test_the_step_of_a_failure_is_that_of_the_rank_that_failed(tmp_path: Path) -> None:
    """A rank raised after its backward pass, while the other one completed the step: the batches of the next step were
    left out, which had not failed."""
    lived = Lived(0.0, ended=[Ended(0, 1.0, 1, "AssertionError: loss")])
    for rank, (step, window) in enumerate([(49, 49), (50, 50)]):
        page = str(tmp_path / str(rank))
        heartbeat.create(page)
        beat = heartbeat.Heartbeat(page)
        beat.opened("run")
        beat.restored(step, position=heartbeat.Position(0, window, 1))
        lived.progress.append(heartbeat.read(page)._replace(rank=rank))
    cause = reported.cause(lived)
    found = reported.outcome(lived, cause)
    assert found.last_step == 49 and found.batches_known
    lived.progress.reverse()
    assert reported.outcome(lived, cause) == found
    lived.ended.clear()
    assert reported.outcome(lived, None).last_step == 50


def test_a_run_has_no_position_of_the_run_before_it(tmp_path: Path) -> None:
    """A script trained with a sampler, closed its run and opened a second one without. A failure of that one counted as
    one after the end of its loop, so the job was given up, and no generation was stepped back."""
    page = str(tmp_path / "page")
    heartbeat.create(page)
    beat = heartbeat.Heartbeat(page)
    beat.opened("first")
    beat.restored(5, position=heartbeat.Position(1, 3, 1))
    beat.ended()
    beat.released()
    second = heartbeat.own({heartbeat.VARIABLE: page})
    assert second is not None
    second.opened("second")
    second.restored(10)
    second.beat(12)
    lived = Lived(0.0, ended=[Ended(0, 1.0, 1, "ValueError: a bad state")], progress=[heartbeat.read(page)])
    found = reported.outcome(lived, reported.cause(lived))
    assert not found.after_loop and not found.batches_known and found.last_step == 12


@pytest.mark.parametrize(("failed", "restored_step"), [(0, 40), (1, None)])
def test_a_rank_that_only_serves_the_others_restores_nothing(
    tmp_path: Path, failed: int, restored_step: int | None
) -> None:
    """One rank served data and opened no run. A NameError of the other one, after saves, was one before any restore:
    the job was given up, and `lastgood attempts` showed no steps."""
    lived = Lived(0.0, ended=[Ended(failed, 1.0, 1, "NameError: name 'x' is not defined")])
    for rank in (0, 1):
        page = str(tmp_path / str(rank))
        heartbeat.create(page)
        if rank == 0:
            beat = heartbeat.Heartbeat(page)
            beat.opened("run")
            beat.restored(40)
        lived.progress.append(heartbeat.read(page)._replace(rank=rank))
    assert reported.outcome(lived, reported.cause(lived)).restored_step == restored_step


@pytest.mark.parametrize("ended", [True, False])
def test_an_attempt_shows_whether_its_loop_had_ended(tmp_path: Path, ended: bool) -> None:
    page = str(tmp_path / "page")
    heartbeat.create(page)
    beat = heartbeat.Heartbeat(page)
    beat.restored(4, position=heartbeat.Position(1, 0, 1))
    if ended:
        beat.ended()
    lived = Lived(0.0, ended=[Ended(0, 1.0, 1, "ValueError: export")], progress=[heartbeat.read(page)._replace(rank=0)])
    assert reported.outcome(lived, reported.cause(lived)).after_loop == ended


def test_a_node_that_comes_later_has_the_verdict_of_its_job(nodes: list[SeveralNodes]) -> None:
    for one in (1, 2):
        nodes[one].reports(f"of {one}")
    assert nodes[0].reports("of 0") is not None and nodes[0].verdict("go on") == "go on"
    assert nodes[0].join("this") == "go on"


def test_a_node_without_which_the_others_go_on_joins_anew(board: Board, nodes: list[SeveralNodes]) -> None:
    """A node was suspended for long; torch took it out of the round, and a new node began the job a second time."""
    board.job_keys["round"] = "of the others"
    found = nodes[0].notice(10.0**9, [])
    assert found is not None and found.kind == "lost" and nodes[0].excluded


def test_a_job_that_was_suspended_loses_no_node(nodes: list[SeveralNodes]) -> None:
    assert nodes[0].notice(10.0**9, []) is None and nodes[0].notice(10.0**9 + 0.3, []) is None
    assert nodes[0].notice(10.0**9 + 0.6, []) is not None, "but a node that goes on being silent is lost"


def test_a_dead_node_is_lost_also_where_each_answer_of_the_store_is_slow(
    board: Board, nodes: list[SeveralNodes]
) -> None:
    """Each wait for a slow store looked as if this node had been suspended, so it began to wait for the others anew."""
    now, found = time.monotonic(), list[Notice | None]()
    for polls in range(1, 10):
        now += 0.9 * TIMEOUT_SECONDS + POLL_SECONDS
        board.keys["alive/2"] = f'{{"count":{polls}}}'
        found.append(nodes[0].notice(now, []))
    assert found[0] is None, "it may have been suspended"
    assert {tuple(one.lost) for one in found if one is not None} == {(1,)}


def test_a_node_that_was_stopped_after_an_attempt_waits_for_the_others(
    board: Board, nodes: list[SeveralNodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had seen nothing of them for longer than a node may be silent, and took them for lost at once."""
    later = time.monotonic() + 100.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    nodes[1].reports("of 1")
    post = threading.Timer(0.1, board.keys.update, [{"0/report/2": "of 2"}])
    post.start()
    assert nodes[0].reports("of 0") == {0: "of 0", 1: "of 1", 2: "of 2"}
    post.join()


def test_an_error_of_many_megabytes_is_cut_off_in_verdicts() -> None:
    """Each verdict has the errors of all attempts, and torch's store ends the connection that sends it 9 MiB."""
    lived = Lived(0.0, ended=[Ended(0, 1.0, 1, "ValueError: " + 9_000_000 * "x")])
    found = reported.outcome(lived, reported.cause(lived))
    assert found.error.startswith("ValueError: xx") and len(found.error) == reported.ERROR_CHARACTERS


def test_one_node_reports_each_change_of_the_spare_nodes_once(
    board: Board, nodes: list[SeveralNodes], caplog: pytest.LogCaptureFixture
) -> None:
    found = list[list[str]]()
    for reserve in (0, 0, 1, 1, 2, None):
        board.waiters = Waiters(joining=0, reserve=reserve)
        for one in nodes:
            assert one.begin(0) and one.notice(time.monotonic() + 10.0, []) is None
        found.append([one.removeprefix("spare nodes in reserve: ") for one in caplog.messages])
        caplog.clear()
    assert found == [
        ["0 of 1 expected; start 1 more node with the same command"],
        [],
        ["1 of 1 expected"],
        [],
        ["2 of 1 expected; 1 more than expected, also kept in reserve"],
        ["not known, this version of torch does not show them"],
    ]
    assert nodes[0].spares == Spares(waiting=None, expected=1)


def test_a_node_in_reserve_takes_the_place_of_one_that_leaves(board: Board, nodes: list[SeveralNodes]) -> None:
    """A node was asked to end, and the job ended with it: torch does not count nodes in reserve as waiting."""
    assert nodes[0].next_round([2]).act == "end"
    board.waiters = Waiters(joining=0, reserve=1)
    assert nodes[0].next_round([2]).act == "join"


def test_a_signal_while_ranks_are_ended_asks_once_and_a_warning_is_kept(nodes: list[SeveralNodes]) -> None:
    """A SIGTERM that came while the ranks of an attempt were ended counted as the second one: the node left before it
    had its verdict, and was taken for lost. A SIGUSR1 was lost to the ranks of the next attempt."""
    asked = nodes[1]._signals
    asked.received(signal.SIGUSR1, None)
    asked.ask_to_end()
    assert nodes[1].reports("of 1") is None and nodes[1].verdict(None) is None, "node 0 is silent"
    assert asked.taken() == [signal.SIGUSR1]
