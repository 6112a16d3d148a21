"""The commit among agents, peers and a coordinator that may die, explored by a deterministic scheduler.

    python -m lastgood_lab.campaigns.node_commit [--schedules 1000000] [--seed 0] [--parity | --late | --in-flight]
    python -m lastgood_lab.campaigns.node_commit --replay 17/3          # one schedule: first act 17, second act 3
    python -m lastgood_lab.campaigns.node_commit --safeguards only      # no report

Real are: seal, publish, retire and their tier on a directory; saves and agreements of the ranks; NodeDisks and its
requests; copies to other nodes, and parity among them, which agents make and rebuild from; the agent with its socket,
its copies to the home and the removal of memory; copies to the home by a job; opening, restoring and retention. Files,
locks, sockets, clocks and messages are modelled (node_world.py), and with them these decisions of run/access.py: who
holds the lock of the home, and how an agent is asked to give way. Left out are reading a generation again before its
mark, and the bytes of a wire.

At each call to a file and each message the scheduler may let another actor go on; processes and machines die, and
messages are lost, late, handled twice or not answered. Each change is held to the rules of node_ledger.py. At the end
the agents have time. Then a restore must find the newest generation that a save returned, with its bytes, as far as
nodes are left that have it; and the home must have it, as far as an agent has what it needs.

`--parity`: the nodes share parity in place of copies, of which a bit is flipped at times; jobs rebuild what lost nodes
had. `--late`: the nodes have copies, and their agents commit a save that all ranks had sealed when the job was lost.
`--in-flight`: two or three saves of a job are made at the same time, and committed in any order.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lastgood_lab.campaigns.checkout import checkout
from lastgood_lab.campaigns.reports import report
from lastgood_lab.campaigns.trials import progress
from lastgood_lab.node_explored import explored
from lastgood_lab.node_schedules import IN_FLIGHT_SHAPES, LATE_SHAPES, PARITY_SHAPES, SHAPES, Explorer, Shape
from lastgood_lab.node_world import World

SECOND_ACTS = 10
"""Second acts of each first one; fewer where two of them were as others before: there was little left to do."""
FIRST_ACTS = 100
"""First acts of one job of a process."""
SEARCH = 30_000
"""In so many schedules a removed safeguard is to be found."""

SAFEGUARDS = (
    "manifest-before-commit",
    "one-failure-fails-all",
    "answer-belongs-to-its-request",
    "unknown-commit-deletes-nothing",
    "commit-on-some-nodes-is-unknown",
    "doubt-survives-lost-store",
    "commit-copied-after-all-parts",
    "copy-counts-with-its-manifest",
    "held-until-all-have-it",
    "copied-generation-held",
    "uncommit-before-delete",
    "open-memory-not-removed",
    "newest-incarnation-first",
)
"""Those of the commit whose removal can break a rule here. Of the others in the same code each has a second one behind
it: without "commit-copied-after-all-nodes" the copy of the records fails, because a manifest is missing; without
"finished-copy-not-replaced" a finished copy is replaced whole, by the same bytes, as nothing is damaged here."""


PARITY_SAFEGUARDS = (
    "parity-beside-its-data",
    "parity-needs-its-nodes",
    "stripes-carry-manifests",
    "stripe-cell-verified",
    "rebuilt-manifest-last",
    "manifest-beside-its-files",
    "lost-node-is-no-damage",
    "unreachable-record-not-missing",
    "outage-steps-over-nothing",
    "damage-is-no-outage",
    "lost-generation-held",
    "copied-generation-held",
    "held-until-all-have-it",
)
"""Those whose removal can break a rule here where nodes share parity. Records that are not true, or of another
generation, do not come about here ("stripe-record-plausible", "stripes-of-this-generation"); a damaged copy of a
manifest, where another copy is left, comes too seldom ("rebuilt-manifest-matches-seal")."""


LATE_SAFEGUARDS = "late-commit-put-on-all-nodes", "late-commit-refused-while-open"
"""Those of a late commit by agents whose removal can break a rule here. A COMMIT with too few seals is refused again
where it is created. That other nodes copy what was committed late is not seen: agents of a second act begin anew."""


IN_FLIGHT_SAFEGUARDS = (
    "newer-copies-not-replaced",
    "held-until-all-have-it",
    "copied-generation-held",
    "late-commit-put-on-all-nodes",
)
"""Those whose removal can break a rule here where saves are in flight at the same time. An older save that is committed
although a newer one was ("overtaken-save-not-committed") breaks none: it is one more that can be restored."""


class Subject(NamedTuple):
    """What is explored. `name`: of the option and of the report. `shapes`: of the jobs. `safeguards`: to remove."""

    name: str
    shapes: tuple[Shape, ...]
    safeguards: tuple[str, ...]

    def explorer(self, world: World) -> Explorer:
        return Explorer(world, self.shapes)


COPIES = Subject("directory", SHAPES, SAFEGUARDS)
PARITY = Subject("parity", PARITY_SHAPES, PARITY_SAFEGUARDS)
LATE = Subject("late", LATE_SHAPES, LATE_SAFEGUARDS)
IN_FLIGHT = Subject("in-flight", IN_FLIGHT_SHAPES, IN_FLIGHT_SAFEGUARDS)


class Explored(NamedTuple):
    """What first acts of consecutive seeds found. `digests`: of their schedules."""

    digests: list[int]
    problems: list[str]
    outcomes: Counter[str]


def explore(seeds: range, subject: Subject = COPIES, until_found: bool = False) -> Explored:
    """Play the first acts of these seeds, each with its second acts. `until_found`: end with the first violation."""
    logger = logging.getLogger("lastgood")
    level_before = logger.level
    logger.setLevel(logging.CRITICAL)  # each schedule reports what it repairs
    world, digests, problems, outcomes = World(), list[int](), list[str](), Counter[str]()
    try:
        with explored(world):
            explorer = subject.explorer(world)
            for seed in seeds:
                for name, digest, wrong, outcome in played(explorer, seed):
                    digests.append(digest)
                    outcomes[outcome] += 1
                    problems += [f"{name}: {one}" for one in wrong]
                if problems and until_found:
                    break
    finally:
        logger.setLevel(level_before)  # a test explores in the process of other tests
        world.crew.close()
    return Explored(digests, problems, outcomes)


def played(
    explorer: Explorer, seed: int, acts: range = range(SECOND_ACTS)
) -> Iterator[tuple[str, int, list[str], str]]:
    """The schedules that begin with one first act: name, digest, violations and outcome of each."""
    scene = explorer.first_act(seed)
    if scene.problems:
        yield f"{seed} ({'; '.join(scene.story)})", scene.digest, scene.problems, "violation"
        return
    seen, repeated = set[int](), 0
    for act in acts:
        found = explorer.second_act(scene, seed * 1000 + act)
        repeated += found.digest in seen
        if repeated == 2:
            return
        seen.add(found.digest)
        yield f"{seed}/{act} ({found.story})", found.digest, found.problems, found.outcome


# ---- removed safeguards ------------------------------------------------------------------------------------------


def without(guard: str, schedules: int = SEARCH, subject: Subject = COPIES) -> tuple[int, str]:
    """Explore a copy of the sources without a safeguard. Returns after how many schedules it was found, and as what.

    The number is 0 if it was not found.
    """
    from lastgood_lab.campaigns.mutants import MUTANTS  # imported late: they read the tests of the checkout
    from lastgood_lab.campaigns.mutation import holder

    mutant = next(one for one in MUTANTS if one.guard == guard and not one.equivalent)
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        root, copy = checkout(), Path(folder, "src")
        shutil.copytree(root / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        file = holder(mutant)
        (copy / file.relative_to(root / "src")).write_text(mutant.apply(file.read_text()))
        command = [sys.executable, "-m", "lastgood_lab.campaigns.node_commit", "--search", str(schedules)]
        command += [f"--{subject.name}"] if subject is not COPIES else []
        paths = [str(copy), str(root / "lab/src"), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    count, _, what = ended.stdout.strip().partition(" ")
    if not count.isdigit():
        return 0, f"the search ended with {ended.returncode}: {ended.stderr.strip()[-300:]}"
    return int(count), what


def search(schedules: int, seed: int, subject: Subject) -> int:
    """Print after how many schedules the first violation was found, and it; or 0. Returns the exit status."""
    found = explore(range(seed, seed + schedules // SECOND_ACTS + 1), subject, until_found=True)
    print(len(found.digests) if found.problems else 0, found.problems[0] if found.problems else "")
    return int(bool(found.problems))


# ---- the campaign ------------------------------------------------------------------------------------------------


def _work(job: tuple[range, Subject]) -> Explored:
    return explore(*job)


def campaign(schedules: int, seed: int, jobs: int, subject: Subject) -> tuple[set[int], list[str], Counter[str], int]:
    """Explore until so many distinct schedules were played, or until Ctrl-C.

    Returns them, the violations, the outcomes and how many ran.
    """
    seen, problems, outcomes, show = set[int](), list[str](), Counter[str](), progress(schedules)
    starts = range(seed, seed + 10**9, FIRST_ACTS)
    todo = ((range(start, start + FIRST_ACTS), subject) for start in starts)
    # The children ignore Ctrl-C: it ends the campaign early, and the report says how many schedules were played.
    ignore = signal.signal, (signal.SIGINT, signal.SIG_IGN)
    with (
        multiprocessing.get_context("fork").Pool(jobs, *ignore, maxtasksperchild=100) as pool,
        contextlib.suppress(KeyboardInterrupt),
    ):
        running = [pool.apply_async(_work, (next(todo),)) for _ in range(2 * jobs)]
        while len(seen) < schedules:
            found = running.pop(0).get()
            running.append(pool.apply_async(_work, (next(todo),)))
            seen.update(found.digests)
            problems += found.problems
            outcomes += found.outcomes
            if found.problems:
                print("", *found.problems, sep="\n", flush=True)
            show(min(len(seen), schedules) // 20 * 20, len(problems))
    return seen, problems, outcomes, sum(outcomes.values())


def replay(which: str, subject: Subject) -> int:
    """Play one schedule again and print what is wrong with it. Returns the exit status."""
    seed, _, act = which.partition("/")
    acts = range(int(act), int(act) + 1) if act else range(0)
    world = World()
    with explored(world):
        found = list(played(subject.explorer(world), int(seed), acts))
    world.crew.close()
    for name, _, problems, outcome in found:
        print(name, outcome, *problems, sep="\n  ")
    return int(any(one[2] for one in found))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--schedules", type=int, default=1_000_000, help="distinct schedules")
    options.add_argument("--seed", type=int, default=0, help="of the first act that is played first")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--parity", action="store_true", help="nodes share parity, in place of copies")
    options.add_argument("--late", action="store_true", help="agents commit what all ranks of a lost job had sealed")
    options.add_argument("--in-flight", action="store_true", help="saves at the same time, committed in any order")
    options.add_argument("--replay", default="", help="FIRST/SECOND: play one schedule again")
    options.add_argument("--search", type=int, default=0, help="end with the first violation; writes no report")
    options.add_argument("--safeguards", choices=("too", "only", "not"), default="too", help="whether to remove these")
    args = options.parse_args()
    subject = PARITY if args.parity else LATE if args.late else IN_FLIGHT if args.in_flight else COPIES
    if args.replay:
        return replay(args.replay, subject)
    if args.search:
        return search(args.search, args.seed, subject)
    begun, found = time.monotonic(), None
    if args.safeguards != "only":
        found = campaign(args.schedules, args.seed, args.jobs, subject)
    seconds = time.monotonic() - begun
    removed = {guard: without(guard, SEARCH, subject) for guard in subject.safeguards if args.safeguards != "not"}
    unfound = [guard for guard, (count, _) in removed.items() if not count]
    table = [f"| `{guard}` | {count or 'not found'} | {what[:200]} |" for guard, (count, what) in removed.items()]
    if found is None:
        print(*table, sep="\n")
        return int(bool(unfound))
    seen, problems, outcomes, played_count = found
    facts = {
        "distinct_schedules": len(seen),
        "schedules_played": played_count,
        "violations": len(problems),
        "seconds": round(seconds),
        "milliseconds_a_schedule": round(1000 * seconds * args.jobs / played_count, 2),
        "safeguards_removed": len(removed),
        "safeguards_found": len(removed) - len(unfound),
        "problems": problems[:50],
    }
    rows = [f"| {name} | {count:,} |" for name, count in outcomes.most_common()]
    report(
        "node_commit",
        "The commit among agents, peers and a dying coordinator",
        facts,
        [
            "\n".join(["| how schedules end | schedules |", "|---|---|", *rows]),
            "\n".join(["| removed safeguard | found after schedules | as |", "|---|---|---|", *table]),
            *([f"- {one}" for one in problems[:50]]),
        ],
        tier=subject.name,
    )
    print(*problems[:50], sep="\n")
    return int(bool(problems or unfound))


if __name__ == "__main__":
    sys.exit(main())
