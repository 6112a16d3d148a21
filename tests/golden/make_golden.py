"""The script that made {slots,parity,ranks}: golden runs of format version 1 beside `v1`. It is never run again.

    PYTHONPATH=src:tests/support python tests/golden/make_golden.py tests/golden

    slots    one process, three saves in slots
    parity   one process, three generations with parity 2+1; step 2 became a milestone after its commit
    ranks    two ranks of FSDP2, saves of steps 2 and 4; step 4 continues step 2 in a second opening

`golden.json` has the SHA-256 of every tensor of the newest generation of each, by its stored name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import lastgood
from harness import digests
from lastgood_lab.worlds import world
from ranked import trained


def one_process(path: str, **options: object) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "losses": (0.5, float("inf")), "note": "naïve ✓"}
    with lastgood.Checkpointer(path, state, cadence=lastgood.Every(steps=1), save_on_exit=False, **options) as ckpt:
        ckpt.restore()
        for step in (1, 2, 3):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            save = ckpt.save(step)
            save.result()
            if step == 2 and "parity" in options:
                ckpt.save(step, milestone=True, metrics={"loss": 0.25}).result()
            ckpt.wait()


def main(folder: Path) -> None:
    one_process(f"slots://{folder.resolve()}/slots", in_flight=1)
    one_process(str(folder / "parity"), parity="2+1")
    for upto in (2, 4):
        world(2, trained, "fsdp", folder / "ranks", upto)
    paths = {name: str(folder / name) for name in ("parity", "ranks")} | {"slots": f"slots://{folder.resolve()}/slots"}
    found = {name: digests(path) for name, path in paths.items()}
    (folder / "golden.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
