"""The example with a lost node runs as it stands, and a shortened demo with nodes holds what it claims."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


def test_the_demo_with_nodes_holds_what_it_claims(tmp_path: Path, memory: Path) -> None:
    """In a process of its own, because it forks. Without root its nodes are processes on loopback."""
    command = [
        sys.executable,
        str(REPOSITORY / "demo/nodes.py"),
        "--out",
        str(tmp_path),
        "--steps",
        "30",
        "--kills",
        "1",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "The two runs are one, bit for bit." in ended.stdout


def test_the_example_goes_on_from_the_memory_of_the_other_node(tmp_path: Path, memory: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "examples/survive_a_node.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=240)
    assert re.search(r"rank 1 restores step [3-6]0: ", ended.stdout)
    assert ended.stdout.endswith("the losses are those of the undisturbed run\n")
    assert not [*tmp_path.iterdir()]
