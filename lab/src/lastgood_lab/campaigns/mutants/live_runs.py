"""Mutants of the safeguards of readers of a run that changes meanwhile, and of runs that lie in memory beside that."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "live runs",
        ("live_runs",),
        ("a generation that training has deleted counts as damaged", "deletion-is-no-damage", Never()),
        ("a read generation is gone once training deletes it", "deleted-generation-read-to-its-end", Remove()),
        (
            "a COMMIT that is deleted while a run is listed is damage",
            "deleted-commit-is-not-broken",
            Instead("return error"),
        ),
        ("a drill ends in silence when training deletes all it copies", "drill-attempts-end", Never()),
        (
            "a load loses the generation that training deletes",
            "loaded-generation-kept",
            Swap("self._keep.enter_context(kept(tier, at))", "tier"),
        ),
        ("a run that is gone for a moment was deleted", "vanished-run-is-not-deleted", Instead("return True")),
        ("what could not be listed is deleted", "seen-again-is-not-deleted", Never()),
        ("a deletion in one place ends a load", "deleted-in-one-place-read-elsewhere", Never()),
        (
            "a copy of nothing succeeds",
            "empty-copy-is-no-success",
            Swap(" or (one is chosen[-1] and not (present or done or failed))", ""),
        ),
        (
            "a run of which nothing was read is good",
            "nothing-read-is-not-good",
            Swap(" or (at == wanted[-1] and not rows)", ""),
        ),
        ("a replay begins without its generation", "replay-needs-its-generation", Never()),
    ),
    *table(
        "left behind",
        ("memory_runs",),
        (
            "what lies in memory has an equal order",
            "order-above-memory-left-behind",
            Swap("self.known.left_order", "0"),
        ),
        ("an abandoned save in memory is not reported", "abandoned-save-in-memory-reported", Always()),
    ),
    *table(
        "replays",
        ("replay",),
        ("a replay fills the disk of the job", "replay-needs-free-space", Never()),
        ("a replay that is ended leaves its training", "ended-replay-leaves-no-process", Instead("process.wait()")),
        ("a replay kills a launcher before it has ended its ranks", "launcher-ends-its-ranks", Instead("pass")),
    ),
    *table(
        "removed memory",
        ("agent",),
        ("an agent that waits does not see that its folder is gone", "removed-folder-noticed", Instead("return drill")),
        (
            "an agent ends because its folder cannot be seen now",
            "unseen-folder-is-not-removed",
            Instead("return False"),
        ),
        ("memory that was made anew is not found", "records-of-removed-memory-written", Remove()),
    ),
)
