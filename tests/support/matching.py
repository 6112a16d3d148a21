"""Match a generation in memory with a live state, for tests of `lastgood.state`."""

from collections.abc import Callable
from typing import Any

from lastgood.state import rules
from lastgood.state.match import Match


def match(state: Any, stored: rules.Stored, **options: Any) -> Match:
    """Prepare a restore as in a world of one, up to the point where it would write to the state."""
    found = rules.match(state, stored, **options)
    found.require_fit()
    return found


class Fed:
    """A stand-in for `run.content.Content`: `feed(sink)` puts the tensors."""

    def __init__(self, feed: Callable[[Any], object]) -> None:
        self._feed = feed

    def read_into(self, sink: Any, settings: None) -> None:
        self._feed(sink)
