"""`lastgood drill` after a job of several nodes was killed: names and folders of this machine stand for its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_ranks_memory import killed

from cli_runs import contents
from lastgood.io.machine import NODE
from ranked_memory import folder

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("nodes", "copies", "parity", "on_disk"),
    [("ab", 2, None, False), ("ab", 2, None, True), pytest.param("abcd", 1, "2+2", True, marks=pytest.mark.long)],
    ids=["copies in memory", "copies on disks", "parity on disks"],
)
def test_files_of_a_killed_job_come_back_from_its_nodes(
    tmp_path: Path, memory: Path, disks: Path, call_json, monkeypatch, nodes, copies, parity, on_disk
) -> None:
    home, place = tmp_path / "home", disks if on_disk else memory
    killed([*nodes], place, home, 6, True, copies, parity, on_disk)
    folders = [disks / node if on_disk else folder(home, node, memory) for node in nodes]
    monkeypatch.setenv(NODE, "a")
    before = [contents(one / "gen") for one in folders]
    code, document = call_json("drill", home)
    acts = {one["what"]: one for one in document["acts"]}
    assert code == 0 and all(one["good"] for one in acts.values()), document
    front = "the disk of this node" if on_disk else "the memory"
    assert acts[f"{front} is gone"]["way_back"].endswith("copied back")
    (lost,) = (one for what, one in acts.items() if what.endswith(("is lost", "are lost")))
    assert lost["network_bytes"] > 0 and [row["good"] for row in document["peers"]] == [True]
    assert [contents(one / "gen") for one in folders] == before
    assert not [*tmp_path.glob("*.drill-*"), *disks.glob("*.drill-*"), *tmp_path.rglob(".drill")]
