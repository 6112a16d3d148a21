"""Mutants of the safeguards of the supervisor: whom it blames, when it stops, and that nothing outlives it."""

from __future__ import annotations

from .change import Instead, Never, Remove, Swap
from .record import Mutant, table

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "supervisor",
        (
            "recovery",
            "hang",
            "sentinel",
            "leftovers",
            "supervise",
            "heartbeat",
            "membership",
            "verdict",
            "checkpointer",
            "policy_file",
            "slow",
        ),
        (
            "ranks that lost their connection are blamed",
            "followers-are-not-blamed",
            Swap("not follows", "follows"),
        ),
        ("of two values of a policy one is taken", "repeated-key-refused", Never()),
        ("a rank like the others is named slow", "slow-rank-stands-out", Swap(">= bound", ">= 1")),
        ("a bound of the user is not kept", "restarts-bounded", Never()),
        ("a job that fails for ever is started for ever", "no-endless-restarts", Never()),
        ("a rank outlives its supervisor", "rank-dies-with-supervisor", Remove()),
        ("a rank that was just forked is not ended", "rank-without-group-killed", Remove()),
        ("what ranks have started is left", "processes-of-ranks-awaited", Remove()),
        ("a job counts as done although a rank was killed", "killed-rank-is-no-success", Swap("lived.killed", "False")),
        ("a rank of slow steps is taken for hung", "limit-follows-own-steps", Swap("<= limit", "<= 1.0")),
        ("a rank that waits for an evaluation is taken for hung", "awaited-phase-may-last", Instead("return False")),
        ("a job that was suspended is taken for hung", "stopped-job-is-no-hang", Never()),
        ("a second run has the signs of the first", "run-begins-without-signs", Remove()),
        ("attempts before a remedy count after it", "remedy-begins-the-count-anew", Never()),
        ("the ranks that waited are named", "timeouts-name-who-hangs", Never()),
        ("a rank that cannot write its stacks is killed", "stacks-asked-only-of-who-can", Remove()),
        ("a remedy is tried again and again", "each-remedy-tried-once", Swap("act not in tried and ", "")),
        (
            "an attempt that saved something newer counts as none",
            "saved-step-is-progress",
            Swap("newer or one.saved_step > (one.restored_step or 0)", "newer"),
        ),
        ("a suspect generation is restored again", "suspect-generation-marked", Remove()),
        ("the only good generation of a run is marked", "only-good-generation-stays", Never()),
        ("folders of a running supervisor are removed", "folder-in-use-not-removed", Remove()),
        ("a loss of NaN is not noticed", "non-finite-metric-found", Never()),
        ("a spike is not noticed", "spike-found", Swap("> mean +", "> 1e9 + mean +")),
        ("each rank finds its own divergence", "ranks-agree-on-divergence", Remove()),
        ("batches are left out without a bound", "skips-of-sentinel-bounded", Instead("permitted = True")),
        ("another run of the process writes the page", "one-run-beats", Never()),
        ("a commit is shown a step too late", "saved-step-shown-at-once", Remove()),
        ("a slow node is taken for lost", "slow-node-is-not-lost", Swap("> timeout_seconds", "> 0")),
        ("the round of a lost node goes on without it", "lost-node-needs-new-round", Never()),
        ("ranks that lost their node are blamed", "lost-node-blamed-before-followers", Never()),
        ("two nodes decide about one attempt", "standing-verdict-is-followed", Never()),
    ),
    *table(
        "survivors",
        ("survivor", "just_in_time"),
        (
            "a note that was cut off is taken for whole",
            "torn-note-not-read",
            Swap("digest == xxhash.xxh3_128_digest(data)", "digest"),
        ),
        ("a state that has changed is saved as that of the step", "changed-state-not-saved", Never()),
        ("a rank that has not completed the step is left out", "every-rank-has-noted-the-step", Never()),
        ("one of several different states is saved for all", "survivor-is-a-replica", Never()),
        ("a step is saved although a newer opening has saved", "newer-generation-not-shadowed", Never()),
    ),
)
