"""Mutants of the safeguards of the order of operations, of the lineage, and of retention."""

from __future__ import annotations

from .change import AfterNext, Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import core

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "order of operations",
        core(),
        ("a blob is finished before its last byte is written", "all-writes-before-finish", AfterNext()),
        ("a blob is sealed before it is synced", "fsync-blob-before-seal", Remove()),
        ("the manifest is not written before the commit", "manifest-before-commit", Remove()),
        ("files of a generation are deleted before its COMMIT", "uncommit-before-delete", Remove()),
        (
            "after a kill, the deletion of COMMIT is not synced before the other files",
            "uncommit-before-delete",
            Swap("tier.delete", "if layout.COMMIT in listing: tier.delete"),
        ),
        ("COMMIT is deleted without a GOING record", "going-record-before-uncommit", Remove()),
        (
            "the GOING record is deleted before other files",
            "going-record-deleted-last",
            Swap("name != layout.GOING and ", ""),
        ),
        ("a torn GOING record is not replaced", "torn-going-record-replaced", Never()),
        (
            "a deletion fails if a full disk takes no GOING record",
            "full-disk-skips-going-record",
            Swap("with contextlib.suppress(NoSpace)", "if True"),
        ),
        ("the old mark stays beside the new one", "old-mark-deleted", Remove()),
        ("a generation is marked as verified without a verification", "verify-before-mark", Instead("findings = []")),
        (
            "the pointer is moved before the mark is written",
            "mark-before-pointer",
            Swap(
                "self._mark",
                "known.record(msgspec.structs.replace(generation, verified=not findings)); self.point(); self._mark",
            ),
        ),
        ("no mark is written", "mark-before-pointer", Remove()),
        ("the pointer keeps the last block of a disk from a mark", "pointer-gives-way-to-mark", Always()),
        ("a pointer that a full disk does not replace keeps its generation", "full-disk-replaces-pointer", Always()),
        ("what a pointer without its link names may be deleted", "unfinished-pointer-names", Remove()),
        ("as before, after another pointer gave way to it", "unfinished-new-pointer-names", Remove()),
        ("a limit on the length of files deletes the pointer", "length-limit-keeps-pointer", Never()),
        ("findings are lost if their mark cannot be written", "findings-outlive-failed-mark", Instead("raise")),
        ("the pointer is not moved before deletions", "point-before-clean", Remove()),
        ("the pointer is not moved to a verified generation", "verified-is-pointed-at", Remove()),
        ("the pointer may name a generation that is not verified", "pointer-names-verified", Swap(" if one.good", "")),
        (
            "damage ends a verification before older generations are read",
            "verify-continues-past-damage",
            Swap("problem = problem or", "raise"),
        ),
        ("a verification does not raise the damage that it found", "damage-raised-after-verify", Remove()),
        ("a generation is forgotten without deleting its files", "deleted-before-forgotten", Instead("deleted = True")),
        (
            "a generation without COMMIT but with files left counts as existing",
            "uncommitted-counts-as-deleted",
            Swap(" and self._deletions.committed(at)", ""),
        ),
        ("the generation that the pointer names is deleted", "pointed-generation-kept", Swap("at != pointed and ", "")),
        (
            "a file that cannot be deleted ends the deletion of the others",
            "delete-continues-past-failure",
            Instead("raise"),
        ),
        ("the GOING record is deleted while other files remain", "going-record-stays-with-leftovers", Always()),
        ("a COMMIT that arrives during a removal stays", "late-commit-removed", Never()),
        ("the record of an incarnation is not written", "incarnation-record-written", Remove()),
        (
            "the pointer follows a lineage that is not durable yet",
            "pointer-follows-durable-lineage",
            Swap("survey", "view"),
        ),
        ("the order numbers of incarnations do not ascend", "incarnation-order-ascends", Swap("+", "or")),
        ("the header of a run is not written", "run-header-written", Remove()),
        ("a damaged header is not replaced", "damaged-run-header-replaced", Remove()),
        (
            "publish does not write COMMIT",
            "publish-writes-commit",
            Instead('generation = Generation(commit=record, root="", bytes=size)'),
        ),
        ("an older save is committed after a newer one", "older-save-abandoned", Never()),
        (
            "an older save that retention must keep is abandoned",
            "older-save-abandoned",
            Swap(" and not pinned and at not in self.pinned", ""),
        ),
        (
            "a commit may name a predecessor of another incarnation, or a newer one",
            "commit-names-predecessor",
            Swap("one.incarnation == at.incarnation and one.step < at.step", "True"),
        ),
    ),
    *table(
        "order of operations",
        core("tiers"),
        (
            "the name of COMMIT appears before its content",
            "link-never-overwrites",
            Swap(
                "self._files.link",
                'self._files.open(path, "new").close() if name.endswith("COMMIT.json") else None; self._files.rename',
            ),
        ),
    ),
    *table(
        "lineage",
        core(),
        (
            "the lineage includes generations that a rewind abandoned",
            "lineage-bounded-by-rewind",
            Swap(" and (bound is None or at.step <= bound)", ""),
        ),
        ("the lineage begins with the oldest incarnation", "newest-incarnation-first", Swap("max", "min")),
        ("the lineage of an incarnation begins with its oldest step", "newest-step-first", Swap(", reverse=True", "")),
        (
            "the lineage does not continue with the parent incarnation",
            "lineage-continues-with-parent",
            Instead("current = None"),
        ),
        (
            "a circle of parents never ends",
            "lineage-continues-with-parent",
            Swap(" and older.order < current.order", ""),
        ),
        (
            "generations marked as damaged are restore candidates",
            "damaged-generations-skipped",
            Instead("candidates.append(at)"),
        ),
        ("a restore does not try the next older generation after damage", "next-older-after-damage", Always()),
        (
            "generations whose COMMIT was lost are deleted as unfinished",
            "lost-commits-kept",
            Instead("return set(survey.incomplete)"),
        ),
        ("lost commits are not reported", "lost-commits-reported", Instead("passed = []")),
        ("missing incarnation records are not derived from commits", "commits-imply-incarnations", Never()),
        ("an empty folder is reported as a lost commit", "unfinished-deletion-is-no-loss", Swap(" or not listing", "")),
        (
            "a partly deleted generation is reported as a lost commit",
            "unfinished-deletion-is-no-loss",
            Swap("layout.GOING in listing or ", ""),
        ),
        (
            "a damaged commit is raised instead of recorded",
            "broken-commit-recorded",
            Swap("found.broken[at] =", "raise"),
        ),
        ("a damaged hint is raised instead of ignored", "damaged-hint-ignored", Instead("raise")),
    ),
    *table(
        "generations that cannot be read",
        ("undeletable", "retention"),
        ("one folder that cannot be listed stops a run", "unlisted-folder-noted", Instead("raise")),
        ("one COMMIT that cannot be opened stops a run", "unread-commit-noted", Instead("raise")),
        (
            "one incarnation record that cannot be opened stops a run",
            "unread-incarnation-from-its-name",
            Swap("*folders.unread_errors(tier)", ""),
        ),
        (
            "a restore steps over what cannot be read",
            "unread-generation-ends-restore",
            Swap("chain if end is None else newer", "chain"),
        ),
        ("behind a damaged one nothing counts as unread", "unread-generation-not-stepped-over", Instead("pass")),
        ("a save without a restore abandons what cannot be read", "unread-generation-not-abandoned", Remove()),
        ("what cannot be read is not reported", "unread-generation-reported", Remove()),
        ("a copy that cannot be read does not count", "unread-copy-may-be-good", Always()),
        (
            "what could not be read at an opening stays unread",
            "unread-listed-again-at-restore",
            Instead("again = False"),
        ),
    ),
    *table(
        "retention",
        core(),
        (
            "a generation with an unreadable label may be deleted",
            "unreadable-label-keeps-generation",
            Swap("one.label_unread or ", ""),
        ),
        (
            "unverified generations count towards `last`",
            "retention-counts-verified",
            Swap("one.good", "not one.damaged"),
        ),
        (
            "verified generations count towards `last` even if damaged or unfit",
            "retention-counts-verified",
            Swap(".good", ".verified"),
        ),
        ("only one verified generation is kept instead of `last`", "keep-last-verified", Swap("keep.last", "1")),
        ("a step that was saved again counts twice towards `last`", "resaved-step-counts-once", Swap(".step", ".id")),
        (
            "generations newer than the newest verified one may be deleted",
            "keep-newer-than-verified",
            Instead("newest = 0"),
        ),
        ("unverified generations are not kept where too few are verified", "unverified-fill-up", Remove()),
        ("pinned generations may be deleted", "keep-pinned", Remove()),
        ("pinned generations may be deleted if they are not verified", "keep-pinned", Swap("whole", "good")),
        ("the first generation after a multiple may be deleted", "first-of-each-kept", Remove()),
        ("an unfit generation stands for a multiple", "first-of-each-kept", Swap("whole", "chain")),
        ("only verified generations stand for a multiple", "first-of-each-kept", Swap("whole", "good")),
        (
            "a save that passes a milestone is kept for its age only",
            "first-at-milestone-wanted",
            Swap("since < one <= step", "one == step"),
        ),
        (
            "a save that passes a multiple is kept for its age only",
            "first-at-multiple-wanted",
            Swap(" or crossed(keep.every, since, step)", ""),
        ),
        (
            "a place below lacks the first generation after a multiple",
            "first-of-each-copied",
            Instead("oldest = set()"),
        ),
        ("the best generations may be deleted", "keep-best", Remove()),
        ("the best generations may be deleted if they are not verified", "keep-best", Swap(" whole", "")),
        ("unverified generations displace the best verified ones", "keep-best", Swap("good, whole", "whole,")),
        ("damaged generations may be deleted", "damaged-kept-as-evidence", Swap(" and not one.damaged", "")),
        (
            "abandoned generations are deleted before newer ones outnumber them",
            "abandoned-kept-until-outnumbered",
            Swap("newer >= keep.last and ", ""),
        ),
        (
            "generations of earlier incarnations outnumber abandoned ones, too",
            "abandoned-age-by-order",
            Swap("if other.commit.order > one.commit.order", ""),
        ),
        (
            "pinned abandoned generations may be deleted",
            "abandoned-kept-until-outnumbered",
            Swap(" and not _pinned(keep, one)", ""),
        ),
        (
            "records of empty incarnations that link others to their ancestors are deleted",
            "needed-incarnations-kept",
            Swap("update(passed)", "add(at.id)"),
        ),
        (
            "the newest committed generation may be deleted",
            "keep-newest-committed",
            Swap(" | {one.id for one in chain[:1]}", ""),
        ),
    ),
)
