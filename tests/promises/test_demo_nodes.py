"""The example with a lost node runs as it stands, and a shortened demo with nodes holds what it claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lastgood_lab import forked

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.long
def test_the_demo_with_nodes_holds_what_it_claims(tmp_path: Path, memory: Path) -> None:
    """In a process of its own, because it forks. Without root its nodes are processes on loopback."""
    output, arguments = tmp_path / "output", ["--out", str(tmp_path / "out"), "--steps", "30", "--kills", "1"]
    demo = forked.started(REPOSITORY / "demo/nodes.py", arguments, output)
    demo.join(300)
    assert demo.exitcode == 0 and "The two runs are one, bit for bit." in output.read_text(), output.read_text()


def test_the_example_goes_on_from_the_memory_of_the_other_node(tmp_path: Path, memory: Path) -> None:
    output, folder = tmp_path / "output", tmp_path / "empty"
    folder.mkdir()
    example = forked.started(REPOSITORY / "examples/survive_a_node.py", [], output, folder=folder)
    example.join(240)
    assert example.exitcode == 0 and re.search(r"rank 1 restores step [3-6]0: ", output.read_text())
    assert output.read_text().endswith("the losses are those of the undisturbed run\n")
    assert not [*folder.iterdir()]
