"""Mutants of the safeguards of what several nodes hold together: what one of them lacks, or alone knows, is no loss."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "nodes left out",
        ("node_parity",),
        ("what a node that is left out has counts as lost", "left-out-node-lost-nothing", Always()),
        ("what is lost with a node left out too is waited for", "lost-with-left-out-nodes-too", Remove()),
    ),
    *table(
        "rebuilding without room",
        ("node_disks",),
        ("an older step is loaded while a node has no room", "full-memory-steps-over-nothing", Never()),
        (
            "a node without room keeps a copy below from being loaded",
            "full-memory-steps-over-nothing",
            Swap(" and not self._lies_below(at)", ""),
        ),
    ),
    *table(
        "copies of several nodes below",
        ("late_copies",),
        (
            "an agent does not read what other nodes have copied",
            "last-node-reads-all-parts",
            Swap("stop)", "stop, of=ranks)"),
        ),
        (
            "a mark of damage stays on a copy that is whole",
            "copy-of-parts-is-marked",
            Instead("if findings:\n    commit.mark(target, one, findings)"),
        ),
        (
            "agents copy parts of what a rewind has left behind",
            "abandoned-part-not-copied",
            Swap("at in chain", "True"),
        ),
    ),
    *table(
        "copies without their files",
        ("peers",),
        ("a manifest alone counts as a copy", "copy-without-its-file-is-sent", Swap(" or one.name not in there", "")),
        ("a file that is gone is not received", "finished-copy-not-replaced", Swap("file in there and ", "")),
    ),
    *table(
        "readings beside copies",
        ("agent_work",),
        ("a reading waits for slow copies", "copies-delay-no-reading", Swap('"read": self._verifying, ', "")),
    ),
    *table(
        "staged parts",
        ("agent_stage",),
        ("a part that was read verifies a whole save", "staged-part-verifies-nothing", Always()),
        ("the mark of a bad copy stays on the next one", "staged-anew-is-not-damaged", Remove()),
    ),
    *table(
        "survivors of other nodes",
        ("survivor",),
        (
            "the memory of another node is looked for on this one",
            "memory-of-committing-node-counts",
            Instead("others = first.others"),
        ),
    ),
)
