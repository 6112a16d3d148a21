"""Fixtures of the tests of the wire."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from wired import Authority, authority


@pytest.fixture(scope="session")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Authority]:
    """Returns the authority of the certificates of all tests, which is made when the first test needs it."""
    found: list[Authority] = []

    def make() -> Authority:
        if not found:
            found.append(authority(tmp_path_factory.mktemp("certificates")))
        return found[0]

    return make
