"""Registers the lab's commands for its tests, as its pyproject.toml does for an installed package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import call, call_json, registered  # noqa: F401 - two of them are fixtures


@pytest.fixture(autouse=True)
def _commands(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    registered(monkeypatch, dict(re.findall(r'^(\w+) = "(lastgood_lab\.[\w.]+:\w+)"$', text, re.M)))
