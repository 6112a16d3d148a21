"""The nodes of a job, as the supervisor of one of them sees the others.

    join      the nodes of a round know each other: host, number of ranks, which is node 0
    begin     node 0 publishes the address at which the ranks of an attempt find each other
    notice    during an attempt: whether it is over on another node, or a node is lost
    reports   after an attempt: one node receives what all nodes report, and decides
    verdict   every node receives the same decision

Keys, in torch's store of the round; N is the number of the attempt, K of a node:

    node/K      NodeInfo            alive/K     a counter, and what the ranks of the node show
    N/master    address and port    N/over      why the attempt is over, set once
    N/report/K  the report          N/verdict   the decision, set once          N/received/K  it was received
    N/report/K/I  a piece of it, if it is long    agreed/K  K begins the round    refused/K  the nodes have no order
    token       names the round, set once       of all rounds:  round  the newest token    verdict/JOB  the decision

Invariants
  1. All nodes follow the same verdict, because it is set once.
  2. A node is lost once it has shown no new counter for `timeout_seconds` by the clock of another one. No clocks are
     compared. A long time in which that one has not looked counts as a quarter of this.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import msgspec

from .. import reporting
from ..errors import Cancelled, Refused, TierDown
from ..policy import membership as policy
from ..policy.hang import Signs
from ..records import Record
from . import long_values
from .membership import Joined, Membership, StoreLost
from .moves import Carried, Moves, lost_text
from .placement import NodeInfo, Notice, Placement, free_port, order, reached
from .signals import Signals

POLL_SECONDS = 0.25
"""how often the store is asked during an attempt, and while other nodes are waited for"""
WAITING_SECONDS = 5.0
"""how often it is asked whether more nodes wait"""
RECEIVED_SECONDS = 5.0
"""How long a node waits at its end until all others know why: the store may end with it."""
WAITERS_SECONDS = 1.5
"""How long it stays after that for nodes that wait in reserve: torch asks the store once a second."""


class Alive(Record, frozen=True, kw_only=True):
    """A sign of life. `signs`: of its ranks; `since` is the age in seconds there, because clocks differ."""

    count: int
    signs: list[Signs] = msgspec.field(default_factory=list)


class SeveralNodes:
    """This node among those of its job.

    `membership`: the process that holds it. `bounds`: how many nodes the job has. `info`: this node. `timeout_seconds`:
    without a sign of life, after which a node is lost. `signals`: end each wait.
    """

    def __init__(
        self, membership: Membership, bounds: policy.Bounds, info: NodeInfo, timeout_seconds: float, signals: Signals
    ) -> None:
        self._membership, self._bounds, self._info, self._moves = membership, bounds, info, Moves(membership)
        self._timeout_seconds, self._signals = timeout_seconds, signals
        self.infos = list[NodeInfo]()
        """of all nodes of the round, by number"""
        self.node = 0
        """number of this node in the round"""
        self.lost = set[int]()
        """nodes that do not answer"""
        self._number, self._count, self._token = 0, 0, ""
        self.job = ""
        """an id of the job, the same on all nodes of the round"""
        self._seen = dict[int, tuple[str, float]]()
        """node -> its newest sign of life, and when it came"""
        self._next = self._polled = self._next_alive = self._next_waiting = self._next_others = 0.0
        self._others = list[Signs]()
        self.spares: policy.Spares | None = None
        """the nodes in reserve, as this node has last seen them; None: none are expected, or it has not looked"""
        self._spares_text = ""
        """what was reported about them last"""
        self._grows = False
        """whether this attempt ends so that more nodes can join"""
        self._asked = False
        """whether this node was asked to end during the attempt"""
        self._carried: Carried | None = None
        """an attempt that was lived before the store moved, until its verdict stands; None: there is none"""

    # ---- a round -------------------------------------------------------------------------------------------

    def join(self, job: str) -> str | None:
        """Join the next round. Returns the newest verdict of the nodes that were there before; None: there is none.

        `job`: an id of the job, as this node knows it. Verdicts of another job with the same --rdzv-id are not taken.

        Raises Refused if two nodes claim the same --node-rank, and what `Membership.join` raises.
        """
        while True:
            with contextlib.suppress(StoreLost):
                return self._join(job)

    def _join(self, job: str) -> str | None:
        infos, until, again = None, time.monotonic() + self._membership.join_seconds, False
        while infos is None:
            joined = self._membership.join(self._moves.past, again)
            past = self._moves.joined(joined)
            mine = msgspec.structs.replace(
                self._info, address=joined.address, job=job, holds_store=joined.holds_store, past=past
            )
            self._membership.put({f"node/{joined.node}": _encoded(mine)})
            shown = self._of_all("node", joined.nodes)
            infos = None if shown is None else [msgspec.json.decode(one, type=NodeInfo) for one in shown]
            if infos is not None and self._membership.moves and not self._agreed(joined, infos, until, again):
                infos, again = None, True
        reporting.info(f"takes part, as one of {joined.nodes} nodes")
        self.infos, self.node, self.lost = infos, joined.node, set()
        try:
            ordered = order(infos)
        except Refused:
            self._await_others("refused")
            raise
        self.infos, self.node = [infos[one] for one in ordered], ordered.index(joined.node)
        carried = self._moves.carried(infos)
        self._token = self._membership.claim("token", f"{joined.order:012d} {secrets.token_hex(8)}")
        self._membership.raise_to("round", self._token)  # guard: late-join-ends-no-newer-round
        found = self._membership.read([f"verdict/{one.job}" for one in self.infos], job=True)
        belonged = [one for one, info in enumerate(self.infos) if info.past.last is not None]
        known = next((one for one, verdict in enumerate(found) if verdict is not None), min(belonged, default=0))
        self.job, verdict = self.infos[known].job, found[known]
        if carried is not None and carried.verdict is not None and verdict is None:
            verdict = self._membership.claim(f"verdict/{self.job}", carried.verdict, job=True)
        self._carried = carried if carried is not None and carried.infos else None
        if verdict is not None and self._carried is None:
            self._moves.follows(verdict)
        return verdict

    def _agreed(self, joined: Joined, infos: Sequence[NodeInfo], until: float, again: bool) -> bool:
        """Whether all nodes of a round begin it, where the store can move. Raises TierDown."""
        if not self._moves.enough(joined, infos, self._bounds.most):
            if time.monotonic() > until:
                raise TierDown(
                    f"too few nodes of the job came to the store at {self._membership.endpoint}",
                    safe="What was saved is safe. The ranks of this node were ended; others may go on elsewhere.",
                    todo="Start the job again on its nodes, if no others go on.",
                )
            if not again:
                reporting.warning("waits for more nodes of the job, because those may go on without this one")
            self._pause()
            return False
        self._membership.put({f"agreed/{joined.node}": ""})
        if self._of_all("agreed", joined.nodes) is None:
            return False
        return self._moves.agreed(joined)

    @property
    def world(self) -> int:
        """How many ranks all nodes have."""
        return sum(one.ranks for one in self._lived_by)

    @property
    def _lived_by(self) -> list[NodeInfo]:
        """The nodes of the attempt: those of the round, or of one before, at another store."""
        return self.infos if self._carried is None else self._carried.infos

    def touch(self) -> None:
        """Show a sign of life, once this node has joined. Called often; asks the store seldom. Raises TierDown."""
        now = time.monotonic()
        if self.infos and now >= self._next:
            self._next = now + POLL_SECONDS
            self._poll(now, [], [])

    def _of_all(self, key: str, nodes: int) -> list[str] | None:
        """What all nodes of a round have published; None if one does not in time, so that a new round is needed."""
        until = time.monotonic() + 2 * self._timeout_seconds
        while time.monotonic() < until:
            found = self._membership.read([f"{key}/{one}" for one in range(nodes)])
            if None not in found:
                return [one or "" for one in found]
            self._pause()
        return None

    # ---- an attempt ----------------------------------------------------------------------------------------

    def begin(self, number: int) -> Placement | Notice:
        """The place of this node in an attempt; a Notice if the attempt is over before it began. Raises TierDown."""
        self.lost &= {self.node}  # guard: followed-node-is-not-lost
        self._number, self._grows, self._asked, now = number, False, False, time.monotonic()
        self._seen = {one: ("", now) for one in range(len(self.infos))}
        self._next, self._polled, self._next_alive, self._next_others = now, now, 0.0, 0.0
        self._next_waiting = now + WAITING_SECONDS
        if self._carried is not None and self._carried.number == number:  # guard: attempt-before-move-is-decided
            return Notice(kind="moved")
        self._carried = None
        self._moves.begun(number)
        long_values.drop(self._membership, f"{number - 2}/report/{self.node}")  # guard: old-reports-are-deleted
        if self._decides:
            address = self.infos[self.node].address
            port = free_port(address)
            self._membership.put({f"{number}/master": f"{address} {port}"})
            return self._placement(address, port)
        while True:
            found = self._membership.read([f"{number}/master"])[0]
            if found is not None:
                address, _, text = found.rpartition(" ")
                return self._placement(reached(address, self.infos[0], self._membership.endpoint), int(text))
            notice = self.notice(time.monotonic(), [])
            if notice is not None:
                return notice
            self._pause()

    def _placement(self, address: str, port: int) -> Placement:
        self._moves.begun(self._number, self.infos)
        return Placement(self.node, len(self.infos), self._first_rank(self.node), self.world, address, port)

    def _first_rank(self, node: int) -> int:
        return sum(one.ranks for one in self.infos[:node])

    def notice(self, now: float, signs: Sequence[Signs]) -> Notice | None:
        """Why the attempt is over, if it is. Called often; asks the store seldom. `signs`: of the ranks here.

        Raises TierDown.
        """
        if now < self._next:
            return None
        self._next = now + POLL_SECONDS
        over = self._poll(now, [f"{self._number}/over"], signs)[0]
        if over is None and (silent := self._silent()):
            lost = Notice(kind="lost", lost=silent)
            over = self._membership.claim(f"{self._number}/over", _encoded(lost))
        if self.excluded and over is None:
            return Notice(kind="lost", lost=[self.node])
        return self._growing(now) if over is None else self._note_lost(over)

    def _note_lost(self, over: str) -> Notice:
        """Note which nodes the standing notice takes for lost: this one too, if it was stopped for a while."""
        notice = msgspec.json.decode(over, type=Notice)
        self.lost |= set(notice.lost)
        return notice

    def _growing(self, now: float) -> Notice | None:
        """At the node that decides: whether the ranks are to save and end, because more nodes wait."""
        full = len(self.infos) >= self._bounds.most
        if self._grows or not self._decides or now < self._next_waiting or (full and not self._bounds.spares):
            return None
        self._next_waiting = now + WAITING_SECONDS
        self._grows = self._waiting() > 0 and not full
        return Notice(kind="grow") if self._grows else None

    def _waiting(self) -> int:
        """How many nodes wait, in reserve too. What has changed about the spare nodes is reported, once."""
        found, bounds, nodes = self._membership.waiting(), self._bounds, len(self.infos)
        if not bounds.spares:
            return found.known
        if found.reserve is None:
            there, text = None, "spare nodes in reserve: not known, this version of torch does not show them"
        else:
            there = policy.spares_waiting(nodes, found.known, bounds)
            text = policy.spares_text(nodes, found.known, bounds)
        self.spares = policy.Spares(waiting=there, expected=bounds.spares)
        if text != self._spares_text:
            self._spares_text = text
            (reporting.warning if there is None or there < bounds.spares else reporting.info)(text)
        return found.known

    def others(self, now: float) -> list[Signs]:
        """What the ranks of all other nodes showed, by this node's clock. Asks the store seldom. Raises TierDown."""
        if now >= self._next_others:
            self._next_others = now + POLL_SECONDS
            values = self._membership.read([f"alive/{one}" for one in range(len(self.infos)) if one != self.node])
            found = [msgspec.json.decode(one, type=Alive) for one in values if one is not None]
            self._others = [_aged(sign, now) for one in found for sign in one.signs]
        return self._others

    def over(self, notice: Notice) -> None:
        """Publish why the attempt is over here. The first reason stands. Raises TierDown."""
        self._note_lost(self._membership.claim(f"{self._number}/over", _encoded(notice)))

    # ---- after an attempt ----------------------------------------------------------------------------------

    def reports(self, mine: str) -> dict[int, str] | None:
        """Report an attempt. Returns the reports of all nodes, by number, if this node decides; else None.

        A node that shows no sign of life is not waited for. Raises TierDown, and Cancelled if this node is to end; and
        StoreLost where the store can move and most nodes are lost, because those may decide at another store.
        """
        long_values.put(self._membership, f"{self._number}/report/{self.node}", mine, self.touch)
        self._signals.asked_to_end()  # what came while the ranks were ended asks once, not once more
        self._asked = self._signals.end is not None
        while self._decides:
            nodes = [one for one in range(len(self.infos)) if one not in self.lost]
            keys = [f"{self._number}/{one}" for one in ("over", "verdict", *(f"report/{node}" for node in nodes))]
            over, verdict, *found = self._poll(time.monotonic(), keys, [])
            if verdict is not None:  # guard: standing-verdict-is-followed
                return None
            if over is not None and self.node in self._note_lost(over).lost:
                return None
            if self._membership.moves and 2 * len(nodes) < len(self.infos):  # guard: minority-decides-nothing
                raise StoreLost("fewer than half of the nodes are left at this store")
            missing = {node for node, report in zip(nodes, found, strict=True) if report is None}
            if not missing:
                texts = zip(keys[2:], map(str, found), strict=True)
                whole = [long_values.read(self._membership, key, text, self.touch) for key, text in texts]
                if "" not in whole:  # guard: deleted-report-is-not-read
                    return dict(zip(nodes, whole, strict=True))
            self.lost |= missing & {*self._silent()}
            self._pause()
        return None

    def verdict(self, mine: str | None) -> str | None:
        """The decision that all nodes follow. `mine`: that of this node, if it decides.

        Returns None if the node that decides is lost, and this one decides in its place, or if the others take this
        node for lost. Raises TierDown, and Cancelled if this node is to end.
        """
        found = self._standing(mine)
        if found is not None:
            self._carried = None
            self._moves.decided(self._number + 1, found)
            if self._membership.moves:
                self._membership.put({f"{self._number}/received/{self.node}": ""})
        return found

    def _standing(self, mine: str | None) -> str | None:
        key = f"{self._number}/verdict"
        found = None if mine is None else self._membership.claim(key, mine)
        while found is None and self.node not in self.lost:
            found = self._poll(time.monotonic(), [key], [])[0]
            if found is None:
                self.lost |= {policy.leader(len(self.infos), self.lost)} & {*self._silent()}
                if self._decides:
                    return None
                self._pause()
        if found is not None and (mine is not None or self.node not in self.lost):  # guard: old-verdict-stays-old
            # From each node: the one that has decided may be lost before it has put it there.
            with contextlib.suppress(*(() if mine is not None else (TierDown, StoreLost))):
                self._membership.put({f"verdict/{self.job}": found}, job=True)  # guard: spares-know-the-verdict
        return found

    def next_round(self, leaving: Collection[int]) -> policy.Next:
        """What the nodes do if the job is to go on. `leaving`: nodes that were asked to end. Raises TierDown."""
        return policy.next_round(len(self.infos), self.lost, leaving, self._waiting(), self._bounds)

    def lost_text(self) -> tuple[int | None, str] | None:
        """The first rank of the nodes that are lost, and a text about them; no rank: the store was lost, and no node;
        None: none of them."""
        if self._carried is not None:
            return lost_text(self._carried, self.infos, self._membership.endpoint)
        if not self.lost:
            return None
        names = ", ".join(f"node {one} ({self.infos[one].host})" for one in sorted(self.lost))
        return self._first_rank(min(self.lost)), f"{names}: no sign of life for {self._timeout_seconds:.0f} s"

    def of_rank(self, rank: int) -> NodeInfo:
        """The node of a rank of the attempt."""
        nodes = self._lived_by
        return nodes[max(node for node in range(len(nodes)) if sum(one.ranks for one in nodes[:node]) <= rank)]

    @property
    def excluded(self) -> bool:
        """Whether the other nodes have taken this one for lost, so that it joins anew."""
        return self.node in self.lost

    def left(self, nodes: Sequence[int]) -> None:
        """Other nodes end, as they were asked to, and the job goes on without these. `nodes`: their numbers."""
        self._moves.left(nodes)

    def leave(self, last: bool) -> None:
        """This node ends. `last`: so does the job: nodes that wait are to end too, and this one waits until all others
        have the verdict, because the store may end with this node."""
        with contextlib.suppress(TierDown):
            if last:
                self._membership.close()
            else:
                self._moves.leaves(self.node)
        if last or self._membership.moves:
            self._await_others(f"{self._number}/received")
        if last:
            select.select([], [], [], WAITERS_SECONDS)

    def end(self) -> None:
        """End the process that holds the membership."""
        self._membership.end()

    def _await_others(self, key: str) -> None:
        """Wait, not for long, until all other nodes have come here too: the store may end with this node."""
        others = [f"{key}/{one}" for one in range(len(self.infos)) if one not in self.lost]
        until = time.monotonic() + RECEIVED_SECONDS
        with contextlib.suppress(TierDown):  # the node of the store has ended: it had found all others here
            self._membership.put({f"{key}/{self.node}": ""})
            while None in self._membership.read(others) and time.monotonic() < until:
                select.select([], [], [], POLL_SECONDS)

    # ---- signs of life -------------------------------------------------------------------------------------

    @property
    def _decides(self) -> bool:
        return self.node not in self.lost and self.node == policy.leader(len(self.infos), self.lost)

    def _poll(self, now: float, keys: list[str], signs: Sequence[Signs]) -> list[str | None]:
        """Show a sign of life, read those of the nodes that this one watches, and read keys."""
        gap, most = now - self._polled, self._timeout_seconds / 4
        if gap - POLL_SECONDS > 2 * most:  # guard: suspended-node-blames-nobody
            # A part of it counts: where each answer of the store takes so long, a lost node would never be found.
            self._seen = {one: (value, at + gap - most) for one, (value, at) in self._seen.items()}
        self._polled = now
        if now >= self._next_alive:
            self._next_alive = now + self._timeout_seconds / 10
            self._count += 1
            shown = [_aged(sign, now) for sign in signs]
            self._membership.put({f"alive/{self.node}": _encoded(Alive(count=self._count, signs=shown))})
        watched = policy.watched(self.node, len(self.infos), self.lost)
        values = self._membership.read([*keys, *(f"alive/{one}" for one in watched)])
        for node, value in zip(watched, values[len(keys) :], strict=True):
            if value is not None and value != self._seen[node][0]:
                self._seen[node] = (value, now)
        # A node that was suspended for long is no participant for torch any more: the others may be in a new round.
        if self._membership.read(["round"], job=True)[0] != self._token:  # guard: suspended-node-joins-anew
            self.lost.add(self.node)
        return values[: len(keys)]

    def _silent(self) -> list[int]:
        watched = policy.watched(self.node, len(self.infos), self.lost)
        return policy.silent({one: self._seen[one][1] for one in watched}, self._polled, self._timeout_seconds)

    def _pause(self) -> None:
        """Wait before the store is asked again. Raises Cancelled if this node is asked to end; if it was asked already
        during the attempt, of which the verdict is still to come: if it is asked once more."""
        select.select([self._signals.descriptor], [], [], POLL_SECONDS)
        again = self._signals.asked_to_end()
        if self._signals.end is not None and (again or not self._asked):
            raise Cancelled("the job was asked to end")


def _aged(sign: Signs, now: float) -> Signs:
    """With its age in place of the time of its newest sign of life, or the other way round."""
    return replace(sign, since=None if sign.since is None else now - sign.since)


def _encoded(record: Record) -> str:
    return msgspec.json.encode(record).decode()
