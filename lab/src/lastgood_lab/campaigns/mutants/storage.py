"""Mutants of the safeguards of the storage tiers: syncs, writes, and the link that commits."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import core

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "agents",
        ("agent",),
        (
            "a pipe in place of a record is waited for",
            "agents-pipe-not-waited-for",
            Swap(" | os.O_NONBLOCK", ""),
        ),
        (
            "an agent that has often ended soon is tried ever more seldom",
            "short-lived-agent-retried",
            Swap(" and time.monotonic() < self._retry_at", ""),
        ),
    ),
    *table(
        "fsync",
        core("tiers"),
        ("no file is synced", "fsync-descriptor", Remove()),
        ("a blob is sealed before its content is synced", "blob-content-synced", Remove()),
        ("a record is linked before its content is synced", "record-content-synced", Remove()),
        ("the content of a record that already exists is not synced", "found-record-synced", Never()),
        ("a failed fsync is not remembered for its file", "failed-sync-is-final", Remove()),
        ("a file is synced again after a failed fsync", "no-sync-after-failed-sync", Never()),
    ),
    *table(
        "directory fsync",
        core("tiers"),
        ("no directory is synced", "fsync-directory", Remove()),
        ("the name of a new record is not synced", "record-name-synced", Remove()),
        ("the name of a record that already exists is not synced", "existing-record-name-synced", Remove()),
        ("the name of the pointer is not synced", "pointer-name-synced", Remove()),
        (
            "the deletion of a file's name is not synced",
            "removed-name-synced",
            Swap("_sync_folder(folder)", "_files.list(self._path(folder))"),
        ),
        ("the deletion of a folder's name is not synced", "removed-folder-name-synced", Remove()),
        ("the name of a new folder is not synced", "new-folder-name-synced", Remove()),
        (
            "the name of a folder that already exists is not synced",
            "existing-folder-synced",
            Instead(
                "try:\n"
                "    self._files.make_dir(self._path(folder))\n"
                "except FileExistsError:\n"
                "    self._durable_folders.add(folder)\n"
                "    return"
            ),
        ),
        ("a deleted folder still counts as synced", "deleted-folder-forgotten", Remove()),
        ("an aborted folder still counts as synced", "aborted-folder-forgotten", Remove()),
    ),
    *table(
        "directory fsync",
        core(),
        ("the name of a new run directory is not synced", "new-run-directory-synced", Remove()),
        ("the name of a run directory that already exists is not synced", "existing-run-directory-synced", Remove()),
    ),
    *table(
        "writing",
        core("tiers"),
        ("the rest of a short write is lost", "short-write-loop", Swap("while", "if")),
        ("a short write counts as complete", "short-write-counted", Swap("+= whole", "= len(mv)")),
        (
            "direct I/O continues inside a block after a short write",
            "short-write-keeps-alignment",
            Swap("count - count % DIRECT_IO_BYTES or ", ""),
        ),
        ("a write of zero bytes raises no error", "zero-write-is-error", Never()),
        ("a short read counts as complete", "short-read-loop", Instead("got = extent.length")),
        ("the space of a blob is not reserved", "blob-space-reserved", Remove()),
        ("a blob whose reservation failed is not removed", "failed-reserve-aborted", Remove()),
        ("the padding at the end of a blob is not cut off", "padded-tail-cut", Remove()),
        ("an aborted file is not removed", "abort-removes-blob", Remove()),
        ("an aborted folder is not removed", "abort-removes-folder", Remove()),
        ("a staged record that failed on a full disk is not removed", "failed-staging-removed", Remove()),
        ("a staged record is not removed after its link", "staged-record-removed", Remove()),
        ("a stale staged record is not removed", "stale-staged-record-removed", Remove()),
        ("a stale staged symbolic link is not removed", "stale-link-removed", Remove()),
    ),
    *table(
        "writing",
        core(),
        ("a failed blob is not aborted", "failed-blob-aborted", Remove()),
        ("the abort does not wait for the writers", "writers-done-before-abort", Remove()),
        (
            "an error of a writer does not fail the blob",
            "all-writes-before-finish",
            Swap("job.result()", '"" if job.exception() else job.result()'),
        ),
        ("a chunk that was never submitted is not released", "unsubmitted-chunk-released", Remove()),
        ("a written chunk is not released", "written-chunk-released", Remove()),
        ("the padding of the last chunk holds other bytes than zeros", "tail-padding-zeroed", Remove()),
        ("an opening does not remove temporary files", "litter-removed-at-opening", Remove()),
        ("the files of a failed save are not removed", "failed-save-cleared", Remove()),
        (
            "an opening forgets unfinished generations without deleting them",
            "unfinished-removed-at-opening",
            Always(),
        ),
    ),
    *table(
        "commit",
        core("tiers"),
        ("a record may overwrite an existing one", "link-never-overwrites", Swap("link", "rename")),
        ("a record is created in place on a tier that can link", "record-staged-before-link", Always()),
        ("a new blob may replace a file", "new-blob-is-exclusive", Swap(" | os.O_EXCL", "")),
        (
            "a link of unknown outcome is not read back",
            "unknown-link-read-back",
            Instead("raise _unknown(path, error) from error"),
        ),
        ("a link of unknown outcome counts as successful", "unknown-link-read-back", Remove()),
        ("other bytes count as equal when they are read back", "read-back-compares", Always()),
        ("longer content with the same beginning counts as equal", "read-back-past-end", Swap(" + 1", "")),
        ("a short read ends the comparison", "read-back-loop", Swap("while", "if")),
        (
            "a record of unknown outcome is deleted",
            "unknown-outcome-deletes-nothing",
            Swap("raise", "self._drop(path); raise"),
        ),
        ("a record whose name could not be synced counts as failed", "unsynced-name-is-unknown", Swap("OSError", "()")),
        (
            "a file that failed while it was created in place counts as not written",
            "failed-creation-is-unknown",
            Instead("raise"),
        ),
        ("a run is not locked", "exclusive-run-lock", Remove()),
        ("a lock whose file cannot be written is held", "failed-lock-is-released", Remove()),
        ("a forked child keeps the lock", "lock-not-inherited-by-fork", Remove()),
        (
            "the pointer is removed before its replacement",
            "pointer-replaced-by-rename",
            Swap("self.", "self._remove_if_there(path); self."),
        ),
    ),
    *table(
        "commit",
        core(),
        (
            "the files of a commit of unknown outcome are deleted",
            "unknown-commit-deletes-nothing",
            Swap("CommitUnknown", "()"),
        ),
        ("the step of a commit of unknown outcome may be saved again", "unknown-commit-takes-step", Remove()),
        (
            "an incarnation may save the same step again, or an older one",
            "step-ascends",
            Swap("(last and step <= last.step) or ", ""),
        ),
        ("a save without a restore is accepted in a run with generations", "unrestored-run-refused", Never()),
        ("a save whose name is taken deletes the files under it", "taken-name-deletes-nothing", Always()),
        ("retention uses labels that may not be durable", "labels-durable-before-use", Remove()),
        (
            "an incarnation is recorded while its commit may not be durable",
            "commit-durable-before-its-incarnation",
            Remove(),
        ),
        (
            "the next opening does not write a missing incarnation record",
            "missing-incarnation-record-written",
            Never(),
        ),
        (
            "a generation is deleted while it gets a label",
            "labelled-generation-not-deleted",
            Swap("at in known.labelling or ", ""),
        ),
        (
            "a generation is deleted that got a label after the decision",
            "labelled-generation-not-deleted",
            Swap(" or self._commit_of(at) != decided", ""),
        ),
        ("a generation gets a label while it is deleted", "no-label-during-deletion", Never()),
        ("a new incarnation continues a parent that may not be durable", "parent-durable-before-continuing", Remove()),
    ),
)
