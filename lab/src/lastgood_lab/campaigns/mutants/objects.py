"""Mutants of the safeguards of places: object stores (conditional creations, uploads, claims), and copies."""

from __future__ import annotations

from .change import Always, Never, Remove, Swap
from .record import Mutant, table

OBJECTS = ("objects", "tiers", "object_runs")
"""the tests with a real S3 server, which they start"""

TIERS = ("places",)
"""runs in several places"""
COPYING = ("copying",)
"""generations that are made whole in one place from another one"""

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
        "places",
        TIERS,
        (
            "a damaged copy is read although another place has a whole one",
            "whole-copy-preferred",
            Swap("if places[index][at].restorable", ""),
        ),
        ("a generation is deleted before its copy is made", "waiting-generation-held", Remove()),
        ("copies that wait are not bounded", "waiting-copies-bounded", Swap("others[: -keep.last]", "others[:0]")),
        ("each failed attempt of an outage is reported", "outage-reported-once", Swap("self._failures == 1", "True")),
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
    ),
    *table(
        "rank places",
        ("ranks_places",),
        ("a part that a rank could not copy is taken as copied", "failed-part-fails-copy", Never()),
        ("a copy is committed before all ranks have copied", "commit-copied-after-all-parts", Remove()),
    ),
    *table(
        "copies",
        COPYING,
        ("a copy is not marked after its reading", "copy-marked-after-reading", Remove()),
        ("a run is copied into another run", "copy-only-into-same-run", Never()),
        (
            "a file that is there already counts by its length alone",
            "found-copy-read-back",
            Swap(" and _reads_back(RankFiles(target, folder, manifest), blob, copying)", ""),
        ),
        ("a damaged chunk is copied", "damaged-chunk-not-copied", Never()),
        ("a commit of another generation is copied", "copied-commit-has-root", Never()),
        ("a manifest is copied that differs from its seal", "copied-manifest-matches-seal", Never()),
        ("a valid commit of another generation is replaced", "other-commit-not-replaced", Swap("raise", "pass")),
    ),
)
