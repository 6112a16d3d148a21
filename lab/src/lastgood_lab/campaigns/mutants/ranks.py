"""Mutants of the safeguards of the agreement between several ranks."""

from __future__ import annotations

from .change import AfterNext, Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import RANKS

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "ranks",
        RANKS,
        ("rank 0 gives up at the nonce of a dead process, and reads no newer one", "late-rank-awaited", Remove()),
        ("each rank reports what all step over", "stepped-over-reported-once", Swap(" and for_all", "")),
        ("the joined ranks do not learn which ranks are missing", "absent-ranks-published", Remove()),
        ("all rendezvous have the same name", "unique-rendezvous-name", Instead('name = "0"')),
        (
            "a topic is named by the number of steps so far instead of the step",
            "topic-named-by-step",
            Swap("step}/{steps.count(step)}", "len(steps)}/1"),
        ),
        (
            "a retry of a step uses the topic of the first attempt",
            "topic-named-by-step",
            Swap("{steps.count(step)}", "1"),
        ),
        ("topics from before a rewind are used again after it", "rewind-starts-new-topics", Remove()),
        (
            "rank 0 does not detect a rank in another step",
            "rank-in-other-step-detected",
            Swap("self._skipped_by(rank)", '""'),
        ),
        (
            "other ranks do not detect rank 0 in another step",
            "coordinator-in-other-step-detected",
            Instead('skipped = ""'),
        ),
        (
            "a slow rank counts as one in another step",
            "slow-rank-still-awaited",
            Swap(" or max(steps) < self.steps[-1]", ""),
        ),
        ("the error of one rank is not raised on all ranks", "one-failure-fails-all", Never()),
        ("an error does not name the rank that failed", "failed-rank-named", Instead("return post")),
        ("an error while the verdict is decided is not posted", "verdict-failure-posted", Remove()),
        ("an error that prevents a rank's answer is not posted", "rank-failure-posted", Remove()),
        ("posts that were read are not deleted", "read-posts-deleted", Remove()),
        ("the reading of a post that was deleted meanwhile fails", "deleted-message-not-awaited", Instead("raise")),
        ("old verdicts are not deleted", "old-verdicts-deleted", Remove()),
        (
            "a request to end is noted as posted before its post has succeeded",
            "failed-end-request-repeated",
            AfterNext(),
        ),
        ("a store that is down is polled at a constant interval", "store-down-backoff", Remove()),
        (
            "an announcement is made only one step ahead",
            "announced-ahead-of-step",
            Swap("max(math.ceil(ahead), 1) + (ahead > 1 or speed == 0)", "1"),
        ),
        ("a pause lowers the speed by which saves are announced", "pause-keeps-the-lead", Swap("max", "min")),
        (
            "a later announcement may take effect before an earlier one",
            "announced-steps-ascend",
            Swap("max(safe, self._latest_step)", "safe"),
        ),
        (
            "ranks end at a step that some of them have passed",
            "end-received-by-all",
            Swap("received is not None and all(at < self.end for at in received)", "True"),
        ),
        ("an announcement is acted on more than once", "announcement-taken-once", Remove()),
        ("a timed save that this rank missed does not fail", "missed-timed-save-fails", Remove()),
        ("saves of an interval that this rank missed do not fail", "missed-interval-save-fails", Remove()),
        (
            "an announced interval is not counted from its own step",
            "interval-holds-from-its-step",
            Swap(", self._from = one.value, one.step", " = one.value"),
        ),
        ("the end of a save is never announced", "save-end-announced", Never()),
        (
            "the end of a save is announced before earlier saves have ended",
            "ends-announced-in-order",
            Swap("itertools.takewhile", "filter"),
        ),
        ("saves that a late rank left out do not fail", "missed-place-fails", Remove()),
        ("a late rank does not extend the lead of announcements", "late-rank-extends-lead", Never()),
        (
            "a save counts as ended before its end is announced to all ranks",
            "unannounced-end-counts-in-flight",
            Swap("len(self._unended)", "sum(not (one and one.ended()) for one in self._unended.values())"),
        ),
        (
            "a follower reports its files as good despite findings",
            "follower-reports-findings",
            Swap("not findings", "True"),
        ),
        ("rank 0 does not read the files of unconfirmed ranks", "unconfirmed-ranks-read", Remove()),
        ("rank 0 does not read its own files", "rank-zero-reads-own-files", Instead("findings = []")),
        (
            "rank 0 reads the files of confirmed ranks again",
            "only-unconfirmed-ranks-reread",
            Swap(", *reported", ""),
        ),
        ("a place whose copy has failed is shown to other ranks", "failed-copy-not-posted", Never()),
        (
            "a part that another node has found damaged counts as good",
            "finding-confirms-nothing",
            Swap("not any(self._requests.answers(most_seconds=seconds, stop=stop))", "True"),
        ),
        ("a rank that closes waits for a store that is cut off", "cut-off-store-ends-closing", Never()),
        (
            "a rank whose connection was lost in a wait serves no more",
            "lost-wait-renewed",
            Swap("missed", "self._is_over"),
        ),
        ("what nobody waits for is read to its end", "abandoned-request-ends", Instead("return False")),
        ("files of other nodes are verified through the store", "parts-elsewhere-read-there", Never()),
        ("a plan is used after a rank's structure has changed", "stale-plan-refused", Remove()),
        ("a save continues although ranks know different holders of tensors", "equal-knowledge-required", Remove()),
        ("a retry does not wait for the end of the first attempt", "retry-waits-for-first-try", Never()),
        (
            "a follower does not create a folder again that the coordinator removed",
            "removed-folder-made-again",
            Remove(),
        ),
        ("non-finite values that another rank found are ignored", "non-finite-on-any-rank", Remove()),
        (
            "a load keeps entries that another load, given up half way, has written",
            "half-loaded-state-not-mixed",
            Never(),
        ),
        (
            "each rank counts restores by itself",
            "restore-counted-by-coordinator",
            Instead(
                "topic.agree(ranks.restore_count, lambda counts: 1 + max(counts)); "
                "ranks.begin_restore(ranks.restore_count + 1)"
            ),
        ),
        (
            "followers survey the run instead of adopting rank 0's survey",
            "followers-adopt-survey",
            Swap("adopt(shared)", "refresh()"),
        ),
        ("the published structure lacks aliases", "aliases-in-structure", Remove()),
        ("a changed structure is not exchanged again", "changed-structure-exchanged", Remove()),
        ("replicas are not compared", "replicas-compared", Instead("return SAME")),
        ("weights that differ between ranks are not refused", "differing-weights-refused", Never()),
        (
            "later saves still treat state that differs between ranks as replicated",
            "differing-state-own-from-then-on",
            Remove(),
        ),
        (
            "a rank plans with a difference as soon as it knows of it",
            "differing-state-own-later",
            Swap("None if None in steps else max(steps)", "0"),
        ),
        (
            "state that differs between ranks is not written in the save that detects it",
            "differing-state-own-at-once",
            Instead("return ()"),
        ),
        ("one name may stand for different tensors on different ranks", "name-means-one-thing", Never()),
        (
            "random number generators count as replicated",
            "random-generators-per-rank",
            Swap("_is_random(name) or ", ""),
        ),
        ("the group of a DDP model that outlives it is destroyed by the model", "gloo-outlives-models", Remove()),
        ("ranks may seal different generations in one commit", "ranks-seal-one-generation", Never()),
        ("a committed save fails if the verdict cannot be published", "published-survives-lost-store", Always()),
        (
            "a rank finishes its load while another one fails",
            "all-ranks-load-or-none",
            Swap("topic.barrier(), ", ""),
        ),
        ("ranks that fail at a barrier raise different errors", "ranks-fail-alike", Remove()),
        (
            "a rank that takes long to load fails the restore of all",
            "slow-rank-not-given-up",
            Swap("self._ranks.timeout_seconds / 3", "None"),
        ),
        ("ranks may load different generations", "ranks-load-one-generation", Never()),
        (
            "content that several ranks need is read by each",
            "shared-content-read-once",
            Instead("return             False"),
        ),
        ("names for which no rank has a place are not refused", "unplaced-names-refused", Instead("return []")),
        ("pieces of a tensor may leave a hole", "pieces-leave-no-hole", Remove()),
        ("pieces of a tensor may overlap", "pieces-do-not-overlap", Remove()),
        (
            "a rank loads another rank's copy instead of its own piece",
            "own-piece-preferred",
            Swap("tensor.own.get((rank, one.box), one)", "one"),
        ),
    ),
    *table(
        "ranks",
        ("ranks_saved_once",),
        ("the shards of one rank are saved as whole tensors", "part-is-no-whole-tensor", Remove()),
        ("the flat parameters of one rank are saved", "flat-parameters-are-parts", Remove()),
        ("a rank that finds a run open does not learn which one is to save", "locked-path-names-rank", Always()),
    ),
)
