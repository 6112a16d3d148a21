"""The command line of this process, with commands of other packages that a test chooses."""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint

import pytest

from lastgood.cli import app


def registered(monkeypatch: pytest.MonkeyPatch, commands: dict[str, str]) -> None:
    """The command line has these commands of other packages and no others, whatever is installed here.

    `commands`: name -> `module:object`, as an entry point in a pyproject.toml has it.
    """
    entries = [EntryPoint(name, value, app.GUESTS) for name, value in commands.items()]
    own = [one for one in app.app.registered_commands if one.callback.__module__.startswith("lastgood.cli.")]
    own = [one for one in own if one.name not in app.LAB]
    monkeypatch.setattr(app.importlib.metadata, "entry_points", lambda group: entries if group == app.GUESTS else [])
    monkeypatch.setattr(app.app, "registered_groups", [])
    monkeypatch.setattr(app.app, "registered_commands", own)
    monkeypatch.setattr(app, "_face_with_guests", inspect.unwrap(app._face_with_guests))  # not kept
