"""The demo: a training run left in peace, one that is killed and damaged again and again, the proof that they agree.

    python demo/run.py [--out demo-out] [--epochs 10] [--seed 0]

It starts demo/train.py, kills it with SIGKILL (the trainer alone, as the kernel does when memory runs out; its two data
workers are left to find out), harms its files while it is dead, and starts it again with the same command. It sees the
run from outside only: the trainer's log, the files, `lastgood.open`. The trainer is forked from a process that has
imported torch. The demo ends with status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from picture import draw
from proof import Check, Stored, compare
from rich import box
from rich.console import Console
from rich.table import Table

import lastgood
from lastgood_lab import forked

TRAIN = Path(__file__).with_name("train.py")
PATIENCE_SECONDS = 120.0
"""a trainer that logs nothing for so long hangs"""
SAVE_SECONDS = 0.02
"""how long after the first sign of a save the kill may come; less where saves turn out to be faster"""


class Failed(Exception):
    """The demo could not be carried through."""


class Damage(NamedTuple):
    """What was done to the newest generation while the trainer was dead."""

    step: int
    kind: str
    what: str


class Blow(NamedTuple):
    """A kill, and what is done to the newest generation's tensors after it."""

    in_a_save: bool
    harm: Callable[[Path, random.Random], tuple[str, str]] | None = None


@dataclass
class Attempt:
    """One life of the trainer, as seen from outside."""

    expected: int = 0
    """step of the newest good generation when it was started"""
    resumed: int = 0
    stepped_over: list[tuple[int, str]] = field(default_factory=list)
    """(step, reason), as the trainer told it"""
    losses: dict[int, float] = field(default_factory=dict)
    """number of completed steps -> loss of the last one"""
    finished: bool = False
    half_a_save: str = ""
    """step and files of the save that its death cut short; empty when no save was under way"""
    damage: Damage | None = None

    @property
    def reached(self) -> int:
        return max(self.losses, default=self.resumed)


class Outcome(NamedTuple):
    peace: Attempt
    attempts: list[Attempt]
    """of the run in trouble; the last one finished"""
    checks: list[Check]
    picture: Path

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


# ---- one life of the trainer -------------------------------------------------------------------------------------


class Trainer:
    """demo/train.py in a process of its own; what it logs goes into an Attempt."""

    def __init__(self, run: Path, epochs: int, attempt: Attempt, show: Callable[[str], object]) -> None:
        self._attempt, self._show, self._heard_at = attempt, show, time.monotonic()
        self._errors, log = run.with_suffix(".stderr.txt"), run.with_suffix(".jsonl")
        log.touch()
        self._log = log.open("rb")
        self._log.seek(0, os.SEEK_END)  # what stands there is of earlier attempts
        arguments = [str(run), "--log", str(log), "--epochs", str(epochs)]
        self._process = forked.started(TRAIN, arguments, self._errors)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.exitcode is None:  # Ctrl-C, or the demo itself failed: its workers go too
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
        self._log.close()

    def until(self, happened: Callable[[], object], poll_seconds: float = 0.005) -> None:
        """Follow it until `happened()` or its own good end. Raises Failed when it fails or hangs."""
        while not happened():
            status = self._process.exitcode
            self._read_log()
            if status == 0 and self._attempt.finished:
                return
            if status is not None or time.monotonic() > self._heard_at + PATIENCE_SECONDS:
                state = "hangs" if status is None else f"ended with status {status}"
                told = self._errors.read_text(errors="replace")[-3000:]
                raise Failed(f"the trainer {state} at step {self._attempt.reached}. It said:\n{told}")
            time.sleep(poll_seconds)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._read_log()

    def _read_log(self) -> None:
        while (line := self._log.readline()).endswith(b"\n"):
            told, self._heard_at = json.loads(line), time.monotonic()
            if told["event"] == "restored":
                self._attempt.resumed = told["step"]
                self._attempt.stepped_over = [(step, reason) for step, reason in told["stepped_over"]]
            elif told["event"] == "step":
                self._attempt.losses[told["step"]] = told["loss"]
                self._show(f"at step {told['step']}")
            else:
                self._attempt.finished = True
        self._log.seek(-len(line), os.SEEK_CUR)  # a line that is not whole yet


def half_a_save(run: Path) -> str:
    """Step and files of a save that has begun and is not committed; empty when there is none.

    A generation that is being deleted has no COMMIT.json either, but a GOING.json that says so.
    """
    try:
        for folder in sorted(os.listdir(run / "gen"), reverse=True):
            names = sorted(os.listdir(run / "gen" / folder))
            if names and not {"COMMIT.json", "GOING.json"} & set(names):
                step, files = int(folder.partition("-")[0]), [re.sub(r"\.[-\d]+\.tmp$", ".tmp", name) for name in names]
                return f"step {step}: {', '.join(files)}"
    except FileNotFoundError:
        pass  # the run is not made yet, or a folder has gone between the two lines
    return ""


# ---- harm --------------------------------------------------------------------------------------------------------


def flip_a_bit(file: Path, rng: random.Random) -> tuple[str, str]:
    data = bytearray(file.read_bytes())
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    file.write_bytes(data)
    return "one bit flipped", f"bit {bit} of byte {at:,} flipped"


def cut_the_end(file: Path, rng: random.Random) -> tuple[str, str]:
    size = file.stat().st_size
    left = rng.randrange(size)
    os.truncate(file, left)
    return "truncated", f"cut from {size:,} to {left:,} bytes"


BLOWS = (
    Blow(in_a_save=True),
    Blow(in_a_save=False),
    Blow(in_a_save=True, harm=flip_a_bit),
    Blow(in_a_save=True),
    Blow(in_a_save=False),
    Blow(in_a_save=True, harm=cut_the_end),
    Blow(in_a_save=True),
    Blow(in_a_save=False),
)


def strike(trainer: Trainer, run: Path, attempt: Attempt, step: int, blow: Blow, rng: random.Random) -> None:
    """Kill the trainer at a random moment after `step`, and harm what it has saved last."""
    trainer.until(lambda: attempt.reached >= step and len(lastgood.open(run).lineage()) > 1)
    time.sleep(rng.uniform(0, 0.2))
    window_seconds = SAVE_SECONDS
    while blow.in_a_save and not attempt.finished:
        trainer.until(lambda: half_a_save(run), poll_seconds=0.0002)
        time.sleep(rng.uniform(0, window_seconds))
        if half_a_save(run):
            break
        window_seconds /= 2
    trainer.kill()
    if attempt.finished:
        raise Failed(f"the trainer was done before it could be killed after step {step}; give it more epochs")
    attempt.half_a_save = half_a_save(run)
    if blow.harm is not None:
        newest = lastgood.open(run).lineage()[0]
        file = run / "gen" / f"{newest.step:012d}-{newest.id.incarnation}" / "r00000.safetensors"
        attempt.damage = Damage(newest.step, *blow.harm(file, rng))


# ---- the two runs ------------------------------------------------------------------------------------------------


def in_peace(run: Path, epochs: int, console: Console) -> Attempt:
    """Train without a disturbance."""
    attempt, begun = Attempt(), time.monotonic()
    with (
        console.status("uninterrupted run") as status,
        Trainer(run, epochs, attempt, lambda at: status.update(f"uninterrupted run {at}")) as trainer,
    ):
        trainer.until(lambda: False)
    say(console, f"uninterrupted run: {attempt.reached} steps in {time.monotonic() - begun:.0f} s")
    return attempt


def in_trouble(
    run: Path, epochs: int, total: int, blows: Sequence[Blow], rng: random.Random, console: Console
) -> list[Attempt]:
    """Train, with the blows at random steps all over the run; each restart is the same command again."""
    share = total / (len(blows) + 1)
    due = [(blow, int(share * (number + rng.uniform(0.3, 0.9)))) for number, blow in enumerate(blows)]
    attempts: list[Attempt] = []
    while not attempts or not attempts[-1].finished:
        attempt, title = Attempt(_newest_good(run, attempts)), f"life {len(attempts) + 1}"
        with (
            console.status(title) as status,
            Trainer(run, epochs, attempt, lambda at, title=title: status.update(f"{title} {at}")) as trainer,
        ):
            if due:
                blow, step = due.pop(0)
                strike(trainer, run, attempt, step, blow, rng)
                if blow.in_a_save and not attempt.half_a_save:  # it was committed in the instant of the kill: once more
                    due.insert(0, (Blow(in_a_save=True), attempt.reached + 1))
            else:
                trainer.until(lambda: False)
        say(console, f"{title}: {story(attempt)}")
        attempts.append(attempt)
    return attempts


def _newest_good(run: Path, attempts: Sequence[Attempt]) -> int:
    """Step where the next attempt must begin."""
    if not attempts:
        return 0
    newest, older, *_ = lastgood.open(run).lineage()
    return older.step if attempts[-1].damage else newest.step


def story(attempt: Attempt) -> str:
    """One life: a line, and one more for each generation that was stepped over or damaged."""
    begin = f"resumed from step {attempt.resumed}" if attempt.resumed else "started"
    where = f" inside a save ({attempt.half_a_save})" if attempt.half_a_save else ""
    end = f"finished at step {attempt.reached}" if attempt.finished else f"killed after step {attempt.reached}{where}"
    lines = [f"{begin}, {end}"]
    lines += [f"  stepped over step {step}: {reason}" for step, reason in attempt.stepped_over]
    if attempt.damage:
        lines.append(f"  then damaged, while dead, step {attempt.damage.step}, the newest: {attempt.damage.what}")
    return "\n".join(lines)


def say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False)


# ---- all of it ---------------------------------------------------------------------------------------------------


def table(checks: Sequence[Check], plain: bool) -> Table:
    """What was to be shown, what was found, and whether it holds."""
    rows = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False)
    for title in ("claim", "found", "holds"):
        rows.add_column(title)
    for check in checks:
        rows.add_row(check.claim, check.found, "[green]yes[/]" if check.holds else "[bold red]NO[/]")
    return rows


def demo(out: Path, epochs: int, blows: Sequence[Blow], seed: int, console: Console) -> Outcome:
    """Both runs, the comparison and the picture, in `out`; what an earlier demo left there goes. Raises Failed."""
    peace_run, trouble_run, picture = out / "uninterrupted", out / "killed", out / "loss.png"
    out.mkdir(parents=True, exist_ok=True)
    for run in (peace_run, trouble_run):
        if run.exists():
            shutil.rmtree(run)
        for beside in out.glob(f"{run.name}.*"):
            beside.unlink()
    picture.unlink(missing_ok=True)

    peace = in_peace(peace_run, epochs, console)
    attempts = in_trouble(trouble_run, epochs, peace.reached, blows, random.Random(seed), console)
    reference, victim = Stored(peace_run), Stored(trouble_run)
    checks = compare(reference, victim, peace, attempts, blows)
    draw(picture, reference.tensor("losses"), victim.tensor("losses"), attempts, peace.reached // epochs)
    return Outcome(peace, attempts, checks, picture)


def concluded(checks: Sequence[Check], console: Console, begun: float) -> int:
    """Print the checks of two runs and the verdict. Returns the exit status. `begun`: by the monotonic clock."""
    console.print()
    console.print(table(checks, plain=not console.is_terminal))
    holds = all(one.holds for one in checks)
    verdict = "The two runs are one, bit for bit." if holds else "SOMETHING DOES NOT HOLD."
    say(console, f"{verdict} {time.monotonic() - begun:.0f} s.")
    return 0 if holds else 1


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("demo-out"))
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--seed", type=int, default=0, help="of the moments of the kills and of the damages")
    args = options.parse_args()
    console, begun = Console(width=None if sys.stdout.isatty() else 120), time.monotonic()
    try:
        outcome = demo(args.out, args.epochs, BLOWS, args.seed, console)
    except Failed as error:
        say(console, f"The demo failed: {error}")
        return 1
    except KeyboardInterrupt:
        say(console, "Stopped; the trainer has been ended.")
        return 130
    console.print()
    console.print(table(outcome.checks, plain=not console.is_terminal))
    verdict = "The two runs are one, bit for bit." if outcome.holds else "THE TWO RUNS DIFFER."
    say(console, f"{verdict} {time.monotonic() - begun:.0f} s. Picture: {outcome.picture}")
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
