"""Mutants of the safeguards of the order of the samples, of the audit of the samples that were trained with, and of
loops and states that do not belong together."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import DATA

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "sampler and audit",
        DATA,
        (
            "windows that are left out are trained",
            "skipped-windows-passed",
            Swap("self.next(epoch, window)", "window"),
        ),
        (
            "samples that were left out count as missing",
            "skipped-samples-listed",
            Swap(" - expected[left_out].size", ""),
        ),
        ("a loop that does not read from its sampler is not reported", "unread-sampler-reported", Never()),
        ("a sampler that is not read advances beside one that is", "idle-sampler-stands-still", Always()),
        (
            "a step that is counted already must be read again",
            "counted-step-needs-no-read",
            Instead("return self._cached is None"),
        ),
        ("a sampler of whole batches is accepted as sampler=", "sampler-argument-refused", Never()),
        ("a state with another order is accepted", "changed-order-refused", Never()),
        ("a state with another order is accepted in mid-epoch", "changed-order-refused", Swap("cursor or ", "")),
        (
            "a state with another seed is accepted at the start of an epoch",
            "changed-order-refused",
            Swap("(cursor or order.seed != own.seed)", "cursor"),
        ),
        ("windows of another order are left out", "windows-of-another-order-kept", Never()),
        ("another order is refused only after the load has begun", "order-checked-before-load", Instead('return ""')),
        ("the order of earlier epochs is forgotten", "earlier-epoch-orders-kept", Remove()),
        ("a step is counted again at each call", "step-counted-once", Always()),
        (
            "several steps are counted as one",
            "steps-counted-by-number",
            Swap("step - max(self._step, previous)", "1"),
        ),
        (
            "more steps are counted than batches were fetched",
            "counted-steps-were-fetched",
            Swap("place > self._place(at.epoch, at.next_step)", "False"),
        ),
        (
            "several steps across two iterations are accepted",
            "counted-steps-were-fetched",
            Swap(" or (steps > 1 and not at.earlier_counted)", ""),
        ),
        (
            "the last step of an epoch does not take the batches that remain",
            "last-step-takes-remainder",
            Instead("left = (windows - window) // each"),
        ),
        (
            "batches that are yielded ahead of a step are counted",
            "prefetch-not-counted",
            Swap("self._sampler.batches_per_step is None", "True"),
        ),
        (
            "batches that are yielded ahead are counted at the end of an epoch",
            "prefetch-not-counted-at-epoch-end",
            Always(),
        ),
        (
            "batches at the end of an epoch that no step has trained are counted",
            "last-step-of-epoch-not-presumed",
            Swap("self._counts_inside", "False"),
        ),
        ("ranks have different numbers of batches in a window", "equal-number-of-batches", Never()),
        ("a step is counted in the middle of a window", "step-completes-window", Never()),
        ("a loop that does not weight its batches is accepted", "weight-and-end-are-read", Never()),
        ("an iteration that began before a load continues", "stale-iteration-refused", Never()),
        ("a restore does not restart the counting of steps in samplers", "sampler-restarts-after-restore", Remove()),
        ("audit records of another world are not divided among the ranks", "audit-records-of-other-worlds", Never()),
        ("an audit record goes to several ranks", "audit-record-on-one-rank", Swap(":ranks", "")),
    ),
    *table(
        "loops and states",
        ("other_objects", "wrapped_optimizers", "sampler_loop"),
        ("another schedule is loaded as if it were this one", "other-schedule-refused", Instead('return ""')),
        ("a loop that trains other objects is not named", "untrained-state-reported", Never()),
        ("an optimizer that the state lacks is not named", "forgotten-optimizer-reported", Never()),
        (
            "the optimizer state of a parameter is loaded that is not",
            "state-of-skipped-parameter-skipped",
            Instead('return ""'),
        ),
        ("what a load leaves out is not named", "skipped-entries-reported", Never()),
        ("trained parameters that the state lacks are not named", "unstored-parameters-reported", Never()),
        ("copies that an optimizer trains are named", "master-weights-are-no-entries", Instead("return lacking")),
        ("a sampler that the state lacks is not named", "forgotten-sampler-reported", Instead("in_use = False")),
        ("a scaler that the state lacks is not named", "forgotten-scaler-reported", Instead("in_use = False")),
        ("what an earlier training has used is named", "garbage-is-not-in-use", Remove()),
        (
            "a schedule of a wrapped optimizer is not named",
            "wrapped-optimizer-has-schedule",
            Swap("unwrapped(one)", "one"),
        ),
        ("a second schedule is not named", "second-schedule-reported", Instead("return []")),
        ("an average that the state lacks is not named", "forgotten-average-reported", Instead("in_use = False")),
        ("a dataset that workers advance is not named", "datasets-of-workers-reported", Never()),
        ("a tensor that grows is not named", "reshaped-tensor-is-reported", Never()),
        ("samples count as steps", "unchanged-steps-are-calls", Remove()),
    ),
    *table(
        "loops and states",
        ("exit", "saved_twice", "rewind", "places"),
        ("the number of the step before is not reported", "number-behind-is-reported", Never()),
        ("buffers of the next step are not reported", "forward-after-step-is-reported", Never()),
        ("a batch that no step has trained is not reported", "batch-without-step-is-reported", Never()),
        ("NaN of the next step is saved at the exit", "nan-of-next-step-not-saved", Never()),
        ("buffers that have changed are not reported", "changed-buffers-reported", Remove()),
        ("steps before the first save are not seen", "updates-seen-from-restore-on", Remove()),
        ("an optimizer that has stepped is new", "stepped-optimizer-at-step-0-reported", Remove()),
        ("half an accumulation is saved", "repeated-step-saves-nothing", Swap(" and is_new", "")),
        ("a larger state waits for copies", "larger-state-waits-for-no-copy", Swap("wait_for_saves", "wait")),
    ),
)
