"""Registers the lab's commands for its tests, as its pyproject.toml does for an installed package, and runs benches."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import call, call_json, registered  # noqa: F401 - two of them are fixtures
from lastgood.cli import app


@pytest.fixture(autouse=True)
def _commands(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    registered(monkeypatch, dict(re.findall(r'^(\w+) = "(lastgood_lab\.[\w.]+:\w+)"$', text, re.M)))


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `lastgood bench ...` in this process; returns the exit code, stdout and stderr."""

    def run_it(*args: object) -> tuple[int, str, str]:
        code = app.main(["bench", *(str(one) for one in args)])
        return code, *capsys.readouterr()

    return run_it
