"""Mutants of the safeguards of the tier that keeps generations in a fixed set of slots."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import core

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "slots",
        core("slots"),
        ("the table is written before the content is synced", "content-synced-before-table", Remove()),
        ("a record in a slot is not synced", "slot-record-synced", Remove()),
        ("the table is not synced", "table-content-synced", Remove()),
        ("the name of a new table file is not synced", "table-name-synced", Remove()),
        ("a new slot is not synced", "new-slot-synced", Remove()),
        ("the names of new slots are not synced", "slot-names-synced", Remove()),
        (
            "a slot stays in use after a failed fsync",
            "failed-sync-spoils-slot",
            Swap("with self._spoiling(slot)", "if True"),
        ),
        ("an unusable slot is synced again", "spoiled-slot-not-synced", Remove()),
        ("an unusable slot is written again", "spoiled-slot-not-written", Remove()),
        ("a slot whose creation failed stays in use", "failed-growth-spoils-slot", Remove()),
        ("an unusable slot is not replaced by a new file", "spoiled-slot-replaced", Never()),
        ("a table write of unknown outcome counts as failed", "table-outcome-unknown", Never()),
        (
            "a half-written table counts as a failed write",
            "partial-table-write-unknown",
            Instead("write_all(file, page, at)"),
        ),
        (
            "an fsync that fails for lack of space counts as a failed write",
            "sync-without-space-is-unknown",
            Instead("raise"),
        ),
        (
            "a table in an overwritten area does not count as one that a crash may leave",
            "overwritten-table-possible",
            Remove(),
        ),
        ("a table in a new file does not count as one that a crash may leave", "replaced-table-possible", Remove()),
        (
            "a table area is overwritten while several tables are possible",
            "table-area-is-safe",
            Swap("len(self.possible) == 1 and ", ""),
        ),
        (
            "a record that exceeds its table area is written there",
            "table-area-is-safe",
            Swap("len(data) <= self._area_bytes", "self._area_bytes > 0"),
        ),
        ("every record of the table goes into the same area", "table-areas-alternate", Remove()),
        ("the next record overwrites the only one of a new table file", "new-table-file-next-area", Swap("1", "0")),
        ("all records of the table have the same sequence number", "table-sequence-ascends", Remove()),
        (
            "sequence numbers do not continue from the record that was found",
            "table-sequence-continues",
            Swap("self._sequence, self.newest = found.sequence,", "self.newest ="),
        ),
        ("the older record of the table is read", "newest-table-record-wins", Swap("max", "min")),
        ("the table that an opening reads is not made durable", "found-table-made-durable", Remove()),
        ("a table without an intact record counts as missing", "damaged-table-refused", Instead("return None")),
        ("a missing table beside slots is not reported as damage", "missing-table-is-damage", Never()),
        (
            "only the slots of the newest table are kept",
            "possible-tables-hold-slots",
            Swap("table in self._tables.possible for one in table.kept", "one in self._tables.newest.kept"),
        ),
        ("the slot of an unfinished save may be overwritten", "drafts-hold-slots", Remove()),
        (
            "a new commit keeps the newest slot instead of the newest verified one",
            "newest-verified-slot-kept",
            Instead("stay = good[-1:]"),
        ),
        (
            "a new commit may keep a damaged slot as the only one beside it",
            "undamaged-slot-kept",
            Instead("good = [*kept]"),
        ),
        ("an unknown outcome is not settled when no slot is free", "doubt-settled-when-full", Remove()),
        ("the slot of a commit that does not exist stays occupied", "doubtful-slot-freed", Remove()),
        ("a failed commit frees its slot at once", "failed-commit-keeps-slot", Instead("self._drop(folder)")),
        ("a file of an unfinished generation may be created twice", "draft-name-unique", Never()),
        ("a record with other bytes counts as already written", "same-name-same-bytes", Always()),
        ("an aborted file stays listed in its slot", "aborted-file-forgotten", Remove()),
        ("a failed record stays listed in its slot", "failed-record-forgotten", Remove()),
        (
            "a slot stays in use after a failed write",
            "failed-write-spoils-slot",
            Swap("with self._spoiling(slot)", "if True"),
        ),
        ("a commit whose deletion failed does not count as doubtful", "uncleared-commit-is-doubtful", Remove()),
        (
            "a pointer remains after its target was deleted",
            "pointer-deleted-with-target",
            Swap("if one.to in targets", ""),
        ),
        ("closing does not write the pointers", "pointers-written-at-close", Remove()),
        ("a read may continue past the end of a file in its slot", "read-within-file-length", Never()),
        (
            "a file in a truncated slot keeps its full length",
            "truncated-slot-shortens-file",
            Swap("max(0, min(length, slot_bytes - start))", "length"),
        ),
        ("a new slot is not filled with zeros", "slot-zeroed-before-use", Remove()),
        ("the space of a slot is not reserved", "slot-space-reserved", Remove()),
        ("slots keep their new length after their growth failed", "failed-growth-undone", Remove()),
        ("the verified mark is not written to the table", "verified-mark-written-at-once", Remove()),
        ("the deletion of a commit is not written to the table", "deleted-commit-gone-at-once", Remove()),
    ),
    *table(
        "slots",
        core(),
        ("the digest of a table record is not checked", "table-record-digest", Never()),
        (
            "the length of a table record is not limited",
            "table-record-length",
            Swap(" and length <= min(room - ENVELOPE.size, RECORD_LIMIT_BYTES)", ""),
        ),
        ("a newer table version is not refused", "newer-table-version-refused", Never()),
        ("a table may list the same folder twice", "table-folder-unique", Remove()),
        ("a table may assign the same slot twice", "table-slot-unique", Remove()),
        ("a table may list the same file twice", "table-file-unique", Remove()),
        ("offsets and lengths in a table are not checked", "table-extents-in-range", Remove()),
    ),
)
