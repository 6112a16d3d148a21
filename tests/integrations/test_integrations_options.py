"""What the integrations for training frameworks do with their options."""

from __future__ import annotations

from typing import Any

import pytest

import lastgood
from lastgood.integrations.options import wants_loss

BEST = lastgood.Keep(best=("loss", "min", 3))


@pytest.mark.parametrize(
    ("options", "environ", "wanted"),
    [
        ({}, {}, False),
        ({"sentinel": None, "retention": lastgood.Keep(best=("score", "max", 1)), "tiers": ()}, {}, False),
        ({"sentinel": lastgood.Sentinel()}, {}, True),
        ({"retention": BEST}, {}, True),
        ({"tiers": [lastgood.Tier("/nvme/run", retention=BEST)]}, {}, True),
        ({}, {"LASTGOOD_RECORDS": "/logs"}, True),
        ({}, {"LASTGOOD_REPLAY": "{}"}, True),
    ],
)
def test_losses_are_added_up_only_where_something_uses_them(
    options: dict[str, Any], environ: dict[str, str], wanted: bool
) -> None:
    """Each batch was added up on the device, and each save read it from there, for nobody."""
    assert wants_loss(options, environ) == wanted
