"""The tree of errors. Each says what happened, what is still safe and what to do; the class says whether to retry.

    LastgoodError
    |- Refused       the request was wrong; nothing was touched            do not retry          exit 3
    |    StateMismatch  Unstorable  UnknownFormat  RunLocked  StepTaken  NoSuchStep  NoSuchTensor
    |    NotARun  NotWritable  NotRestored  NameTaken  NotInstalled
    |- Damaged       bytes are not what was committed                      an older generation   exit 4
    |    SumMismatch  Truncated  ManifestInvalid  MissingBlob  Unreadable  BeyondRepair  NothingGood
    |    HalfLoaded (LoadFailed)
    |- Unavailable   may work later or elsewhere                           retry with backoff    exit 5
    |    TierDown  NoSpace  TimedOut  CommitUnknown  Cancelled  Overtaken  InFlightFull  NothingDurable
    |- Diverged      the cut, or what should be equal, disagrees           drop this save        exit 6
    |    TornSnapshot  RankFailed  StepDiffers (HeardLate)  ReplicaDiffers
    `- Unfit         intact, and not good                                  an older generation   exit 8
         NotFinite

Anything else that is raised is a bug in this package and is not caught.
"""

from __future__ import annotations

from typing import ClassVar


class LastgoodError(Exception):
    """Root of the tree. `what` happened (and where), what is still `safe`, what `todo`."""

    retry: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, safe: str = "", todo: str = "") -> None:
        self.what, self.safe, self.todo = what, safe, todo
        super().__init__(" ".join(_sentence(part) for part in (what, safe, todo) if part))


def _sentence(text: str) -> str:
    return text if text[-1] in ".!?:\n" or "\n" in text else text + "."


class Refused(LastgoodError):
    """The request was wrong; nothing was touched."""

    exit_code = 3


class StateMismatch(Refused):
    """The generation and the live state do not agree; every difference is listed."""

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
            todo="Build the same state, map old names with rename={old: new}, or load what fits with strict=False. "
            "What has grown since, such as a vocabulary: build it in its stored shape, restore, then resize it.",
        )


class Unstorable(Refused):
    """Entries of the state cannot be stored without running code on load; `names` lists them."""

    def __init__(self, what: str, *, safe: str = "", todo: str = "", names: tuple[str, ...] = ()) -> None:
        self.names = names
        super().__init__(what, safe=safe, todo=todo)


class UnknownFormat(Refused):
    """Written by a newer version of this package."""


class RunLocked(Refused):
    """Another process has this run open for writing."""


class StepTaken(Refused):
    """This incarnation already holds this step, or a later one."""


class NoSuchStep(Refused):
    """No committed generation has this step."""


class NoSuchTensor(Refused):
    """The generation holds no tensor of this name."""


class NotARun(Refused):
    """The path is a file, or a directory that belongs to somebody else."""


class NotWritable(Refused):
    """The run cannot be written (or read) with this user's rights."""


class NotRestored(Refused):
    """The run holds generations that the live state does not continue."""


class NameTaken(Refused):
    """A blob of that name exists with other bytes; it is untouched."""


class NotInstalled(Refused):
    """A part of lastgood was asked for that needs a package which is not installed. `command` installs it."""

    def __init__(self, what: str, package: str, command: str) -> None:
        self.package, self.command = package, command
        super().__init__(
            f"{what} needs the package {package}, which is not installed",
            safe="Nothing was touched.",
            todo=f"Install it: {command}",
        )


class Damaged(LastgoodError):
    """Bytes are not what was committed."""

    exit_code = 4

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
    """Bytes differ from their digest."""


class Truncated(Damaged):
    """A file is shorter or longer than what was committed."""


class ManifestInvalid(Damaged):
    """A record or a header does not have the form that the format demands."""


class MissingBlob(Damaged):
    """A file that was committed is gone."""


class Unreadable(Damaged):
    """The medium answers a read with an error."""


class HalfLoaded(Damaged):
    """Loading failed after it had begun to write: the live state is part of one step and part of another."""


class LoadFailed(HalfLoaded):
    """Code outside of lastgood, such as a `load_state_dict`, raised while a generation was loaded; it is the cause."""


class BeyondRepair(Damaged):
    """More was lost than parity can stand in for, or there is no parity."""


class NothingGood(Damaged):
    """Generations exist, and none of them is good."""


class Unavailable(LastgoodError):
    """May work later or elsewhere."""

    retry = True
    exit_code = 5


class TierDown(Unavailable):
    """The place where blobs rest answered with an error."""


class NoSpace(Unavailable):
    """The disk or the quota is full."""


class TimedOut(Unavailable):
    """It did not end in the time that it was given."""


class CommitUnknown(Unavailable):
    """The commit may or may not have become durable. Nothing was deleted; the next opening finds out."""


class Cancelled(Unavailable):
    """The save was given up before its commit."""


class Overtaken(Unavailable):
    """A newer save was committed first, so this one was given up; nothing is lost by it."""


class InFlightFull(Unavailable):
    """As many saves are in flight as were allowed, and `when_full="raise"` was asked for."""


class NothingDurable(Unavailable):
    """No save became durable for as long as `Checkpointer(durable_within_seconds=...)` allows."""


class Diverged(LastgoodError):
    """The cut, or what should be equal, disagrees."""

    exit_code = 6


class RankFailed(Diverged):
    """A rank failed, was not heard of in time, or did not answer; what it was part of ended on all ranks."""


class StepDiffers(Diverged):
    """Ranks are at different steps, or make different plans."""


class HeardLate(StepDiffers):
    """A rank heard of a step when it had passed it."""


class ReplicaDiffers(Diverged):
    """Ranks that should hold the same hold something else."""


class TornSnapshot(Diverged):
    """The live state changed, or was replaced, while it was copied."""


class Unfit(LastgoodError):
    """The bytes are what was committed, and what they say is not good."""

    exit_code = 8


class NotFinite(Unfit):
    """A parameter, or the state of an optimizer, holds NaN or infinity."""

    def __init__(self, what: str, *, tensor: str = "", safe: str = "", todo: str = "") -> None:
        self.tensor = tensor
        super().__init__(what, safe=safe, todo=todo)


class LastgoodWarning(UserWarning):
    """Kept so that scripts which name it in a warnings filter go on to work. It is not raised any more.

    What goes wrong behind the training loop is reported through the logger `lastgood`, and on stderr.
    """
