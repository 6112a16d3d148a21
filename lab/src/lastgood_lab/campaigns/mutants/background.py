"""Mutants of the safeguards of saves in the background, and of their snapshots."""

from __future__ import annotations

from .change import AfterNext, Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import LOOP, core

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "saves in flight",
        LOOP,
        ("a save that passes a multiple may be overtaken", "passed-multiple-pinned", Instead("since = n")),
        ("a save that ended does not free its place in flight", "finished-save-frees-place", Remove()),
        ("the place in flight is not freed when a save fails before its start", "unstarted-save-frees-place", Remove()),
        ("the outcome is delivered before the place in flight is freed", "place-freed-before-outcome", AfterNext()),
        ("a save does not wait for the end of an earlier attempt at its step", "earlier-attempt-ended-first", Remove()),
        ("threads are started only when a save needs them", "threads-started-ahead", Remove()),
        ("a newer commit does not cancel older saves in flight", "older-saves-overtaken", Instead("older = []")),
        ("a commit cancels newer saves, too", "older-saves-overtaken", Swap("<", "!=")),
        (
            "a commit cancels older saves that retention must keep",
            "older-saves-overtaken",
            Swap(" and not one.pinned", ""),
        ),
        ("a save is committed after a newer one", "overtaken-save-not-committed", Remove()),
        (
            "a commit may name a newer step as its predecessor",
            "commit-names-predecessor",
            Swap(" and one.step < at.step", ""),
        ),
        (
            "the copier continues after its save was cancelled",
            "copier-stops-when-unwanted",
            Swap("self.chunks.cancelled", "False"),
        ),
        ("cancelling a save does not wake the threads that wait for memory", "memory-waiters-woken", Remove()),
        ("a failed save does not release its chunks", "failed-save-drains-chunks", Remove()),
        ("a failed copy does not fail its save", "failed-copy-fails-save", Swap("failed", "None")),
        (
            "a failed copy leaves the training loop blocked",
            "failed-copy-unblocks-loop",
            Swap("self.handle", "if failed is None: self.handle"),
        ),
        ("the commit does not wait for the end of the copier", "copier-finished-before-commit", Remove()),
        ("the failure of a save is not raised in the training loop", "save-failure-raised-in-loop", Remove()),
        ("an overtaken save counts as a failure", "overtaken-is-no-failure", Remove()),
        (
            "only the first of several failures in a row is reported",
            "failure-reports-thin-out",
            Swap("reporting.is_reported(self.consecutive_failures)", "self.consecutive_failures == 1"),
        ),
        (
            "a durable save does not reset the count of failures in a row",
            "durable-save-resets-counts",
            Swap("self.consecutive_failures = ", ""),
        ),
        ("a clean exit does not save the newest step", "newest-step-saved-on-exit", Remove()),
        ("an exit saves an update under the number of the step before", "updated-state-not-saved-on-exit", Never()),
        ("an optimizer with gradients elsewhere counts as idle", "only-own-optimizers-are-idle", Never()),
        (
            "a due save waits for a place although it should be skipped",
            "due-save-skipped-when-full",
            Swap("skips or ", ""),
        ),
        (
            "a save that must be made is skipped when no place is free",
            "manual-save-not-skipped",
            Swap(" and not must", ""),
        ),
        ("upkeep continues while a save is in flight", "upkeep-yields-to-saves", Instead("return False")),
        ("the next save does not wait for overdue verification", "verify-before-next-save", Never()),
        ("the next save does not wait for overdue deletions", "delete-before-next-save", Never()),
        (
            "the next save waits for any number of deletions",
            "few-deletions-before-save",
            Swap("most=DELETIONS_AHEAD", ""),
        ),
        ("a full disk causes no deletion of older generations", "full-disk-relieved", Always()),
        (
            "a place below that hangs holds the first save for its bound",
            "bound-below-holds-no-save",
            Instead("_report_below(place.writer, whole)"),
        ),
        ("a place below that is closed early reports no bound", "bound-below-reported-at-close", AfterNext()),
        ("a full disk refuses COMMIT although an older generation may go", "full-disk-relieved-for-commit", Always()),
    ),
    *table(
        "update fence",
        LOOP,
        ("an optimizer's update does not wait for the copy", "update-waits-for-copy", Remove()),
        ("a failed copy leaves the update waiting", "failed-copy-releases-update", Remove()),
        (
            "the hook runs after each optimizer step instead of before it",
            "hook-before-each-step",
            Swap("register_step_pre_hook", "register_step_post_hook"),
        ),
        ("closing removes no hooks", "hooks-removed-at-close", Remove()),
        ("an optimizer that left the state keeps its hook", "stale-hooks-removed", Remove()),
        ("a hook is removed while a copy still reads", "unhook-waits-for-copy", Remove()),
        (
            "a forked process waits for the parent's copy",
            "fork-waits-for-no-copy",
            Swap(" or self._process != os.getpid()", ""),
        ),
        ("the fence does not delay the next update for a snapshot", "snapshot-holds-update", Remove()),
        (
            "buffers that forward may change are not cloned",
            "forward-buffers-cloned",
            Swap("tensors.keys() - references.keys", ""),
        ),
        ("a blocking save copies in the background", "blocking-save-waits-for-copy", Always()),
        ("the copy overlaps although no optimizer can be hooked", "no-hook-no-overlap", Never()),
        ("Ctrl-C during a copy is swallowed", "interrupt-in-copy-raised", Remove()),
        ("a save overlaps under FSDP1, which moves parameters", "fsdp1-waits-for-copy", Remove()),
        (
            "tensors that no optimizer updates are cloned however large they are",
            "large-averages-not-cloned",
            Instead("return found.trained"),
        ),
        ("averages that no optimizer updates are not cloned", "averages-cloned", Remove()),
        (
            "a tensor from an object's own state_dict is not cloned",
            "objects-own-tensors-cloned",
            Swap(" or captured.origins[name] is Origin.OTHER", ""),
        ),
        (
            "the holders of the tensors are not searched again after a change",
            "stale-bearers-refreshed",
            Swap(" or plan.found_in is not captured.origins or not plan.overlappable.holds(captured)", ""),
        ),
        (
            "a plan of files is used after the state has changed",
            "stale-layout-rebuilt",
            Swap(" or (plan.key, plan.finite) != (captured.key, must) or plan.partition is not partition", ""),
        ),
        ("a replaced or changed tensor does not count as torn", "replaced-tensors-are-torn", Remove()),
        (
            "another tensor in the same place does not count as torn",
            "bearer-moved-or-changed",
            Swap("container.get(key) is not tensor or ", ""),
        ),
        (
            "a tensor with another address does not count as torn",
            "bearer-moved-or-changed",
            Swap(" or tensor.data_ptr() != address", ""),
        ),
        (
            "a tensor with another version does not count as torn",
            "bearer-moved-or-changed",
            Swap(" or tensor._version != version", ""),
        ),
        ("a tensor that moved before it was read does not count as torn", "moved-before-read-is-torn", Remove()),
        ("samples of the live tensors are not compared after the copy", "samples-compared-after-copy", Remove()),
        ("samples are not compared with the copied bytes", "samples-compared-during-copy", Remove()),
        ("a torn save is not dropped", "torn-save-dropped", Remove()),
        ("the full check does not compare digests", "full-check-compares", Remove()),
        (
            "saves keep overlapping after torn saves in a row",
            "repeated-tears-block",
            Swap("outcomes.consecutive_torn >= TORN_LIMIT", "False"),
        ),
    ),
    *table(
        "update fence",
        core(),
        (
            "a durable save does not reset the count of torn saves in a row",
            "durable-save-resets-counts",
            Swap(" = self.consecutive_torn", ""),
        ),
    ),
    *table(
        "preemption",
        ("preemption",),
        ("the interpreter waits for the timer", "last-timer-delays-no-exit", Instead("return False")),
        (
            "the timer ends before a thread that hangs",
            "last-timer-delays-no-exit",
            Instead("return interpreter_is_ending()"),
        ),
    ),
)
