"""Safeguards of the storage tiers: syncs, writes, and the link that commits."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import core

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "fsync",
        core("tiers"),
        ("the fsync call of every file", "fsync-descriptor", Remove()),
        ("the blob's content, before its seal", "blob-content-synced", Remove()),
        ("the record's content, before its link", "record-content-synced", Remove()),
        ("the content of a record that already exists", "found-record-synced", Never()),
        ("a failed fsync is final for its file", "failed-sync-is-final", Remove()),
        ("no further fsync of a file after one failed", "no-sync-after-failed-sync", Never()),
    ),
    *table(
        "directory fsync",
        core("tiers"),
        ("the fsync call of every directory", "fsync-directory", Remove()),
        ("record's name", "record-name-synced", Remove()),
        ("the name of a record that already exists", "existing-record-name-synced", Remove()),
        ("name of the pointer", "pointer-name-synced", Remove()),
        (
            "name of a deleted file",
            "removed-name-synced",
            Swap("_sync_folder(folder)", "_files.list(self._path(folder))"),
        ),
        ("name of a deleted folder", "removed-folder-name-synced", Remove()),
        ("name of a new folder", "new-folder-name-synced", Remove()),
        (
            "name of a folder that already exists",
            "existing-folder-synced",
            Instead(
                "try:\n"
                "    self._files.make_dir(self._path(folder))\n"
                "except FileExistsError:\n"
                "    self._durable_folders.add(folder)\n"
                "    return"
            ),
        ),
        ("a deleted folder is no longer counted as synced", "deleted-folder-forgotten", Remove()),
        ("an aborted folder is no longer counted as synced", "aborted-folder-forgotten", Remove()),
    ),
    *table(
        "directory fsync",
        core(),
        ("name of a new run directory", "new-run-directory-synced", Remove()),
        ("name of a run directory that already exists", "existing-run-directory-synced", Remove()),
    ),
    *table(
        "writing",
        core("tiers"),
        ("loop over short writes", "short-write-loop", Swap("while", "if")),
        ("count of a short write", "short-write-counted", Swap("+= whole", "= len(mv)")),
        (
            "block boundary after a short write",
            "short-write-keeps-alignment",
            Swap("count - count % DIRECT_IO_BYTES or ", ""),
        ),
        ("error for a write of zero bytes", "zero-write-is-error", Never()),
        ("loop over short reads", "short-read-loop", Instead("got = extent.length")),
        ("reservation of a blob's space", "blob-space-reserved", Remove()),
        ("removal of a blob whose reservation failed", "failed-reserve-aborted", Remove()),
        ("truncation of the padded tail", "padded-tail-cut", Remove()),
        ("removal of an aborted file", "abort-removes-blob", Remove()),
        ("removal of an aborted folder", "abort-removes-folder", Remove()),
        ("removal of a staged record that failed on a full disk", "failed-staging-removed", Remove()),
        ("removal of a staged record after its link", "staged-record-removed", Remove()),
        ("removal of a stale staged record", "stale-staged-record-removed", Remove()),
        ("removal of a stale staged symbolic link", "stale-link-removed", Remove()),
    ),
    *table(
        "writing",
        core(),
        ("abort of a failed blob", "failed-blob-aborted", Remove()),
        ("end of all writers before the abort", "writers-done-before-abort", Remove()),
        (
            "first error of a writer fails the blob",
            "all-writes-before-finish",
            Swap("job.result()", '"" if job.exception() else job.result()'),
        ),
        ("release of a chunk that was never submitted", "unsubmitted-chunk-released", Remove()),
        ("release of a written chunk", "written-chunk-released", Remove()),
        ("zeros in the padding of the tail", "tail-padding-zeroed", Remove()),
        ("removal of temporary files when the run is opened", "litter-removed-at-opening", Remove()),
        ("removal of a failed save's files", "failed-save-cleared", Remove()),
        ("removal of unfinished generations when the run is opened", "unfinished-removed-at-opening", Always()),
    ),
    *table(
        "commit",
        core("tiers"),
        ("link that never overwrites a record", "link-never-overwrites", Swap("link", "rename")),
        ("record staged before its link", "record-staged-before-link", Always()),
        ("new blob never replaces a file", "new-blob-is-exclusive", Swap(" | os.O_EXCL", "")),
        (
            "read-back after a link of unknown outcome",
            "unknown-link-read-back",
            Instead("raise _unknown(path, error) from error"),
        ),
        ("link of unknown outcome is not assumed to have succeeded", "unknown-link-read-back", Remove()),
        ("comparison of the bytes read back", "read-back-compares", Always()),
        ("read-back that would notice longer content", "read-back-past-end", Swap(" + 1", "")),
        ("loop over short reads of the read-back", "read-back-loop", Swap("while", "if")),
        (
            "no deletion after an unknown outcome",
            "unknown-outcome-deletes-nothing",
            Swap("raise", "self._drop(path); raise"),
        ),
        ("unknown outcome when a name could not be synced", "unsynced-name-is-unknown", Swap("OSError", "()")),
        ("unknown outcome when a file created in place failed", "failed-creation-is-unknown", Instead("raise")),
        ("exclusive lock of the run", "exclusive-run-lock", Remove()),
        ("lock that a forked child does not inherit", "lock-not-inherited-by-fork", Remove()),
        (
            "replacement of the pointer by a rename",
            "pointer-replaced-by-rename",
            Swap("self.", "self._remove_if_there(path); self."),
        ),
    ),
    *table(
        "commit",
        core(),
        (
            "no deletion after a commit of unknown outcome",
            "unknown-commit-deletes-nothing",
            Swap("CommitUnknown", "()"),
        ),
        ("step of a commit of unknown outcome is used up", "unknown-commit-takes-step", Remove()),
        ("steps of one incarnation ascend", "step-ascends", Swap("(last and step <= last.step) or ", "")),
        ("refusal of saves before a restore", "unrestored-run-refused", Never()),
        ("no deletion when the generation's name exists already", "taken-name-deletes-nothing", Always()),
        ("labels durable before retention uses them", "labels-durable-before-use", Remove()),
        (
            "missing incarnation record written by the next opening",
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
