"""Retention by example: what stays although nobody would miss it in most runs. Rules for all runs: test_plan.py."""

from __future__ import annotations

from lastgood.plan.retention import Keep, surplus
from test_plan import at, generation


def test_where_too_few_are_verified_the_newest_unread_ones_stay_in_their_place():
    """Verification has not kept pace: one is known to be good, and three were promised."""
    row = [generation(50, verified=True), *(generation(step) for step in (40, 30, 20, 10))]
    assert surplus(Keep(last=3), row, []) == [at(10), at(20)]
    assert surplus(Keep(last=1), row, []) == [at(10), at(20), at(30), at(40)]


def test_the_best_that_was_read_stays_beside_a_better_one_that_nobody_has_read():
    row = [
        generation(40, verified=True, metrics={"loss": 9.0}),
        generation(30, metrics={"loss": 1.0}),
        generation(20, verified=True, metrics={"loss": 2.0}),
        generation(10, verified=True, metrics={"loss": 3.0}),
    ]
    assert surplus(Keep(last=1, best=("loss", "min", 1)), row, []) == [at(10)]
