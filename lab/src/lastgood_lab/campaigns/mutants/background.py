"""Safeguards of saves that run behind the training loop, and of their snapshots."""

from __future__ import annotations

from .change import AfterNext, Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import LOOP, core

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "saves in flight",
        LOOP,
        ("place in flight freed after a save", "finished-save-frees-place", Remove()),
        ("place in flight freed when no save began", "unstarted-save-frees-place", Remove()),
        ("place in flight freed before the outcome is delivered", "place-freed-before-outcome", AfterNext()),
        ("earlier attempt at a step ended before the next", "earlier-attempt-ended-first", Remove()),
        ("threads started before the first save needs them", "threads-started-ahead", Remove()),
        ("older saves overtaken by newer ones", "older-saves-overtaken", Instead("older = []")),
        ("newer saves never overtaken", "older-saves-overtaken", Swap("<", "!=")),
        ("save that retention keeps never overtaken", "older-saves-overtaken", Swap(" and not one.pinned", "")),
        ("overtaken save not committed", "overtaken-save-not-committed", Remove()),
        ("parent with an earlier step", "commit-names-predecessor", Swap(" and one.step < at.step", "")),
        (
            "copier stopped when its save is cancelled",
            "copier-stops-when-unwanted",
            Swap("flight.chunks.cancelled", "False"),
        ),
        ("threads waiting for memory woken", "memory-waiters-woken", Remove()),
        ("chunks of a failed save released", "failed-save-drains-chunks", Remove()),
        ("failed copy fails its save", "failed-copy-fails-save", Swap("failed", "None")),
        (
            "failed copy unblocks the training loop",
            "failed-copy-unblocks-loop",
            Swap("flight.handle", "if failed is None: flight.handle"),
        ),
        ("copier finished before the commit", "copier-finished-before-commit", Remove()),
        ("failure of a save raised in the training loop", "save-failure-raised-in-loop", Remove()),
        ("overtaken save not counted as a failure", "overtaken-is-no-failure", Remove()),
        (
            "failures are reported at growing intervals",
            "failure-reports-thin-out",
            Swap("_is_power_of_two(self.consecutive_failures)", "self.consecutive_failures == 1"),
        ),
        (
            "a row of failures ends with a durable save",
            "durable-save-resets-counts",
            Swap("self.consecutive_failures = ", ""),
        ),
        ("the newest step is saved on a clean exit", "newest-step-saved-on-exit", Remove()),
        ("due save is skipped", "due-save-skipped-when-full", Swap("skips or ", "")),
        ("save by hand is not skipped", "manual-save-not-skipped", Swap(" and not must", "")),
        ("upkeep interrupted by a save", "upkeep-yields-to-saves", Instead("return False")),
        ("verifying goes before the next save", "verify-before-next-save", Never()),
        ("deleting goes before the next save", "delete-before-next-save", Never()),
        ("few deletions go before a save", "few-deletions-before-save", Swap("most=DELETIONS_AHEAD", "")),
        ("a full disk is relieved", "full-disk-relieved", Always()),
    ),
    *table(
        "update fence",
        LOOP,
        ("optimizer update waits for the copy", "update-waits-for-copy", Remove()),
        ("fence ends when the copy fails", "failed-copy-releases-update", Remove()),
        ("hook before each step", "hook-before-each-step", Swap("register_step_pre_hook", "register_step_post_hook")),
        ("hooks removed at the end", "hooks-removed-at-close", Remove()),
        ("hooks of objects that left the state removed", "stale-hooks-removed", Remove()),
        ("older copy is waited for when hooks go", "unhook-waits-for-copy", Remove()),
        ("a fork waits for no copy", "fork-waits-for-no-copy", Swap(" or self._process != os.getpid()", "")),
        ("snapshot holds the next update", "snapshot-holds-update", Remove()),
        (
            "buffers that forward may change cloned",
            "forward-buffers-cloned",
            Swap("tensors.keys() - references.keys", ""),
        ),
        ("blocking waits for the copy", "blocking-save-waits-for-copy", Always()),
        ("no overlap without a hook", "no-hook-no-overlap", Never()),
        ("Ctrl-C in a copy is raised", "interrupt-in-copy-raised", Remove()),
        ("FSDP1 waits for the copy", "fsdp1-waits-for-copy", Remove()),
        ("large average is not cloned", "large-averages-not-cloned", Instead("return found.trained")),
        ("average by hand is cloned", "averages-cloned", Remove()),
        (
            "what an object says itself is cloned",
            "objects-own-tensors-cloned",
            Swap(" or captured.origins[name] is Origin.OTHER", ""),
        ),
        (
            "holders of tensors searched again",
            "stale-bearers-refreshed",
            Swap(" or plan.found_in is not captured.origins or not plan.overlappable.holds(captured)", ""),
        ),
        (
            "layout planned again",
            "stale-layout-rebuilt",
            Swap(" or (plan.key, plan.finite) != (captured.key, must) or plan.partition is not partition", ""),
        ),
        ("torn: identity and version", "replaced-tensors-are-torn", Remove()),
        (
            "torn: another tensor hangs there",
            "bearer-moved-or-changed",
            Swap("container.get(key) is not tensor or ", ""),
        ),
        ("torn: it lies elsewhere", "bearer-moved-or-changed", Swap(" or tensor.data_ptr() != address", "")),
        ("torn: its version", "bearer-moved-or-changed", Swap(" or tensor._version != version", "")),
        ("torn: moved before it was read", "moved-before-read-is-torn", Remove()),
        ("torn: samples after the copy", "samples-compared-after-copy", Remove()),
        ("torn: samples in the copy", "samples-compared-during-copy", Remove()),
        ("torn save is dropped", "torn-save-dropped", Remove()),
        ("full check compares", "full-check-compares", Remove()),
        (
            "twice torn, then blocking",
            "repeated-tears-block",
            Swap("outcomes.consecutive_torn >= TORN_LIMIT", "False"),
        ),
    ),
    *table(
        "update fence",
        core(),
        ("torn in a row", "durable-save-resets-counts", Swap(" = self.consecutive_torn", "")),
    ),
)
