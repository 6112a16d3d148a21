"""Safeguards of the tier that keeps generations in a fixed set of slots."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import core

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "slots",
        core("slots"),
        ("content synced before the table", "content-synced-before-table", Remove()),
        ("fsync of a record", "slot-record-synced", Remove()),
        ("fsync of the table", "table-content-synced", Remove()),
        ("fsync of the table's name", "table-name-synced", Remove()),
        ("fsync of a new slot", "new-slot-synced", Remove()),
        ("fsync of the slots' names", "slot-names-synced", Remove()),
        (
            "slot marked unusable after a failed fsync",
            "failed-sync-spoils-slot",
            Swap("with self._spoiling(slot)", "if True"),
        ),
        ("unusable slot not synced again", "spoiled-slot-not-synced", Remove()),
        ("unusable slot not written again", "spoiled-slot-not-written", Remove()),
        ("slot marked unusable when its creation failed", "failed-growth-spoils-slot", Remove()),
        ("unusable slot replaced by a new file", "spoiled-slot-replaced", Never()),
        ("unknown outcome of the table is unknown", "table-outcome-unknown", Never()),
        (
            "half a write of the table is of unknown outcome",
            "partial-table-write-unknown",
            Instead("_write_all(file, page, at)"),
        ),
        (
            "fsync that fails for lack of space has an unknown outcome",
            "sync-without-space-is-unknown",
            Instead("raise"),
        ),
        ("overwritten table may still be read after a crash", "overwritten-table-possible", Remove()),
        ("replaced table may still be read after a crash", "replaced-table-possible", Remove()),
        (
            "table area overwritten only while one table is possible",
            "table-area-is-safe",
            Swap("len(self.possible) == 1 and ", ""),
        ),
        (
            "table area large enough for the record",
            "table-area-is-safe",
            Swap("len(data) <= self._area_bytes", "self._area_bytes > 0"),
        ),
        ("table areas used alternately", "table-areas-alternate", Remove()),
        ("area after a new file", "new-table-file-next-area", Swap("1", "0")),
        ("ascending sequence numbers of table records", "table-sequence-ascends", Remove()),
        (
            "goes on from the number that was found",
            "table-sequence-continues",
            Swap("self._sequence, self.newest = found.sequence,", "self.newest ="),
        ),
        ("newest whole record", "newest-table-record-wins", Swap("max", "min")),
        ("table that was found made durable", "found-table-made-durable", Remove()),
        ("table without a record is damage", "damaged-table-refused", Instead("return None")),
        ("missing table beside slots reported as damage", "missing-table-is-damage", Never()),
        (
            "slots of every possible table kept",
            "possible-tables-hold-slots",
            Swap("table in self._tables.possible for one in table.kept", "one in self._tables.newest.kept"),
        ),
        ("slots of unfinished saves kept", "drafts-hold-slots", Remove()),
        ("newest verified slot kept", "newest-verified-slot-kept", Instead("return tuple(good[-1:])")),
        ("one undamaged slot kept", "undamaged-slot-kept", Instead("good = [*kept]")),
        ("unknown outcome settled when no slot is free", "doubt-settled-when-full", Remove()),
        ("doubtful slot is free again", "doubtful-slot-freed", Remove()),
        ("failed commit keeps its slot", "failed-commit-keeps-slot", Instead("self._drop(folder)")),
        ("unique name of an unfinished generation", "draft-name-unique", Never()),
        ("same name, same bytes", "same-name-same-bytes", Always()),
        ("aborted file leaves its slot", "aborted-file-forgotten", Remove()),
        ("failed record leaves its slot", "failed-record-forgotten", Remove()),
        ("failed write spoils a slot", "failed-write-spoils-slot", Swap("with self._spoiling(slot)", "if True")),
        ("commit that cannot be removed has an unknown outcome", "uncleared-commit-is-doubtful", Remove()),
        ("pointer deleted with its target", "pointer-deleted-with-target", Swap("if one.to in targets", "")),
        ("pointers are written at the end", "pointers-written-at-close", Remove()),
        ("end of a file in a slot", "read-within-file-length", Never()),
        (
            "slot cut short is a short file",
            "truncated-slot-shortens-file",
            Swap("max(0, min(length, slot_bytes - start))", "length"),
        ),
        ("zeros before use", "slot-zeroed-before-use", Remove()),
        ("reservation of a slot", "slot-space-reserved", Remove()),
        ("slots shrunk again when their growth failed", "failed-growth-undone", Remove()),
        ("verified mark is written at once", "verified-mark-written-at-once", Remove()),
        ("deleted commit is gone at once", "deleted-commit-gone-at-once", Remove()),
    ),
    *table(
        "slots",
        core(),
        ("digest of a record", "table-record-digest", Never()),
        (
            "length of a record",
            "table-record-length",
            Swap(" and length <= min(room - ENVELOPE.size, RECORD_LIMIT_BYTES)", ""),
        ),
        ("version of the table", "newer-table-version-refused", Never()),
        ("folder stands once", "table-folder-unique", Remove()),
        ("slot is given once", "table-slot-unique", Remove()),
        ("file stands once", "table-file-unique", Remove()),
        ("offsets and lengths of the table", "table-extents-in-range", Remove()),
    ),
)
