"""The conditions of the study: how a training fails, and what the job is expected to make of it. Names only.

What a rank does to itself is in faults.py, what happens to a node in nodes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KILLED = 137
LOST, ASKED = "lost", "asked"
"""names, before the number of the attempt, of files by which a rank asks for the loss and for the start of a node"""


@dataclass(frozen=True)
class Expected:
    """The cause that the supervisor has to name. `rank`: None where any rank may be the first one."""

    kind: str
    rank: int | None = None
    what: str = ""
    """a part of the text of the cause"""


@dataclass(frozen=True)
class Tolerance:
    """How far losses may be from those of the reference, where sums have another order.

    `first`: the largest difference until so many `steps` after the first failure. `mean`: the mean one over all steps;
    training makes of the smallest difference a visible one: once of 2e-7 one of 9e-5, within a single step. Variants
    that fail in the same way have the same order of sums, so their losses may not differ from each other at all.
    """

    steps: int = 2
    first: float = 1e-5
    mean: float = 0.1


@dataclass(frozen=True)
class Condition:
    """What happens after the steps of a schedule. `about`: a sentence for people.

    `causes`: what the supervisor has to name, failure by failure; the last one also for those that follow.
    `least_ranks`: fewer cannot meet it. `nodes`: of the job, as `--nnodes` has them; empty: one, or two for copies.
    `spares`: nodes in reserve. `flushes`: whether the size decides if saves have ended before a failure; else they have
    not. `on_files`: whether it needs a run whose files are written through `ports.Files`. `poisons`: whether a loss
    becomes NaN, so that the reference leaves out the same batches. `tolerance`: of losses, which alone are judged then;
    None: losses, parameters and buffers are those of the reference, to the bit.
    """

    about: str
    causes: Sequence[Expected]
    least_ranks: int = 1
    nodes: str = ""
    spares: int = 0
    flushes: bool = True
    on_files: bool = False
    poisons: bool = False
    tolerance: Tolerance | None = None

    @property
    def loses_nodes(self) -> bool:
        return bool(self.nodes)

    def expected(self, failure: int) -> Expected:
        """The cause of a failure, counted from 0."""
        return self.causes[min(failure, len(self.causes) - 1)]


EXIT, NODE = Expected("exit", 0, f"exit code {KILLED}"), Expected("node")
CONDITIONS = {
    "exit": Condition("rank 0 exits with code 137", [EXIT]),
    "kill": Condition("all ranks are killed at once", [Expected("signal", what="SIGKILL")]),
    "hang": Condition("rank 1 makes no further step", [Expected("hang", 1)], least_ranks=2),
    "errors": Condition(
        "rank 0 exits, and in each attempt a write of one save fails on another rank", [EXIT], on_files=True
    ),
    "delayed": Condition(
        "rank 0 exits, and each file of a save is delayed by a second, so that failures meet saves under way",
        [EXIT],
        flushes=False,
        on_files=True,
    ),
    "nan": Condition(
        "in the next step the loss of the last rank is NaN",
        [Expected("exception", what="TrainingDiverged")],
        poisons=True,
    ),
    "node": Condition(
        "all processes of one of two nodes are killed, and a node in reserve takes its place",
        [NODE],
        least_ranks=2,
        nodes="2",
        spares=1,
    ),
    "elastic": Condition(
        "first all processes of one of two nodes are killed, and the other one goes on alone; then rank 0 exits, and a "
        "second node joins",
        [NODE, EXIT],
        least_ranks=2,
        nodes="1:2",
        tolerance=Tolerance(),
    ),
}
