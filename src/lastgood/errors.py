"""All exceptions of this package. Each says what happened, what is still safe, and what to do.

The class says whether a retry can help, and which exit code the command line ends with.

    LastgoodError
    |- Refused       the request was wrong; nothing was changed            do not retry          exit 3
    |    StateMismatch  Unstorable  UnknownFormat  RunLocked  StepTaken  NoSuchStep  NoSuchTensor
    |    NotARun  NotWritable  NotRestored  NameTaken  NotInstalled  RunReplaced  PeerRefused
    |- Damaged       stored bytes are not those that were committed        load an older one     exit 4
    |    SumMismatch  Truncated  ManifestInvalid  MissingBlob  Unreadable  BeyondRepair  NothingGood
    |    HalfLoaded (LoadFailed)
    |- Unavailable   it may work later or on another machine               retry with backoff    exit 5
    |    TierDown  NoSpace  TimedOut  CommitUnknown  Cancelled  Overtaken  InFlightFull  NothingDurable
    |    PeerDown  FrameInvalid
    |- Diverged      ranks, replicas or the snapshot are inconsistent      skip this save        exit 6
    |    TornSnapshot  RankFailed  StepDiffers (HeardLate)  ReplicaDiffers
    `- Unfit         intact, but not good to go on from                    load an older one     exit 8
         NotFinite  Suspect  TrainingDiverged

Any other exception that this package raises by itself is a bug in it, and is not caught. Exceptions of user code (a
callback, a `load_state_dict`) are passed on or are the `__cause__` of one of these.
"""

from __future__ import annotations

from typing import ClassVar


class LastgoodError(Exception):
    """Base class of all errors. Its text is `what`, `safe` and `todo`, one after the other.

    `what`: what happened, and where. `safe`: what is still safe. `todo`: what the user can do.
    """

    retry: ClassVar[bool] = False
    """whether the same call may succeed later"""
    exit_code: ClassVar[int] = 1
    """of the command line"""

    def __init__(self, what: str, *, safe: str = "", todo: str = "") -> None:
        self.what, self.safe, self.todo = what, safe, todo
        super().__init__(" ".join(_sentence(part) for part in (what, safe, todo) if part))


def _sentence(text: str) -> str:
    return text if text[-1] in ".!?:\n" or "\n" in text else text + "."


def class_named(name: str, otherwise: type[LastgoodError]) -> type[LastgoodError]:
    """The error class of this name, if it is made from texts alone, as a message has them; else `otherwise`."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, LastgoodError) and kind not in (StateMismatch, NotInstalled):
        return kind
    return otherwise


class Refused(LastgoodError):
    """The request was wrong. Nothing was changed, on disk or in the live state."""

    exit_code = 3


class StateMismatch(Refused):
    """The generation does not fit the live state. All differences are listed, and nothing was loaded.

    `missing`: names that only the live state has. `unexpected`: names that only the generation has. `mismatched`: names
    with another shape, dtype or type, with both.
    """

    def __init__(
        self,
        step: int,
        missing: list[str],
        unexpected: list[str],
        mismatched: list[str],
    ) -> None:
        self.missing, self.unexpected, self.mismatched = missing, unexpected, mismatched
        lines = [f"step {step} does not fit this state:"]
        for title, names in (
            ("missing in the generation", missing),
            ("unexpected in the generation", unexpected),
            ("mismatched", mismatched),
        ):
            lines += [f"  {title}: {name}" for name in names]
        super().__init__(
            "\n".join(lines),
            safe="\nNothing was loaded; the live state is untouched.",
            todo="Build the same state, map old names with rename={old: new}, where a dot at the end of both means all "
            "names below; or load what fits with strict=False, which leaves the rest as it is here. "
            "Build a tensor that has grown since, such as an embedding, in its stored shape, restore, then resize it.",
        )


class Unstorable(Refused):
    """The state has entries that cannot be stored, because loading them would run code. `names`: of these entries."""

    def __init__(self, what: str, *, safe: str = "", todo: str = "", names: tuple[str, ...] = ()) -> None:
        self.names = names
        super().__init__(what, safe=safe, todo=todo)


class UnknownFormat(Refused):
    """The run was written in a format that only a newer version of this package can read."""


class RunLocked(Refused):
    """Another process has this run open for writing."""


class RunReplaced(Refused):
    """Another process has opened this run, which is in an object store, for writing since: this one may not commit."""


class StepTaken(Refused):
    """This step or a later one was saved already. Saved steps must ascend; `restore(step=...)` goes back."""


class NoSuchStep(Refused):
    """The run has no committed generation of this step."""


class NoSuchTensor(Refused):
    """The generation has no tensor of this name."""


class NotARun(Refused):
    """The path is no run: it does not exist, is a file, or is a directory with files that are not of a run."""


class NotWritable(Refused):
    """This user has no permission to write the run, or to read it."""


class NotRestored(Refused):
    """The run holds generations, and the live state was not restored from one of them before the first save."""


class NameTaken(Refused):
    """A blob of this name exists with other bytes. It was not changed."""


class PeerRefused(Refused):
    """Two nodes do not accept each other: their keys, certificates, runs, names or modes. `reason`: which."""

    def __init__(self, what: str, *, safe: str = "", todo: str = "", reason: str = "") -> None:
        self.reason = reason
        super().__init__(what, safe=safe, todo=todo)


class NotInstalled(Refused, ImportError):
    """A part of lastgood was asked for that needs a package which is not installed. `command` installs it.

    It is an ImportError too, so that `try: import lastgood.integrations.lightning` works with `except ImportError`.
    """

    def __init__(self, what: str, package: str, command: str) -> None:
        self.package, self.command = package, command
        super().__init__(
            f"{what} needs the package {package}, which is not installed",
            safe="Nothing was touched.",
            todo=f"Install it: {command}",
        )


class Damaged(LastgoodError):
    """Stored bytes are not those that were committed. Older generations may be intact.

    `blob`: name of the file. `offset`: first byte of the damaged part. `chunk`: its number in the file, -1 if unknown.
    `tensor`: its name. Each is empty if it is not known.
    """

    exit_code = 4
    FIELDS = "blob", "offset", "chunk", "tensor"

    def __init__(
        self,
        what: str,
        *,
        blob: str = "",
        offset: int = 0,
        chunk: int = -1,
        tensor: str = "",
        safe: str = "",
        todo: str = "",
    ) -> None:
        self.blob, self.offset, self.chunk, self.tensor = blob, offset, chunk, tensor
        super().__init__(what, safe=safe, todo=todo)


class SumMismatch(Damaged):
    """Bytes do not have the digest that was committed for them."""


class Truncated(Damaged):
    """A file is shorter or longer than it was when it was committed."""


class ManifestInvalid(Damaged):
    """A record or the header of a file is not valid in the format (docs/format.md)."""


class MissingBlob(Damaged):
    """A file that was committed does not exist any more."""


class Unreadable(Damaged):
    """The operating system returns an I/O error when the bytes are read."""


class HalfLoaded(Damaged):
    """Loading failed after it had begun to write: the live state is a mixture of two steps. Restore again."""


class LoadFailed(HalfLoaded):
    """User code, such as a `load_state_dict`, raised while a generation was loaded: `__cause__` is that exception. Or
    live tensors share a part of their memory, for which the generation has different bytes."""


class BeyondRepair(Damaged):
    """More parts of a generation are damaged than its parity can rebuild, or it has no parity."""


class NothingGood(Damaged):
    """The run has generations, but none of them is good."""


class Unavailable(LastgoodError):
    """The call may succeed later, or on another machine."""

    retry = True
    exit_code = 5


class TierDown(Unavailable):
    """The file system that holds the run returned an error, or the store of the process group did."""


class PeerDown(Unavailable):
    """Another node cannot be reached, or the connection to it broke. A request on its way may have been carried out."""


class FrameInvalid(Unavailable):
    """What was received is not what the peer has sent. It was not used. `reason`: what is wrong, in a word."""

    def __init__(self, what: str, *, safe: str = "", todo: str = "", reason: str = "") -> None:
        self.reason = reason
        super().__init__(what, safe=safe, todo=todo)


class NoSpace(Unavailable):
    """The disk or the quota is full."""


class TimedOut(Unavailable):
    """An operation did not end within its timeout."""


class CommitUnknown(Unavailable):
    """It is not known whether the commit became durable. Nothing was deleted; opening the run again shows it."""


class Cancelled(Unavailable):
    """The save, or the reading of a generation, was cancelled before its end."""


class Overtaken(Unavailable):
    """A newer save was committed first, so this one was cancelled. Nothing is lost by this."""


class InFlightFull(Unavailable):
    """As many saves are in flight as `in_flight` allows, and `when_full` is "raise". This step was not saved."""


class NothingDurable(Unavailable):
    """No save became durable within `Checkpointer(durable_within_seconds=...)`."""


class Diverged(LastgoodError):
    """Ranks disagree, replicas differ, or the snapshot is inconsistent. Committed generations are not affected."""

    exit_code = 6


class RankFailed(Diverged):
    """A rank failed, or did not answer in time. The operation it took part in has ended on all ranks."""


class StepDiffers(Diverged):
    """Ranks are at different steps, have different options, or would load or save different things."""


class HeardLate(StepDiffers):
    """A rank received an announcement for a step only after it had passed that step."""


class ReplicaDiffers(Diverged):
    """Ranks that should hold the same bytes of a tensor hold different ones."""


class TornSnapshot(Diverged):
    """The live state was changed or replaced while it was copied, so the copy is no state of one step."""


class Unfit(LastgoodError):
    """The bytes are those that were committed, but the state they hold is not good to continue from."""

    exit_code = 8


class NotFinite(Unfit):
    """A parameter or an optimizer's state holds NaN or infinity. `tensor`: its name."""

    def __init__(self, what: str, *, tensor: str = "", safe: str = "", todo: str = "") -> None:
        self.tensor = tensor
        super().__init__(what, safe=safe, todo=todo)


class Suspect(Unfit):
    """Training that went on from this generation has failed each time, at the same step and with the same cause."""


class TrainingDiverged(Unfit):
    """The loss or the gradients are not finite, or far above what they were: raised by `Checkpointer.step`."""


NODE_FAILED = PeerDown, PeerRefused, FrameInvalid, TimedOut
"""what a request to another node raises if that node cannot be used"""


class LastgoodWarning(UserWarning):
    """Not used any more. It exists so that scripts that name it in a warnings filter go on working.

    Failures behind the training loop are reported through the logger `lastgood` and on stderr.
    """
