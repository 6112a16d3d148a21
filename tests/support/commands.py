"""The command line in this process, with commands of other packages that a test chooses."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from lastgood.cli import app

Call = Callable[..., tuple[int, str, str]]


def registered(monkeypatch: pytest.MonkeyPatch, commands: dict[str, str]) -> None:
    """Give the command line these commands of other packages and no others, whatever is installed.

    `commands`: name -> `module:object`, as in an entry point of a pyproject.toml.
    """
    entries = [EntryPoint(name, value, app.GUESTS) for name, value in commands.items()]
    own = [one for one in app.app.registered_commands if one.callback.__module__.startswith("lastgood.cli.")]
    own = [one for one in own if one.name not in app.LAB]
    monkeypatch.setattr(app.importlib.metadata, "entry_points", lambda group: entries if group == app.GUESTS else [])
    monkeypatch.setattr(app.app, "registered_groups", [])
    monkeypatch.setattr(app.app, "registered_commands", own)
    monkeypatch.setattr(app, "_face_with_guests", inspect.unwrap(app._face_with_guests))  # without its cache


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run one command in this process; returns exit code, stdout and stderr."""

    def run_it(*args: object) -> tuple[int, str, str]:
        code = app.main([str(one) for one in args])
        return code, *capsys.readouterr()

    return run_it


@pytest.fixture
def call_json(call: Call) -> Callable[..., tuple[int, Any]]:
    """Run one command with --json; returns the exit code and the parsed document."""

    def run_it(*args: object) -> tuple[int, Any]:
        code, out, _ = call(*args, "--json")
        return code, json.loads(out)

    return run_it
