"""Safeguards of the storage tiers: syncs, writes, and the link that commits."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import core

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "fsync",
        core("tiers"),
        ("fsync itself", "fsync-descriptor", Remove()),
        ("blob content", "blob-content-synced", Remove()),
        ("record content", "record-content-synced", Remove()),
        ("record found in place", "found-record-synced", Never()),
        ("first failure is final", "failed-sync-is-final", Remove()),
        ("after a failed sync", "no-sync-after-failed-sync", Never()),
    ),
    *table(
        "directory fsync",
        core("tiers"),
        ("fsync of a directory itself", "fsync-directory", Remove()),
        ("record's name", "record-name-synced", Remove()),
        ("record's name where it was already", "existing-record-name-synced", Remove()),
        ("pointer's name", "pointer-name-synced", Remove()),
        ("removed name", "removed-name-synced", Swap("_sync_folder(folder)", "_files.list(self._path(folder))")),
        ("removed folder's name", "removed-folder-name-synced", Remove()),
        ("new folder's name", "new-folder-name-synced", Remove()),
        (
            "folder that was there",
            "existing-folder-synced",
            Instead(
                "try:\n"
                "    self._files.make_dir(self._path(folder))\n"
                "except FileExistsError:\n"
                "    self._durable_folders.add(folder)\n"
                "    return"
            ),
        ),
        ("folder forgotten when it goes", "deleted-folder-forgotten", Remove()),
        ("folder forgotten on abort", "aborted-folder-forgotten", Remove()),
    ),
    *table(
        "directory fsync",
        core(),
        ("run's directory", "new-run-directory-synced", Remove()),
        ("run's directory that was there", "existing-run-directory-synced", Remove()),
    ),
    *table(
        "write",
        core("tiers"),
        ("short-write loop", "short-write-loop", Swap("while", "if")),
        ("count of a short write", "short-write-counted", Swap("+= whole", "= len(mv)")),
        (
            "block boundary after a short write",
            "short-write-keeps-alignment",
            Swap("count - count % DIRECT_IO_BYTES or ", ""),
        ),
        ("write that takes nothing", "zero-write-is-error", Never()),
        ("short-read loop", "short-read-loop", Instead("got = extent.length")),
        ("reservation", "blob-space-reserved", Remove()),
        ("reservation that fails cleans up", "failed-reserve-aborted", Remove()),
        ("cut of the padded tail", "padded-tail-cut", Remove()),
        ("abort removes the file", "abort-removes-blob", Remove()),
        ("abort removes the folder", "abort-removes-folder", Remove()),
        ("full disk leaves no staged record", "failed-staging-removed", Remove()),
        ("staged record is dropped", "staged-record-removed", Remove()),
        ("stale staged record", "stale-staged-record-removed", Remove()),
        ("stale staged link", "stale-link-removed", Remove()),
    ),
    *table(
        "write",
        core(),
        ("failed blob is aborted", "failed-blob-aborted", Remove()),
        ("writers let go before the abort", "writers-done-before-abort", Remove()),
        (
            "first error cancels",
            "all-writes-before-finish",
            Swap("job.result()", '"" if job.exception() else job.result()'),
        ),
        ("chunk comes home", "unsubmitted-chunk-released", Remove()),
        ("written chunk comes home", "written-chunk-released", Remove()),
        ("padding is zeroed", "tail-padding-zeroed", Remove()),
        ("litter is cleared at opening", "litter-removed-at-opening", Remove()),
        ("failed save is cleared", "failed-save-cleared", Remove()),
        ("unfinished is cleared at opening", "unfinished-removed-at-opening", Always()),
    ),
    *table(
        "commit",
        core("tiers"),
        ("link instead of overwriting", "link-never-overwrites", Swap("link", "rename")),
        ("staging: created in place", "record-staged-before-link", Always()),
        ("blob never replaces", "new-blob-is-exclusive", Swap(" | os.O_EXCL", "")),
        ("unknown link is read back", "unknown-link-read-back", Instead("raise _unknown(path, error) from error")),
        ("unknown link is not taken for success", "unknown-link-read-back", Remove()),
        ("read-back compares", "read-back-compares", Always()),
        ("read-back reads past the end", "read-back-past-end", Swap(" + 1", "")),
        ("read-back loops", "read-back-loop", Swap("while", "if")),
        (
            "unknown outcome deletes nothing",
            "unknown-outcome-deletes-nothing",
            Swap("raise", "self._drop(path); raise"),
        ),
        ("unsynced name is unknown, not failed", "unsynced-name-is-unknown", Swap("OSError", "()")),
        ("unknown in place", "failed-creation-is-unknown", Instead("raise")),
        ("lock", "exclusive-run-lock", Remove()),
        ("lock is not inherited", "lock-not-inherited-by-fork", Remove()),
        (
            "pointer is renamed, not rewritten",
            "pointer-replaced-by-rename",
            Swap("self.", "self._remove_if_there(path); self."),
        ),
    ),
    *table(
        "commit",
        core(),
        ("unknown commit: nothing is retired", "unknown-commit-deletes-nothing", Swap("CommitUnknown", "()")),
        ("unknown commit: its step is taken", "unknown-commit-takes-step", Remove()),
        ("step ascends", "step-ascends", Swap("(last and step <= last.step) or ", "")),
        ("run that is not restored is refused", "unrestored-run-refused", Never()),
        ("taken name: nothing is retired", "taken-name-deletes-nothing", Always()),
        ("labels are durable before they are gone by", "labels-durable-before-use", Remove()),
        (
            "a missing record of an incarnation is written by the next opening",
            "missing-incarnation-record-written",
            Never(),
        ),
        (
            "a generation is not deleted while it gets a label",
            "labelled-generation-not-deleted",
            Swap("at in known.labelling or ", ""),
        ),
        (
            "a generation that got a label since its deletion was decided stays",
            "labelled-generation-not-deleted",
            Swap(" or self._commit_of(at) != decided", ""),
        ),
        ("a generation that is being deleted gets no label", "no-label-during-deletion", Never()),
        ("parent is durable before it is continued", "parent-durable-before-continuing", Remove()),
    ),
)
