"""Mutants of the safeguards of training that diverges: what it was before stays, what it has become is marked,
and its batches are left out on all ranks alike."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "divergence",
        ("sentinel", "recovery"),
        (
            "what was compared is deleted for what was not",
            "compared-one-kept",
            Swap(" and at != compared", ""),
        ),
        ("a scaler may fail for ever", "overflows-end", Instead("pass")),
        ("no comparison is noted", "compared-steps-noted", Remove()),
        ("slots are saved to before the comparison", "compared-before-saved-to-slots", Never()),
        ("what has diverged is good until the next restore", "suspects-marked-at-once", Remove()),
        ("a bad step that was saved is deleted", "saved-step-kept-for-people", Remove()),
        (
            "a supervisor blames batches that a Sentinel has not",
            "sentinel-has-judged-itself",
            Instead("judged = False"),
        ),
        ("other batches at one comparison count as one failure", "other-batches-are-another-failure", Never()),
        ("without advice what has diverged is good", "suspects-marked-without-advice", Instead("pass")),
        ("a norm that is too large for its scale enters the mean", "overflow-is-no-hit", Always()),
        ("a lost end of an epoch is not reported", "passed-end-of-epoch-is-reported", Never()),
        ("a step that no save has is shown as saved", "shown-step-was-saved", Swap("base", "first - 1")),
        ("a group without a backend for the processor compares there", "group-without-cpu-on-cuda", Never()),
    ),
    *table(
        "divergence",
        ("skips", "ranks_faults", "beat", "heartbeat", "host_signs"),
        ("a second run has the steps of the first", "steps-are-those-of-one-run", Swap("self._is_new", "False")),
        ("windows are left out of another order", "skips-belong-to-their-order", Remove()),
        ("ranks leave out different windows", "ranks-leave-out-the-same", Swap("alone", "len(samplers) == 1")),
        ("a loop in another thread shows no phase", "loop-is-where-it-restores", Remove()),
        ("a file on a slow mount delays signals", "file-delays-no-signal", Swap("SHORT_SECONDS", "READ_SECONDS")),
    ),
    *table(
        "supervisor",
        ("recovery", "beat", "verdict", "lost_supervisor", "unread_files", "preemption", "run_arguments"),
        ("lost nodes make a generation suspect", "lost-nodes-blame-no-state", Never()),
        ("lost nodes end the job", "lost-nodes-blame-no-program", Swap("min(len({*lost}), LOST_NODES)", "0")),
        ("a lost store makes a generation suspect", "lost-store-blames-no-state", Swap("one.cause == STORE or ", "")),
        ("lost nodes at one step are the program's", "lost-nodes-are-failures-each", Swap("NODE, ", "")),
        ("a phase has a name of lastgood", "own-phases-are-no-names", Instead("own = True")),
        ("a loop that does not restore has not begun", "loop-without-restore-has-begun", Remove()),
        ("a rank that serves has to restore", "serving-ranks-restore-nothing", Swap("in asked", "in ranks")),
        ("a closed run is awaited for ever", "end-on-other-nodes-counts", Instead("return False")),
        ("a last save ends with another code", "supervised-run-ends-with-75", Instead("pass")),
        ("a cause is mistyped, and has no bound", "mistyped-cause-is-refused", Never()),
        ("an attempt's own saves do not count", "own-saves-count-for-next-job", Instead("pass")),
        (
            "a run has the position of the run before it",
            "position-is-that-of-this-run",
            Swap("(0, 0, 0)", "(1, 0, 0)"),
        ),
    ),
    *table(
        "supervisor",
        ("supervise", "lost_supervisor"),
        ("slots of ranks are no run", "slots-of-ranks-are-one-run", Instead("pass")),
        ("saves in slots do not count", "saves-in-slots-are-counted", Instead("there = tier")),
    ),
    *table(
        "supervisor",
        ("several_nodes", "moved_store", "run_arguments"),
        ("a signal to all processes ends the membership", "membership-outlives-signals", Remove()),
        ("a signal to all processes ends the store", "store-outlives-signals", Remove()),
        ("the name of a node says whether the store is there", "node-0-holds-static-store", Remove()),
        ("a node that another job did not need has succeeded", "other-job-is-no-own-end", Never()),
    ),
    *table(
        "supervisor",
        ("attempt",),
        ("a page that was removed shows nothing", "removed-page-is-read", Remove()),
    ),
    *table(
        "supervisor",
        ("run_signals",),
        ("a signal ends the shell of a command first", "owner-of-run-is-asked-first", Instead("owner = None")),
        ("what follows in a command is not asked", "rest-of-command-is-asked-too", Remove()),
    ),
    *table(
        "data",
        ("sampler_loop", "elastic"),
        (
            "a loader replaces the position of its sampler",
            "sampler-keeps-its-position",
            Swap("if replaces", "if False"),
        ),
        ("an evaluation has to read weights", "evaluation-makes-no-step", Always()),
    ),
    *table(
        "adaptive interval",
        ("agreeing",),
        (
            "after a second restore rank 0 has another interval than the others",
            "restore-begins-with-first-interval",
            Swap("cadence.first_steps", "cadence.auto.interval_steps"),
        ),
    ),
    *table(
        "divergence",
        ("sampler_loop", "checkpointer", "other_objects"),
        ("a sampler that is not saved is not reported", "sampler-left-out-is-reported", Never()),
        ("a loader of another world is not reported", "loader-of-another-world-is-reported", Never()),
        (
            "a layer that was taken out is lost",
            "removed-layer-is-no-loss",
            Swap("one.grad is not None or known.get(one)", "True"),
        ),
        (
            "a metric that never comes is not reported",
            "lacking-metric-reported",
            Swap("self._ranks.rank == 0", "False"),
        ),
    ),
    *table(
        "divergence",
        ("checkpointer",),
        ("a loop that only saves has a Sentinel that sees nothing", "options-without-step-reported", Never()),
    ),
    *table(
        "divergence",
        ("integrations_transformers",),
        ("a training that has ended passes for one that was trained", "ended-training-reported", Never()),
        ("a loss that is trained is not saved", "trained-loss-is-saved", Instead("beside = {}")),
    ),
    *table(
        "divergence",
        ("integrations_accelerate",),
        (
            "batches of half a step count",
            "batches-after-step-are-not-saved",
            Swap("self._marked", "self._accelerator.step"),
        ),
        (
            "the position is later than the step",
            "position-is-that-of-the-step",
            Swap("self._marked", "self._marked if self._ordered.left else self._taken()"),
        ),
    ),
    *table(
        "divergence",
        ("ranks_saved_once",),
        ("a rank's part of a metric counts as the whole", "sharded-metric-is-whole", Swap(".full_tensor()", "")),
        ("slots replace the last good save unnoticed", "late-comparison-in-slots-reported", Never()),
    ),
    *table(
        "divergence",
        ("rank_programs",),
        ("a child of a rank fails for it", "forked-child-is-no-rank", Swap("os.getpid() == rank and ", "")),
        ("a rank is reaped before its end is read", "ended-rank-not-reaped", Never()),
        ("a warning ends what a command has started", "warning-ends-no-command", Always()),
        ("a long error is searched as a whole", "long-error-is-cut", Never()),
    ),
    *table(
        "supervisor",
        ("verdict",),
        ("a node decides beside the one that it follows", "followed-node-is-not-lost", Remove()),
        (
            "a node that joins late ends a newer round",
            "late-join-ends-no-newer-round",
            Instead('self._membership.put({"round": self._token}, job=True)'),
        ),
        ("the reports of all attempts stay in the store", "old-reports-are-deleted", Remove()),
        ("a report is read without its deleted pieces", "deleted-report-is-not-read", Always()),
    ),
    *table(
        "supervisor",
        ("membership_process",),
        ("a node in reserve that was stopped for long ends", "stopped-spare-waits-again", Always()),
        ("ranks of other nodes get a loopback address", "address-is-no-loopback", Instead("return found")),
        (
            "an answer that comes too late is that of the next request",
            "late-answer-is-to-no-request",
            Instead('raise self._unreachable(f"no answer in {seconds:.0f} s")'),
        ),
    ),
    *table(
        "supervisor",
        ("attempt", "zygote", "leftovers", "run_records", "outputs"),
        ("a signal gives ranks more time after a failure", "signal-extends-no-end", Instead("self._until = until")),
        ("a zygote that hangs holds the supervisor", "fork-is-not-awaited-for-ever", Never()),
        ("a fork that took too long passes for the next one", "late-fork-is-no-other-rank", Remove()),
        ("an attempt without a verdict ends the job", "attempt-may-be-lived-anew", Never()),
        (
            "a node that writes supervisor.json is taken for lost",
            "slow-summary-keeps-no-node-silent",
            Instead("written()"),
        ),
        (
            "a console that nobody reads holds the supervisor",
            "unread-console-holds-no-supervisor",
            Remove(),
        ),
    ),
)
