"""Safeguards of the agreement between several ranks."""

from __future__ import annotations

from .change import AfterNext, Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import RANKS

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "ranks",
        RANKS,
        ("a rank that comes after one that died is looked for", "late-rank-awaited", Remove()),
        ("absent ranks reported to the present ones", "absent-ranks-published", Remove()),
        ("unique name of each rendezvous", "unique-rendezvous-name", Instead('name = "0"')),
        (
            "a topic of a step has its name from the step",
            "topic-named-by-step",
            Swap("step}/{steps.count(step)}", "len(steps)}/1"),
        ),
        ("a second try is another topic", "topic-named-by-step", Swap("{steps.count(step)}", "1")),
        ("new topics after a rewind", "rewind-starts-new-topics", Remove()),
        (
            "rank 0 detects a rank in another step",
            "rank-in-other-step-detected",
            Swap("self._skipped_by(rank)", '""'),
        ),
        (
            "other ranks detect rank 0 in another step",
            "coordinator-in-other-step-detected",
            Instead('skipped = ""'),
        ),
        ("slow rank still awaited", "slow-rank-still-awaited", Swap(" or max(steps) < self._steps[-1]", "")),
        ("error of one rank raised on all ranks", "one-failure-fails-all", Never()),
        ("name of the failed rank", "failed-rank-named", Instead("return post")),
        ("a verdict that fails is told", "verdict-failure-posted", Remove()),
        ("what keeps a rank from its answer is posted", "rank-failure-posted", Remove()),
        ("posts are deleted", "read-posts-deleted", Remove()),
        ("verdicts are deleted", "old-verdicts-deleted", Remove()),
        ("what could not be asked is asked again", "failed-end-request-repeated", AfterNext()),
        ("a store that is down is asked ever more rarely", "store-down-backoff", Remove()),
        (
            "announcement ahead of its step",
            "announced-ahead-of-step",
            Swap("max(math.ceil(ahead), 1) + (ahead > 1 or steps == 0)", "1"),
        ),
        ("announcement acted on once", "announcement-taken-once", Remove()),
        ("failure of a timed save that this rank missed", "missed-timed-save-fails", Remove()),
        ("what was missed by an interval fails", "missed-interval-save-fails", Remove()),
        (
            "an interval holds from its step",
            "interval-holds-from-its-step",
            Swap(", self._from = one.value, one.step", " = one.value"),
        ),
        ("the end of a save is never announced", "save-end-announced", Never()),
        (
            "the end of a save is announced before earlier ones have ended",
            "ends-announced-in-order",
            Swap("itertools.takewhile", "filter"),
        ),
        ("a late rank does not fail the saves that it left out", "missed-place-fails", Remove()),
        ("a late rank does not extend the lead", "late-rank-extends-lead", Never()),
        (
            "the end of a save is not taken before it is told to all",
            "unannounced-end-counts-in-flight",
            Swap("len(self._unended)", "sum(not (one and one.ended()) for one in self._unended.values())"),
        ),
        ("findings reported by a follower", "follower-reports-findings", Swap("not findings", "True")),
        ("files of unconfirmed ranks read by rank 0", "unconfirmed-ranks-read", Remove()),
        ("rank 0 reads its own", "rank-zero-reads-own-files", Instead("findings = []")),
        (
            "only unconfirmed ranks' files read again",
            "only-unconfirmed-ranks-reread",
            Swap(" - good", " - {ranks.rank}"),
        ),
        ("a stale plan is never used", "stale-plan-refused", Remove()),
        ("ranks know the same of each other", "equal-knowledge-required", Remove()),
        ("a second try waits for the end of the first", "retry-waits-for-first-try", Never()),
        ("a folder that was removed is made again", "removed-folder-made-again", Remove()),
        ("what is not finite anywhere is not good", "non-finite-on-any-rank", Remove()),
        ("a load that was given up half way is not mixed", "half-loaded-state-not-mixed", Never()),
        (
            "a restore is counted by rank 0",
            "restore-counted-by-coordinator",
            Instead(
                "topic.agree(ranks.restore_count, lambda counts: 1 + max(counts)); "
                "ranks.begin_restore(ranks.restore_count + 1)"
            ),
        ),
        ("survey of rank 0 adopted by all ranks", "followers-adopt-survey", Swap("adopt(shared)", "refresh()")),
        ("aliases in the published structure", "aliases-in-structure", Remove()),
        ("a structure is found out when it has changed", "changed-structure-exchanged", Remove()),
        ("replicas are compared", "replicas-compared", Instead("return SAME")),
        ("weights that differ are refused", "differing-weights-refused", Never()),
        ("what differs each rank writes from then on", "differing-state-own-from-then-on", Remove()),
        ("what differs each rank writes at once", "differing-state-own-at-once", Instead("return ()")),
        ("a name means one thing", "name-means-one-thing", Never()),
        (
            "random number generators are each rank's own",
            "random-generators-per-rank",
            Swap('name == "rng" or name.startswith("rng.") or ', ""),
        ),
        ("ranks seal one generation", "ranks-seal-one-generation", Never()),
        ("what was committed stays where nobody could be told", "published-survives-lost-store", Always()),
        ("all ranks load, or none", "all-ranks-load-or-none", Remove()),
        ("all ranks load one generation", "ranks-load-one-generation", Never()),
        (
            "content that several ranks need is read once",
            "shared-content-read-once",
            Instead("return             False"),
        ),
        ("what no rank has a place for is refused", "unplaced-names-refused", Instead("return []")),
        ("pieces without a hole", "pieces-leave-no-hole", Remove()),
        ("pieces without an overlap", "pieces-do-not-overlap", Remove()),
        (
            "a rank's own comes before what others hold",
            "own-piece-preferred",
            Swap("tensor.own.get((rank, one.box), one)", "one"),
        ),
    ),
)
