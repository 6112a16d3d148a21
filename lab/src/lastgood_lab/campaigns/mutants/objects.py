"""Mutants of the safeguards of places: object stores (conditional creations, uploads, claims), and copies."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table

OBJECTS = ("objects", "tiers", "object_runs")
"""the tests with a real S3 server, which they start"""

TIERS = ("places",)
"""runs in several places"""
COPYING = ("copying",)
"""generations that are made whole in one place from another one"""
PACKS = ("packs",)
"""copies whose files share an object, or a file of a directory"""

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "objects",
        OBJECTS,
        (
            "an object is created without a condition",
            "object-created-if-absent",
            Swap('mode="create"', 'mode="overwrite"'),
        ),
        ("a creation whose reply was lost is not read back", "lost-reply-read-back", Never()),
        (
            "a creation with an unknown outcome is reported as failed",
            "unknown-creation-deletes-nothing",
            Swap("CommitUnknown", "TierDown"),
        ),
        ("the length of an upload that failed at its end is not read", "failed-upload-read-back", Never()),
        (
            "an aborted upload is completed",
            "aborted-upload-never-completes",
            Swap('raise Cancelled("the upload was aborted")', "return"),
        ),
        ("a blob that replaced another one stays beside it", "replacing-blob-copied-first", Remove()),
        ("names lead out of the folder of the run", "object-name-inside-run", Never()),
        ("an object that is too short is no damage", "short-object-is-damage", Never()),
    ),
    *table(
        "claims",
        (*OBJECTS, "requests"),
        ("two incarnations in a bucket have the same order", "incarnation-order-claimed", Remove()),
        ("a commit is acknowledged although the run was claimed", "commit-acknowledged-only-while-claimed", Remove()),
        ("a COMMIT that arrives after its files were removed stays", "late-commit-withdrawn", Remove()),
        ("a writer that was replaced deletes generations", "replaced-writer-deletes-nothing", Remove()),
        (
            "a writer that was replaced takes a deleted generation for damage",
            "replacement-noticed-at-deleted-generation",
            Remove(),
        ),
        (
            "a commit is reported as refused because the claim cannot be read after it",
            "unconfirmed-claim-is-unknown-commit",
            Swap("(TierDown, NotWritable)", "()"),
        ),
        ("a replaced writer creates a deleted commit again", "deleted-commit-not-created-again", Always()),
        ("a failed opening looks like a killed process", "failed-opening-ends-its-claim", Remove()),
        ("the claim that counts is deleted", "newest-claim-kept", Swap("number < newest", "number <= order")),
        ("unfinished uploads of a killed process stay", "unfinished-uploads-removed", Remove()),
        ("a store that ignores conditions is used", "ignored-condition-refused", Remove()),
    ),
    *table(
        "catalog",
        ("catalog",),
        (
            "a catalog hides what was changed after it",
            "stale-catalog-entry-ignored",
            Swap(" and records_in(listing) == one.records", ""),
        ),
    ),
    *table(
        "outages",
        ("outage",),
        (
            "each failed attempt of an outage is reported",
            "outage-reported-once",
            Swap("cause not in self._reported", "True"),
        ),
        ("a second cause of an outage is not reported", "outage-reported-once", Swap("cause not in", "not")),
    ),
    *table(
        "places",
        TIERS,
        (
            "a damaged copy is read although another place has a whole one",
            "whole-copy-preferred",
            Swap("if places[index][at].restorable", ""),
        ),
        ("a generation is deleted before its copy is made", "waiting-generation-held", Remove()),
        ("what is being copied is deleted meanwhile", "copy-under-way-not-overtaken", Swap(" | {self._under_way}", "")),
        ("a generation whose copy failed is held in front", "failed-copy-overtaken", Swap("None", "at")),
        ("copies that wait are not bounded", "waiting-copies-bounded", Swap("others[: -keep.last]", "others[:0]")),
        ("an incarnation has another order in another place", "one-order-in-all-places", Remove()),
        ("a save waits for ever for a copy that failed", "failed-copy-ends-its-wait", Swap("error", "None")),
        ("two runs are mixed", "places-of-one-run", Never()),
        (
            "a copy that was never read back counts as made",
            "unfinished-copy-finished-at-opening",
            Swap(" and (copy.verified or bool(copy.unfit)) and copy.commit == one.commit", ""),
        ),
        (
            "a label that was not copied before a crash is never copied",
            "unfinished-copy-finished-at-opening",
            Swap(" and copy.commit == one.commit", ""),
        ),
        ("a label that was cut short in a copy stays", "damaged-record-copied-anew", Remove()),
        ("what is left of an interrupted copy stays", "unfinished-copy-is-litter", Always()),
        ("a lost COMMIT of the first place is an interrupted copy", "unfinished-copy-is-not-lost", Never()),
        ("a copy that was never finished is called lost", "unfinished-copy-is-not-lost", Always()),
        (
            "a lost COMMIT of a whole copy is an interrupted copy",
            "copy-with-all-manifests-is-lost",
            Swap(" < ", " <= "),
        ),
    ),
    *table(
        "rank places",
        ("ranks_places",),
        ("a part that a rank could not copy is taken as copied", "failed-part-fails-copy", Never()),
        ("a copy is committed before all ranks have copied", "commit-copied-after-all-parts", Remove()),
        ("each rank of a machine reads all replicas from a bucket", "shared-objects-read-once", Remove()),
    ),
    *table(
        "node disks",
        ("ranks_nodes", "rank_requests"),
        (
            "a commit that some nodes have is reported as refused",
            "commit-on-some-nodes-is-unknown",
            Swap("raise CommitUnknown(", "raise TierDown("),
        ),
        ("nodes of different runs are mixed", "nodes-of-one-run", Never()),
        ("a node that lacks a commit stays without it", "commit-put-on-every-node", Remove()),
        ("a generation whose files lay on a lost node is restored", "lost-part-is-not-restorable", Never()),
        ("a rank overwrites a slot that another rank still needs", "agreed-slot-kept", Remove()),
        ("slots of refused commits are never free again", "refused-commit-frees-slot", Remove()),
        ("a damaged commit of one node stops the run", "damaged-commit-replaced-on-node", Remove()),
        (
            "an answer to another request is taken",
            "answer-belongs-to-its-request",
            Swap("{self._nonce}/{rank}", "{number}/{rank}"),
        ),
        ("a rank that is closed waits for a lost store", "lost-store-ends-closing", Swap("_ending", "_left")),
        (
            "an answer of a rank that is given up is awaited",
            "abandoned-rank-answers-nothing",
            Swap("abandoned", "closed"),
        ),
        ("what lies on a lost node is marked as damaged", "lost-part-gets-no-mark", Never()),
        (
            "generations that lost a part are never deleted",
            "lost-generation-deleted",
            Instead("return []"),
        ),
        ("ranks keep all slots because none learns what all have committed", "slot-freed-after-all-agreed", Remove()),
    ),
    *table(
        "copies",
        COPYING,
        ("a copy is not marked after its reading", "copy-marked-after-reading", Remove()),
        ("a run is copied into another run", "copy-only-into-same-run", Never()),
        (
            "a file that is there already counts by its length alone",
            "found-copy-read-back",
            Swap(" and reads_back(RankFiles(target, folder, manifest), blob, copying)", ""),
        ),
        ("a damaged chunk is copied", "damaged-chunk-not-copied", Never()),
        (
            "a copy that is given up removes what another process has copied",
            "copy-has-own-name",
            Swap("there or not commit.visible_is_durable(target)", "there"),
        ),
        ("what a killed copy left stays for ever", "stale-copy-removed", Remove()),
        ("a commit of another generation is copied", "copied-commit-has-root", Never()),
        ("a manifest is copied that differs from its seal", "copied-manifest-matches-seal", Never()),
        ("a valid commit of another generation is replaced", "other-commit-not-replaced", Swap("raise", "pass")),
    ),
    *table(
        "packs",
        PACKS,
        (
            "a damaged file in a pack counts before the one that replaced it",
            "own-object-before-pack",
            Swap("name not in self.objects and ", ""),
        ),
        ("the index of a pack names files outside of it", "packed-files-within-pack", Never()),
        ("a footer makes a reader fetch the whole pack", "pack-index-length-limit", Never()),
        ("why a pack cannot be used is not known", "unusable-pack-names-nothing", Remove()),
        (
            "a pack that was written again is read by an old index",
            "rewritten-pack-read-itself",
            Swap(" and found.length_of(other) == of.length", ""),
        ),
        ("manifests of an earlier listing are handed out", "fetched-manifests-dropped-at-listing", Remove()),
        ("a damaged pack stays beside the whole one", "damaged-pack-replaced-whole", Remove()),
        ("a usable pack is replaced", "usable-pack-kept", Swap("in usable", "in ()")),
        ("the name of a pack is durable after its COMMIT", "finished-name-synced", Remove()),
        ("packs of killed processes stay for ever", "unfinished-packs-removed", Remove()),
        (
            "a pack replaces one that another process has written meanwhile",
            "finished-file-never-overwrites",
            Swap("self._files.link(", "self._files.rename("),
        ),
    ),
)
