"""The source checkout that a campaign works on: the tests that it runs, and the folder of its reports."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def checkout() -> Path:
    """Root of the checkout that holds this file; when the package is installed elsewhere, the current directory.

    Raises FileNotFoundError when neither is a checkout.
    """
    for root in (Path(__file__).resolve().parents[4], Path.cwd()):
        if all((root / part).is_dir() for part in ("src/lastgood", "lab/src/lastgood_lab", "tests")):
            return root
    raise FileNotFoundError(
        "No source checkout of lastgood found: neither the folder of this package nor the current directory is one. "
        "Campaigns need its tests and its folder lab/reports. Run them from the root of a checkout."
    )
