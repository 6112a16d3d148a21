"""The demo with a bucket: a run whose durable home is a real S3 server, with a local disk in front of it.

    python demo/bucket.py [--out demo-out/bucket] [--steps 400] [--seed 0]

It trains examples/object_store.py once without a disturbance, in another bucket. Then it trains it again and kills it
with SIGKILL at random steps. While it is dead, the disk in front is lost, files are damaged in front and in the bucket,
and once the store itself is down for a while during training. Each restart is the same command. It ends with status 1
if the two runs differ in one bit, or if anything else that it claims does not hold. The processes of the trainer are
forked from one that has imported torch.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from proof import Check
from rich.console import Console
from run import Failed, concluded, flip_a_bit, say

import lastgood
from lastgood import errors
from lastgood.cli import app
from lastgood_lab import forked
from lastgood_lab.object_server import ObjectServer, make_bucket

TRAIN = Path(__file__).parents[1] / "examples/object_store.py"
PATIENCE_SECONDS = 60.0
HOME = "s3://demo/killed"
STEP = re.compile(r"step (\d+) loss (\S+)")
RESTORED = re.compile(r"step (\d+) restored from (\S+):")


@dataclass
class Life:
    """One life of the trainer, from its output."""

    resumed: int = 0
    sources: list[str] = field(default_factory=list)
    losses: dict[int, str] = field(default_factory=dict)
    status: int | None = None

    @property
    def reached(self) -> int:
        return max(self.losses, default=self.resumed)


def live(run: str, front: Path, steps: int, kill_at: int = 0, outage: tuple[ObjectServer, int] | None = None) -> Life:
    """Run the trainer to its end, or kill it after step `kill_at`, once the bucket holds a generation.

    `outage`: a server, and the step from which on it is down.
    """
    life, log = Life(), front.with_suffix(".log")
    receiver, printed = forked.CONTEXT.Pipe(duplex=False)
    trainer = forked.started(TRAIN, [run, "--front", str(front), "--steps", str(steps)], log, printed)
    printed.close()
    try:
        with open(receiver.fileno(), closefd=False) as lines:
            for line in lines:
                if found := RESTORED.match(line):
                    life.resumed, life.sources = int(found[1]), [*life.sources, found[2]]
                elif found := STEP.match(line):
                    life.losses[int(found[1])] = found[2]
                    if kill_at and int(found[1]) >= kill_at and holds_a_generation(run):
                        break
                    if outage is not None and int(found[1]) == outage[1]:
                        outage[0].stop()
                    if outage is not None and int(found[1]) == outage[1] + 60:
                        outage[0].start()
        if kill_at:
            trainer.kill()
        trainer.join(PATIENCE_SECONDS)
        life.status = trainer.exitcode
    finally:
        trainer.kill()
        trainer.join()
        receiver.close()
    if life.status != (-signal.SIGKILL if kill_at else 0):
        raise Failed(f"the trainer ended with status {life.status} at step {life.reached}. It said:\n{log.read_text()}")
    return life


def holds_a_generation(run: str) -> bool:
    try:
        return bool(lastgood.open(run).generations())
    except errors.NotARun:  # nothing has been copied into the bucket yet
        return False


def damage_in_front(front: Path, rng: random.Random) -> str:
    newest = lastgood.open(front).lineage()[0]
    _, what = flip_a_bit(front / "gen" / folder_of(newest) / "r00000.safetensors", rng)
    return f"step {newest.step} in front, the newest: {what}"


def damage_in_the_bucket(front: Path, rng: random.Random) -> str:
    run = lastgood.open(HOME)
    newest, scratch = run.lineage()[0], front.with_name("scratch")
    name = f"gen/{folder_of(newest)}/r00000.safetensors"
    import obstore
    from obstore.store import from_url

    store = from_url(HOME, client_options={"allow_http": True})
    scratch.write_bytes(obstore.get(store, name).bytes().to_bytes())
    _, what = flip_a_bit(scratch, rng)
    obstore.put(store, name, scratch.read_bytes())
    scratch.unlink()
    return f"step {newest.step} in the bucket, the newest there: {what}"


def folder_of(generation: lastgood.Generation) -> str:
    return f"{generation.step:012d}-{generation.id.incarnation}"


def tensors(run: str) -> dict[str, torch.Tensor]:
    """All tensors of the newest generation, but for NumPy's generator, which the example neither seeds nor uses."""
    opened = lastgood.open(run)
    names = sorted(piece.name for piece in opened.manifest(opened.generation()).pieces)
    return {name: opened.tensor(name) for name in names if not name.startswith("rng.numpy")}


def in_trouble(server: ObjectServer, out: Path, steps: int, rng: random.Random, console: Console) -> list[Check]:
    """The run with the kills, and what was found; each life is one command."""
    front, checks = out / "front", list[Check]()
    due = [int(steps * (number + rng.uniform(0.4, 0.9)) / 6) for number in range(5)]

    first = live(HOME, front, steps, kill_at=due[0])
    shutil.rmtree(front)
    say(console, f"life 1: killed after step {first.reached}; then the disk in front is lost, with all that is on it")
    second = live(HOME, front, steps, kill_at=due[1])
    checks.append(Check("a lost disk: from the bucket", told(second), HOME in second.sources))
    say(console, f"life 2: resumed from step {second.resumed}, out of the bucket; killed after step {second.reached}")
    say(console, f"  then damaged, while dead, {damage_in_front(front, rng)}")
    third = live(HOME, front, steps, kill_at=due[2])
    good = third.resumed > second.resumed
    checks.append(Check("damage in front costs at most one save", told(third), good))
    say(console, f"life 3: resumed from step {third.resumed}; killed after step {third.reached}")
    hurt = damage_in_the_bucket(front, rng)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = app.main(["scrub", HOME, "--take-over"])
    whole = all(lastgood.open(HOME).verify(one.step).good for one in lastgood.open(HOME).generations())
    say(console, f"  then damaged, while dead, {hurt}; `lastgood scrub {HOME}` ends with {code}")
    # The disk in front keeps the newest two only: what it no longer has cannot be taken from it.
    repaired = "repaired from the disk" if code == 0 and whole else "marked, and stepped over from now on"
    checks.append(Check("damage in the bucket is repaired, or marked", repaired, (code == 0 and whole) or code == 4))
    fourth = live(HOME, front, steps, kill_at=due[3])
    say(console, f"life 4: resumed from step {fourth.resumed}; killed after step {fourth.reached}")
    fifth = live(HOME, front, steps, outage=(server, min(due[4], steps - 80)))
    say(
        console,
        f"life 5: resumed from step {fifth.resumed}, the store was down for 60 steps, finished at {fifth.reached}",
    )
    live(HOME, front, steps)
    held = [one.step for one in lastgood.open(HOME).generations()]
    say(console, f"life 6: nothing is left to train; what the store had missed is in the bucket: {held}")
    costs_nothing = fifth.reached == steps and held[-1:] == [steps]
    checks.append(Check("an outage of the store costs no step", f"the bucket holds {held}", costs_nothing))
    lives = [first, second, third, fourth, fifth]
    again = sum(before.reached - after.resumed for before, after in pairwise(lives))
    most = 4 * 25  # a save every 5 steps in front, every 20 in the bucket, and one in flight at each of the four kills
    checks.append(Check("work that was done twice", f"{again} steps after 4 kills", 0 <= again <= most))
    return checks


def told(life: Life) -> str:
    return f"step {life.resumed} from {' and '.join(life.sources)}"


def demo(out: Path, steps: int, seed: int, console: Console) -> list[Check]:
    """Both runs and the comparison. Raises Failed."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with ObjectServer(out / "server") as server:
        os.environ |= server.environment()
        make_bucket(HOME)
        begun = time.monotonic()
        calm = live("s3://demo/uninterrupted", out / "uninterrupted", steps)
        say(console, f"uninterrupted run: {calm.reached} steps in {time.monotonic() - begun:.0f} s")
        checks = in_trouble(server, out, steps, random.Random(seed), console)
        reference, victim = tensors("s3://demo/uninterrupted"), tensors(HOME)
        same = reference.keys() == victim.keys() and all(map(torch.equal, reference.values(), victim.values()))
        numbers = sum(one.numel() for one in victim.values())
        checks.append(Check("same tensors, bit for bit", f"{len(victim)} tensors, {numbers:,} numbers", same))
    return checks


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("demo-out/bucket"))
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--seed", type=int, default=0, help="of the moments of the kills and of the damages")
    args = options.parse_args()
    console, begun = Console(width=None if sys.stdout.isatty() else 120), time.monotonic()
    try:
        checks = demo(args.out.absolute(), args.steps, args.seed, console)
    except Failed as error:
        say(console, f"The demo failed: {error}")
        return 1
    return concluded(checks, console, begun)


if __name__ == "__main__":
    sys.exit(main())
