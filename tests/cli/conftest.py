"""The run that the tests of scrub and repair damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import save
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.format import layout
from lastgood.policy.retention import Keep
from lastgood.run import access
from lastgood.run.writer import RunWriter

NAN = b"\x00\x00\xc0\x7f"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 1 to 3, all verified and with parity; step 4 contains NaN."""
    root = tmp_path / "run"
    with access.for_writing(root, "atomic_dirsync") as tier:
        writer = RunWriter(tier, Inline(), keep=Keep(last=9), parity="4+2")
        for step in (1, 2, 3, 4):
            data = NAN * 5000 if step == 4 else bytes([step]) * 20_000
            weight = layout.Tensor("weight", "float32", (5000,), finite=True)
            save(writer, step, {"weight": data}, tensors=[weight])
            if step < 4:
                writer.verify(Arena(1 << 16, 8192))
    return root
