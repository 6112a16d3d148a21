"""What happens to saves and generations, as records for logs and plots: one class for each kind of event.

`Checkpointer(on_event=...)` is called with them on the training thread. docs/events.md lists all of them.

    def log(event: lastgood.Event) -> None:
        match event:
            case lastgood.events.Durable(step=step, seconds=seconds):
                print(f"step {step} is durable after {seconds:.1f} s")
            case lastgood.events.Failed(step=step, detail=why):
                print(f"step {step} was not saved: {why}")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

EventKind = Literal[
    "staged",
    "written",
    "durable",
    "dropped",
    "refused",
    "failed",
    "waited",
    "fenced",
    "skipped",
    "tuned",
    "verified",
    "unfit",
    "damaged",
    "repaired",
    "not_repaired",
    "not_protected",
    "deleted",
    "stepped_over",
    "copied",
    "not_copied",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a save or a generation. Every event is an instance of the class of its kind.

    `Event(kind="durable", ...)` makes a `Durable`. Raises KeyError for a kind that is not in EVENTS.
    """

    kind: EventKind
    step: int
    """the step of the save or of the generation; for `tuned` the step of the training loop"""
    at_seconds: float
    """when the event was emitted, in seconds of `time.monotonic()`"""
    seconds: float = 0.0
    """a duration; each class says of what; 0.0 where it says nothing"""
    bytes: int = 0
    """a size; each class says of what; 0 where it says nothing"""
    detail: str = ""
    """a text for people; each class says what it holds; empty where it says nothing"""

    def __new__(cls, *, kind: EventKind | None = None, **_: Any) -> Event:
        return object.__new__(EVENTS[kind] if cls is Event and kind is not None else cls)


@dataclass(frozen=True, kw_only=True)
class Staged(Event):
    """The state was copied out of the live tensors. `seconds`: of the copy. `bytes`: that were copied."""

    kind: Literal["staged"] = "staged"


@dataclass(frozen=True, kw_only=True)
class Written(Event):
    """Every byte of this rank's part was written; it is not committed yet. `seconds`: of writing. `bytes`: written."""

    kind: Literal["written"] = "written"


@dataclass(frozen=True, kw_only=True)
class Durable(Event):
    """A save was committed and survives power loss. `seconds`: from the first write to the commit.

    `bytes`: of all files of the generation.
    """

    kind: Literal["durable"] = "durable"


@dataclass(frozen=True, kw_only=True)
class Dropped(Event):
    """A save was given up: a newer one was committed first, it was cancelled, or the state changed while it was copied.

    `seconds`: since the call that began the save. `detail`: the class of the error, and its text.
    """

    kind: Literal["dropped"] = "dropped"


@dataclass(frozen=True, kw_only=True)
class Refused(Event):
    """A save was given up because the disk or the quota is full.

    `seconds`: since the call that began the save. `detail`: the class of the error, and its text.
    """

    kind: Literal["refused"] = "refused"


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """A save failed for another reason than those of `Dropped` and `Refused`.

    `seconds`: since the call that began the save. `detail`: the class of the error, and its text.
    """

    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, kw_only=True)
class Waited(Event):
    """The loop waited before a save, because as many saves were in flight as are allowed. `seconds`: of the wait."""

    kind: Literal["waited"] = "waited"


@dataclass(frozen=True, kw_only=True)
class Fenced(Event):
    """The loop waited before an update until the copy of its last save had read the tensors. `seconds`: of the wait."""

    kind: Literal["fenced"] = "fenced"


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """A save that was due was left out, because as many saves were in flight as are allowed."""

    kind: Literal["skipped"] = "skipped"


@dataclass(frozen=True, kw_only=True)
class Tuned(Event):
    """`cadence="auto"` chose a new interval. `step`: of the training loop. `detail`: the interval and the reason."""

    kind: Literal["tuned"] = "tuned"


@dataclass(frozen=True, kw_only=True)
class Verified(Event):
    """A generation was read again past the page cache and found good. `seconds`: of the reading."""

    kind: Literal["verified"] = "verified"


@dataclass(frozen=True, kw_only=True)
class Unfit(Event):
    """A generation is intact, but holds NaN or infinity where it must not.

    `seconds`: of the reading. `detail`: where.
    """

    kind: Literal["unfit"] = "unfit"


@dataclass(frozen=True, kw_only=True)
class Damaged(Event):
    """A generation does not read back as it was committed. `seconds`: of the reading. `detail`: what was found.

    On ranks other than 0 `seconds` is 0.0, and the reading covers this rank's own part only.
    """

    kind: Literal["damaged"] = "damaged"


@dataclass(frozen=True, kw_only=True)
class Repaired(Event):
    """Damaged files were rebuilt from parity, and verified. `detail`: their names."""

    kind: Literal["repaired"] = "repaired"


@dataclass(frozen=True, kw_only=True)
class NotRepaired(Event):
    """Damaged files could not be rebuilt from parity. `detail`: the class of the error, and its text."""

    kind: Literal["not_repaired"] = "not_repaired"


@dataclass(frozen=True, kw_only=True)
class NotProtected(Event):
    """A generation was repaired, but new parity for it could not be written. `detail`: the error and its text."""

    kind: Literal["not_protected"] = "not_protected"


@dataclass(frozen=True, kw_only=True)
class Deleted(Event):
    """A generation was deleted. `detail`: empty where retention deletes it, else the reason, such as a full disk."""

    kind: Literal["deleted"] = "deleted"


@dataclass(frozen=True, kw_only=True)
class SteppedOver(Event):
    """A restore passed over a newer generation. `step`: of that generation. `detail`: the reason."""

    kind: Literal["stepped_over"] = "stepped_over"


@dataclass(frozen=True, kw_only=True)
class Copied(Event):
    """A generation was copied to a further place of the run, and read back there; or other nodes hold copies or parity
    of it, compared with its digests on their way.

    `seconds`: of the copy. `bytes`: of the generation's files there. `detail`: the place, as in `Save.where`.
    """

    kind: Literal["copied"] = "copied"


@dataclass(frozen=True, kw_only=True)
class NotCopied(Event):
    """A generation could not be copied to a further place of the run, or other nodes got no copies or parity of it;
    what waits is tried again after a pause.

    `detail`: the place, the class of the error, and its text.
    """

    kind: Literal["not_copied"] = "not_copied"


EVENTS: dict[EventKind, type[Event]] = {
    "staged": Staged,
    "written": Written,
    "durable": Durable,
    "dropped": Dropped,
    "refused": Refused,
    "failed": Failed,
    "waited": Waited,
    "fenced": Fenced,
    "skipped": Skipped,
    "tuned": Tuned,
    "verified": Verified,
    "unfit": Unfit,
    "damaged": Damaged,
    "repaired": Repaired,
    "not_repaired": NotRepaired,
    "not_protected": NotProtected,
    "deleted": Deleted,
    "stepped_over": SteppedOver,
    "copied": Copied,
    "not_copied": NotCopied,
}
"""the class of each kind"""
