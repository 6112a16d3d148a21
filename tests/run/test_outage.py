"""Copies that fail, attempt after attempt, and what is reported of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import lastgood
from harness import reports
from lastgood.errors import LastgoodError, NoSpace, PeerDown, TierDown
from lastgood.records import Generation
from lastgood.run import lower_place
from lastgood.run.node_copies import NodeCopies

STATE = {"w": torch.zeros(3)}
DOWN = "the connection to b (127.0.0.1:{}) failed: Connection refused"
RESET = "the connection to b (127.0.0.1:{}) failed: Connection reset by peer"
EXPIRED = "the connection to b (127.0.0.1:{}) failed: certificate has expired"


class Scripted:
    """A `node_copies.Maker` whose attempts end with these errors, one after another (None: the copies are made)."""

    place = "peers://node"

    def __init__(self, ends: Iterable[LastgoodError | None]) -> None:
        self._ends = iter(ends)

    def make(self, generation: Generation, stop: object) -> None:
        if (failed := next(self._ends)) is not None:
            raise failed

    def outlives(self, generation: Generation) -> bool:
        return False

    def end(self) -> None:
        """No other rank waits."""


def copies_of(ckpt: lastgood.Checkpointer, ends: Iterable[LastgoodError | None]) -> NodeCopies:
    return NodeCopies(ckpt._pipeline.run.known, lambda _: Scripted(ends), ckpt._pipeline.outcomes)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause is made before the next attempt."""
    monkeypatch.setattr(lower_place, "PAUSES_SECONDS", (0.0,))


def test_each_cause_of_missing_copies_on_nodes_is_reported_once(tmp_path: Path, at_once: None) -> None:
    """An agent was down, which was reported. It had no valid certificate when it was started again: 180 saves got no
    copies, and neither a report nor an event said why."""
    causes = [DOWN, DOWN, RESET, EXPIRED, DOWN, EXPIRED, DOWN]
    ends = [PeerDown(one.format(port)) for port, one in enumerate(causes)]
    events = list[lastgood.Event]()
    with reports() as texts, lastgood.Checkpointer(tmp_path, STATE, on_event=events.append) as ckpt:
        ckpt._pipeline.places.copies = copies_of(ckpt, [*ends[:-1], None, ends[-1], None])
        for step in (1, 2):
            save = ckpt.save(step)
            save.committed()
            (copied,) = save.copies_on_nodes().values()
            assert copied.result(60) is None
    named = [one.what for one in ends if any(one.what in text for text in texts)]
    assert named == [DOWN.format(0), RESET.format(2), EXPIRED.format(3), DOWN.format(6)], "the last is another outage"
    details = [one.detail for one in events if one.kind == "not_copied"]
    assert details == [f"peers://node: PeerDown: {one.what}" for one in ends]
    assert not any("has no copies" in one for one in texts), "they are there at last"


def test_each_cause_of_missing_copies_below_is_reported_once(tmp_path: Path, at_once: None, monkeypatch) -> None:
    """A place was down for a moment, and full from then on: the first was reported, and the second never."""
    failures, complete = iter([TierDown("no answer"), NoSpace("it is full")] * 3), lower_place.copying.complete

    def fails(*of: object) -> None:
        for failed in failures:
            raise failed
        complete(*of)

    monkeypatch.setattr(lower_place.copying, "complete", fails)
    tier = lastgood.Tier(tmp_path / "front", cadence=lastgood.Every(steps=1))
    with reports() as texts, lastgood.Checkpointer(tmp_path / "last", STATE, tiers=[tier]) as ckpt:
        ckpt.save(1).result(60)
    assert [sum(what in one for one in texts) for what in ("no answer", "it is full")] == [1, 1]


@pytest.mark.parametrize(
    ("made", "newest"),
    [(0, "nor any since the opening"), (1, "step 1 is the newest that has")],
    ids=["none", "one"],
)
def test_the_closing_line_names_a_save_without_copies(tmp_path: Path, made: int, newest: str) -> None:
    """It did not appear: the newest step was durable, and the last 170 saves had no copies on other nodes."""
    down = itertools.repeat(PeerDown(DOWN.format(4711)))
    with reports() as texts, lastgood.Checkpointer(tmp_path, STATE) as ckpt:
        ckpt._pipeline.places.copies = copies_of(ckpt, itertools.chain([None] * made, down))
        for step in (1, 2):
            ckpt.step(step)
            ckpt.save(step).committed()
            ckpt.wait()
    assert texts[-1] == (
        f"{tmp_path}: newest durable step 2 of 2; step 2 is not known to have copies or parity on other nodes, {newest}"
    )
