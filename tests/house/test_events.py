"""Every kind of event has a record of its own, a line in docs/events.md and a place in the source that emits it."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path
from typing import get_args

import pytest

import lastgood
from lastgood import events

ROOT = Path(__file__).resolve().parents[2]
COLUMN = re.compile(r"^\| `(\w+)` \| `(\w+)` \| [^|]+ \|([^|]*)\|([^|]*)\|([^|]*)\|$", re.M)


def test_every_kind_has_one_class_and_the_page_lists_them_in_order() -> None:
    """`Event.kind` documented 7 kinds of 18."""
    assert list(events.EVENTS) == list(get_args(events.EventKind))
    rows = COLUMN.findall((ROOT / "docs" / "events.md").read_text())
    assert [(kind, name) for kind, name, *_ in rows] == [(kind, one.__name__) for kind, one in events.EVENTS.items()]
    assert set(events.EVENTS.values()) == set(events.Event.__subclasses__())


def test_the_page_and_the_docstrings_give_meaning_to_the_same_fields() -> None:
    for kind, _, *cells in COLUMN.findall((ROOT / "docs" / "events.md").read_text()):
        text = events.EVENTS[kind].__doc__ or ""
        for field, cell in zip(("seconds", "bytes", "detail"), cells, strict=True):
            assert (f"`{field}`" in text) == bool(cell.strip()), (kind, field)


def test_every_kind_is_emitted_somewhere() -> None:
    """A kind counts as emitted if its name or its class occurs in the rooms that emit events."""
    named: set[str] = set()
    for room in ("run", "loop"):
        for path in (ROOT / "src/lastgood" / room).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                named.add(node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "")
                named.add(node.attr if isinstance(node, ast.Attribute) else "")
                named.add(node.id if isinstance(node, ast.Name) else "")
    silent = [kind for kind, one in events.EVENTS.items() if not named & {kind, one.__name__}]
    assert not silent


@pytest.mark.parametrize("kind", get_args(events.EventKind))
def test_an_event_is_of_the_class_of_its_kind_and_has_every_field(kind: events.EventKind) -> None:
    event = lastgood.Event(kind=kind, step=7, at_seconds=1.5)
    assert type(event) is events.EVENTS[kind]
    assert (event.kind, event.step, event.at_seconds) == (kind, 7, 1.5)
    assert (event.seconds, event.bytes, event.detail) == (0.0, 0, "")
    assert event == events.EVENTS[kind](step=7, at_seconds=1.5)
    assert pickle.loads(pickle.dumps(event)) == event
    with pytest.raises(AttributeError):
        event.step = 8  # type: ignore[misc]


def test_a_kind_that_does_not_exist_makes_no_event() -> None:
    with pytest.raises(KeyError, match="finished"):
        lastgood.Event(kind="finished", step=7, at_seconds=1.5)  # type: ignore[arg-type]
