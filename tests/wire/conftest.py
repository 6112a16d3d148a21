"""Fixtures of the tests of the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from wired import Authority, LocalMemory, authority


@pytest.fixture(params=["sockets", "windows", pytest.param("nixl", marks=pytest.mark.slow)])
def either_wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both nodes of the test use sockets, or windows in the memory of this process, or windows over NIXL."""
    if request.param == "windows":
        monkeypatch.setattr("wired.WINDOWS", LocalMemory)
    if request.param == "nixl":
        monkeypatch.setattr("wired.WINDOWS", request.getfixturevalue("nixl"))
    yield
    assert not LocalMemory.all, "every window ends with its connection"


@pytest.fixture(scope="session")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Authority]:
    """Returns the authority of the certificates of all tests, which is made when the first test needs it."""
    found: list[Authority] = []

    def make() -> Authority:
        if not found:
            found.append(authority(tmp_path_factory.mktemp("certificates")))
        return found[0]

    return make
