"""Slices of the campaigns that send changed and made-up bytes to a server (wire_fuzz.py, wire_fuzz_tls.py)."""

from __future__ import annotations

import multiprocessing
import shutil

import pytest

from lastgood_lab import wire
from lastgood_lab.campaigns import wire_fuzz, wire_fuzz_tls
from lastgood_lab.campaigns.wire_fuzz import CHANGES, MODES, overwrite

TRIALS, TLS_TRIALS = 2000, 150


def test_changed_and_made_up_bytes_are_never_accepted():
    """In a process of its own: it counts descriptors and threads, and earlier tests' may end meanwhile."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(wire_fuzz.batch, ((7, 0, TRIALS),))
    assert found.problems == []
    assert set(found.trials) == {one.__name__ for one in (*CHANGES, overwrite)} and sum(found.trials.values()) == TRIALS
    reasons = ("magic", "version", "length", "tag", "number", "message", "digest")
    assert {f"FrameInvalid: {one}" for one in reasons} <= set(found.ends)


@pytest.mark.parametrize("security", MODES, ids=lambda one: one.mode)
def test_a_server_that_accepts_a_changed_byte_is_a_violation(security, monkeypatch):
    """The campaign is able to fail: digests and tags are not compared."""
    monkeypatch.setattr("hmac.compare_digest", lambda *_: True)
    scripts = [wire_fuzz.recorded(security, one) for one in (wire_fuzz.CLIENT_RANDOM, wire_fuzz.OTHER_RANDOM)]
    found = wire_fuzz.Found()
    for number in range(200):
        wire_fuzz.trial(f"{number}", security, *scripts, found, wire_fuzz.flip)
    assert any("was given" in one or "the bytes were others" in one for one in found.problems)


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs the command openssl: apt install openssl")
def test_bytes_changed_inside_of_tls_or_on_its_way_are_not_accepted(tmp_path):
    wire.certificates(tmp_path)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(wire_fuzz_tls.batch, ((str(tmp_path), 7, 0, TLS_TRIALS),))
    assert found.problems == []
    kinds = {name.split(", ")[1] if ", " in name else "inside" for name in found.trials}
    assert kinds == {"inside", *wire_fuzz_tls.FLIGHTS} and sum(found.trials.values()) == TLS_TRIALS
    assert {"FrameInvalid: tag", "FrameInvalid: tls", "PeerRefused"} <= set(found.ends)
