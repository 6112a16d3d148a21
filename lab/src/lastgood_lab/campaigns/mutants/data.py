"""Safeguards of the order of the samples, and of the record of what was trained on."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import DATA

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "sampler and audit",
        DATA,
        ("a loop that does not read from its sampler is reported", "unread-sampler-reported", Never()),
        ("a sampler that is not read stands still beside one that is", "idle-sampler-stands-still", Always()),
        (
            "what was counted already need not be read",
            "counted-step-needs-no-read",
            Instead("return self._cached is None"),
        ),
        ("a sampler that is given as sampler= is refused", "sampler-argument-refused", Never()),
        ("another order is refused", "changed-order-refused", Never()),
        ("another order in mid-epoch is refused", "changed-order-refused", Swap("cursor or ", "")),
        (
            "another seed is refused where an epoch begins",
            "changed-order-refused",
            Swap("(cursor or order.seed != self._seed)", "cursor"),
        ),
        ("another order is refused before anything is loaded", "order-checked-before-load", Instead('return ""')),
        ("earlier epochs keep their order", "earlier-epoch-orders-kept", Remove()),
        ("a step is counted once", "step-counted-once", Always()),
        (
            "steps are counted by their numbers",
            "steps-counted-by-number",
            Swap("step - max(self._step, previous)", "1"),
        ),
        (
            "no more steps are counted than batches were fetched",
            "counted-steps-were-fetched",
            Swap("place > at.fetched(self.steps_per_epoch)", "False"),
        ),
        (
            "steps across two iterations are refused",
            "counted-steps-were-fetched",
            Swap(" or (steps > 1 and not at.earlier_counted)", ""),
        ),
        (
            "the last step of an epoch takes what is left of it",
            "last-step-takes-remainder",
            Instead("left = self.remaining // each"),
        ),
        (
            "what was handed out ahead of a step is not counted",
            "prefetch-not-counted",
            Swap("self._sampler.batches_per_step is None", "True"),
        ),
        (
            "what was handed out ahead of a step is not counted at the end of an epoch",
            "prefetch-not-counted-at-epoch-end",
            Always(),
        ),
        ("an iteration from before a load is over", "stale-iteration-refused", Never()),
        ("numbers begin anew with a restore", "sampler-restarts-after-restore", Remove()),
        ("records of an audit are with one rank of another world", "audit-records-of-other-worlds", Never()),
        ("each record is with one rank", "audit-record-on-one-rank", Swap(":ranks", "")),
    ),
)
