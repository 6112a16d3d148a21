"""What commands show of odd values: numbers of thousands of digits, and times that are no dates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import lastgood
from lastgood.cli.texts import natural, when


def test_a_number_or_a_name_of_thousands_of_digits_is_shown(tmp_path: Path, call_json: Any) -> None:
    """`lastgood show` ended with a traceback: Python neither reads nor writes a number of more than 4,300 digits."""
    state = {"n": 10**5000, "7" * 5000: torch.zeros(2), "h": {"7": torch.zeros(1), "10": torch.zeros(1)}}
    lastgood.save(tmp_path / "run", state, step=1)
    code, _ = call_json("show", tmp_path / "run")
    assert code == 0


def test_names_are_sorted_by_their_numbers() -> None:
    names = ["h.10.a", "h.2.b", "h.002.a", "a", "10", "9", "h.2"]
    assert sorted(names, key=natural) == ["9", "10", "a", "h.2", "h.002.a", "h.2.b", "h.10.a"]


def test_a_time_that_is_no_date_is_shown_as_unknown() -> None:
    """A damaged record of an attempt ended `lastgood attempts` with a traceback."""
    assert when(1e18, "%H:%M:%S") == "?"
