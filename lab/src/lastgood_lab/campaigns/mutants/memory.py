"""Mutants of the safeguards of memory, of its agent and of drills: limits, owners, what stays, who may remove it."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "memory",
        ("memory_limits", "memory_files", "reused_files", "memory_runs"),
        ("memory is taken beyond the limit of the control group", "memory-limit-before-reserve", Never()),
        ("two processes take the same free memory", "memory-reserved-one-by-one", Remove()),
        ("a folder that another user made first is used", "memory-of-another-user-refused", Never()),
        ("a folder on a disk is used as memory", "memory-is-a-tmpfs", Never()),
        ("memory of deleted files grows", "reused-memory-bounded", Remove()),
        ("a mapping holds memory that another process has freed", "mapping-of-removed-file-released", Remove()),
        ("a file is taken while it is read", "read-file-not-reused", Remove()),
        ("a file that was deleted and taken is read", "reused-file-not-read", Never()),
        ("a file is refused while deleted ones have its memory", "reused-memory-freed-first", Remove()),
        ("milestones stay in memory for ever", "memory-keeps-no-milestones", Never()),
    ),
    *table(
        "agent",
        ("agent", "agent_work", "ranks_memory"),
        ("a place keeps a run that was not closed from ending", "unclosed-place-ends-with-the-process", Remove()),
        ("COMMIT is copied before the files of other nodes", "commit-copied-after-all-nodes", Never()),
        ("another user is served", "agent-serves-own-user", Never()),
        ("the memory of an open run is removed", "open-memory-not-removed", Swap("access.LOCK", '"other"')),
        ("an agent goes on in a folder that is not its own", "agent-of-removed-folder-ends", Instead("return True")),
        ("what is on a disk is removed after the copies", "only-memory-removed", Never()),
        ("memory is removed although a save came since the copies", "new-saves-not-removed", Never()),
        ("a folder has two agents", "one-agent-for-a-folder", Swap("LOCK", "str(os.getpid())")),
        ("a fork keeps the connection of its parent open", "link-not-inherited-by-fork", Remove()),
        ("an agent that does not answer goes on beside the new one", "silent-agent-killed", Remove()),
        ("a newer process in a bucket is replaced", "newer-claim-not-taken-over", Swap("newest <= own_claims", "True")),
        ("work goes on for a training process that has ended", "abandoned-work-stops", Remove()),
        (
            "a process is attached while work for another one goes on",
            "attached-after-work-stopped",
            Swap(" and not self._works.running()", ""),
        ),
        (
            "an agent is replaced ever more seldom, the longer a run goes on",
            "lived-agent-replaced-at-once",
            Remove(),
        ),
        ("an agent that hangs is waited for", "hung-agent-not-waited-for", Never()),
        ("an agent copies while the run is opened", "agent-attached-before-opening", Remove()),
    ),
    *table(
        "peers",
        ("peers", "ranks_memory"),
        ("copies come into a deleted generation", "deleted-generation-gets-no-copies", Never()),
        ("finished files are replaced", "finished-copy-not-replaced", Never()),
        (
            "readers see a file that is being received",
            "copy-named-when-complete",
            Swap("call.name + RECEIVING", "call.name"),
        ),
        ("two sendings of a file mix", "sendings-do-not-mix", Swap(" or one.sending != call.sending", "")),
        ("a label that comes during a copy is lost", "label-during-copy-copied-again", Never()),
        ("the first place that has its copy gives it free", "held-until-all-have-it", Always()),
        ("a node serves requests that nobody makes, and not those of copies", "only-asked-subjects-served", Never()),
        ("half of a copy counts as one", "copy-counts-with-its-manifest", Swap("one.manifest in listing", "True")),
    ),
    *table(
        "drill",
        ("drill",),
        ("a folder with the files of somebody else is removed", "drill-clears-only-scratch", Never()),
        ("copies fill the disk of the run", "drill-needs-free-space", Never()),
        ("copies take memory that is not there", "drill-needs-free-memory", Never()),
        ("a copy that is not the original counts as brought back", "drill-compares-digests", Remove()),
    ),
    *table(
        "commit on nodes",
        ("node_commit",),
        ("a generation is deleted before a newer one has its copies", "copied-generation-held", Remove()),
        ("a save whose commit is unknown is deleted without a store", "doubt-survives-lost-store", Never()),
    ),
    *table(
        "parity among nodes",
        ("node_parity", "stripes"),
        (
            "parity lies on the nodes of its data",
            "parity-beside-its-data",
            Swap("[k:]", "[:-k]"),
        ),
        ("cells of other nodes are used unverified", "stripe-cell-verified", Never()),
        ("parity of another generation is used", "stripes-of-this-generation", Never()),
        ("files of parity carry no manifests", "stripes-carry-manifests", Remove()),
        ("a damaged copy of a manifest is used", "rebuilt-manifest-matches-seal", Always()),
        ("a rebuilt file has no manifest", "rebuilt-manifest-last", Remove()),
        ("chunks are read of what cannot be made whole", "feasible-before-reading", Remove()),
        ("another node writes parity here", "parity-of-others-not-written", Always()),
        ("a record that cannot be true is used", "stripe-record-plausible", Never()),
        ("parity is made with too few nodes", "parity-needs-its-nodes", Swap("<= nodes", "<= nodes + 2")),
    ),
)
