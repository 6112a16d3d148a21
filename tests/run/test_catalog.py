"""The catalog of a run in an object store: few requests at an opening, and never another answer than without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import lastgood
from lastgood.engine.inline_executor import Inline
from lastgood.format import catalog, commit, layout
from lastgood.policy.retention import Keep
from lastgood.run import access, writer
from lastgood.run.writer import RunWriter
from lastgood_lab.object_faults import FaultyProxy
from lastgood_lab.object_server import ObjectServer

pytestmark = pytest.mark.slow

ALL = Keep(last=1, every=1)


@pytest.fixture
def proxy(object_server: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(object_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def train(bucket: str, steps: int) -> None:
    with lastgood.Checkpointer(bucket, {"w": np.arange(8.0), "n": 0}, retention=ALL) as ckpt:
        for step in range(ckpt.restore().step + 1, steps + 1):
            ckpt.save(step).result()
        ckpt.wait()


def without_catalog(bucket: str) -> commit.Survey:
    """What the run holds, from its records alone."""
    tier = access.for_reading(bucket)
    tier.delete(catalog.NAME)
    return commit.survey(tier)


def test_requests_of_an_opening_do_not_grow_with_the_generations(bucket, proxy):
    counted = {}
    for steps in (40, 120):
        train(bucket, steps)
        proxy.clear()
        assert lastgood.open(bucket).generation().step == steps
        reading = len(proxy.requests)
        proxy.clear()
        with lastgood.Checkpointer(bucket, {"w": np.arange(8.0), "n": 0}, retention=ALL) as ckpt:
            assert ckpt.latest() == steps
            counted[steps] = reading, len(proxy.requests)
    few = 2 * writer.CATALOG_LEAST + 8  # so many may be newer than the catalog; claims and incarnations come and go
    assert all(many <= less + few for less, many in zip(counted[40], counted[120], strict=True)), counted


def test_a_run_is_the_same_with_its_catalog_and_without_it(bucket):
    """Generations were marked, labelled, deleted and added after the catalog was written."""
    train(bucket, 30)
    with access.for_writing(bucket, "atomic_dirsync") as tier:
        known = commit.survey(tier).generations
        first, second, third, fourth, *_ = (known[at] for at in sorted(known))
        commit.label(tier, first, True, {"loss": 1.0})
        commit.retire(tier, second.id)
        commit.mark(tier, third, [])  # it may not have been verified yet
        tier.delete(f"{layout.folder(third.id)}/{layout.COMMIT}")
        tier.delete(f"{layout.folder(fourth.id)}/{layout.VERIFIED}")
    lastgood.save(bucket, {"n": 1}, step=31)
    tier = access.for_reading(bucket)
    assert catalog.NAME in tier.list("")
    found = commit.survey(tier)
    expected = without_catalog(bucket)
    found.catalogued = frozenset()
    assert found == replace(expected, listings=found.listings) and len(found.generations) == 29
    assert found.generations[first.id].commit.milestone and third.id in found.witnessed
    assert not found.generations[fourth.id].verified


def test_a_damaged_catalog_is_ignored(bucket):
    train(bucket, 20)
    tier = access.for_reading(bucket)
    data = bytearray(tier.list("")[catalog.NAME] or 0)
    access._objects(bucket).put(catalog.NAME, bytes(data))
    assert len(commit.survey(tier).generations) == 20
    train(bucket, 21)
    assert lastgood.open(bucket).verify().good and lastgood.open(bucket).generation().step == 21


def test_a_label_that_comes_while_the_catalog_is_written_is_not_hidden(bucket, monkeypatch):
    train(bucket, 5)
    with access.for_writing(bucket, "atomic_dirsync") as tier:
        run = RunWriter(tier, Inline(), keep=ALL)
        run.begin(max(run.survey.generations))
        at, tree = min(run.survey.generations), tier.tree

        def labelled_meanwhile(folder: str) -> object:
            run.label(at, True, {})
            return tree(folder)

        tier.tree = labelled_meanwhile
        run.note_catalog(1)
    found = commit.survey(access.for_reading(bucket))
    assert catalog.NAME in access.for_reading(bucket).list("") and found.generations[at].commit.milestone
    assert found.generations == without_catalog(bucket).generations


def test_a_catalog_is_written_again_after_many_saves(bucket, monkeypatch):
    monkeypatch.setattr(writer, "CATALOG_EVERY", 8)
    with lastgood.Checkpointer(bucket, {"n": 0}, retention=ALL) as ckpt:
        for step in range(1, 12):
            ckpt.save(step).result()
            ckpt.wait()
        assert catalog.NAME in access.for_reading(bucket).list("")
