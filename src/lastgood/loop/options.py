"""Options: what a `Checkpointer` was asked for, checked as a whole before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..format import parity_layout
from ..format.layout import CHUNK_LIMIT_BYTES
from ..format.values import DEPTH_LIMIT
from ..io.checksum import ALGORITHMS
from ..policy.arguments import is_positive, is_whole, require
from ..policy.cadence import Every
from ..policy.retention import Keep
from ..policy.scrub import Scrub
from ..records import Event
from ..run import access
from ..storage.directory import WriteMode
from .preemption import Preemption
from .save_planner import Staging, TornCheck

LEAST_MEMORY_BYTES = 1 << 20
MOST_THREADS = 64

OnError = Literal["warn", "raise"]
WhenFull = Literal["wait", "skip", "raise"]


@dataclass(frozen=True)
class Options:
    """See `Checkpointer`. Raises Refused, which names the option, for a value that cannot be meant."""

    cadence: Every | Literal["auto"]
    retention: Keep
    write_mode: WriteMode
    digest: str
    on_error: OnError
    memory: int | None
    include: Sequence[str]
    exclude: Sequence[str]
    on_event: Callable[[Event], None] | None
    staging: Staging | None
    torn_check: TornCheck
    in_flight: int
    when_full: WhenFull
    writers: int
    chunk: int
    overhead: float | None
    persist: access.Persist
    parity: str | None
    scrub: Scrub | None
    finite_also: Sequence[str]
    finite_except: Sequence[str]
    preemption: Preemption | None
    patience: float
    save_on_exit: bool
    durable_within_seconds: float | None

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_objects()

    def _check_choices(self) -> None:
        choices: dict[str, Sequence[object]] = {
            "digest": tuple(ALGORITHMS),
            "write_mode": get_args(WriteMode),
            "on_error": get_args(OnError),
            "staging": (None, *get_args(Staging)),
            "torn_check": get_args(TornCheck),
            "when_full": get_args(WhenFull),
            "persist": get_args(access.Persist),
            "save_on_exit": (True, False),
        }
        for name, known in choices.items():
            value = getattr(self, name)
            require(
                any(value is one or (isinstance(value, str) and value == one) for one in known),
                f"{name}={value!r}",
                f"Give one of {', '.join(map(repr, known))}.",
            )

    def _check_numbers(self) -> None:
        whole = "Give a whole number"
        require(
            self.memory is None or is_whole(self.memory, LEAST_MEMORY_BYTES),
            f"memory={self.memory!r}",
            f"{whole} of bytes, at least {LEAST_MEMORY_BYTES} (1 MiB).",
        )
        for name in ("in_flight", "writers"):
            value = getattr(self, name)
            require(
                is_whole(value, 1) and value <= MOST_THREADS, f"{name}={value!r}", f"{whole} from 1 to {MOST_THREADS}."
            )
        require(
            is_whole(self.chunk, 4096) and self.chunk <= CHUNK_LIMIT_BYTES and self.chunk % 4096 == 0,
            f"chunk={self.chunk!r}",
            f"{whole} of bytes: a multiple of 4096, up to {CHUNK_LIMIT_BYTES} (256 MiB).",
        )
        require(is_positive(self.patience), f"patience={self.patience!r}", "Give seconds above 0.")
        limit = self.durable_within_seconds
        require(
            limit is None or is_positive(limit), f"durable_within_seconds={limit!r}", "Give seconds above 0, or None."
        )

    def _check_objects(self) -> None:
        require(isinstance(self.retention, Keep), f"retention={self.retention!r}", "Give lastgood.Keep(last=3).")
        require(
            isinstance(self.cadence, Every) or self.cadence == "auto",
            f"cadence={self.cadence!r}",
            'Give lastgood.Every(steps=...), lastgood.Every(seconds=...) or "auto".',
        )
        require(
            self.overhead is None or (self.cadence == "auto" and is_positive(self.overhead) and self.overhead < 1),
            f"overhead={self.overhead!r}",
            'Give a share between 0 and 1, with cadence="auto".',
        )
        seconds = self.cadence.seconds if isinstance(self.cadence, Every) else None
        require(
            seconds is None or self.durable_within_seconds is None or seconds < self.durable_within_seconds,
            f"durable_within_seconds={self.durable_within_seconds} with {self.cadence}",
            "Allow more time than lies between two saves.",
        )
        require(self.on_event is None or callable(self.on_event), f"on_event={self.on_event!r}", "Give a function.")
        require(self.scrub is None or isinstance(self.scrub, Scrub), f"scrub={self.scrub!r}", "Give lastgood.Scrub().")
        require(
            self.preemption is None or isinstance(self.preemption, Preemption),
            f"preemption={self.preemption!r}",
            "Give lastgood.Preemption().",
        )
        require(
            self.parity is None or isinstance(self.parity, str), f"parity={self.parity!r}", 'Give text such as "10+2".'
        )
        if self.parity is not None:
            parity_layout.parsed(self.parity)

    def check_place(self, slots: bool, several: bool) -> None:
        """Whether the options go with a run in `slots`, and with `several` ranks. Raises Refused."""
        keep, directory = self.retention, "Put what is to be kept into a directory"
        require(slots or self.persist == "direct", f"persist={self.persist!r}", '"mmap" is for slots://.')
        require(
            not slots or not (keep.every or keep.milestones or keep.best),
            f"{keep} in slots, which keep the newest only",
            f"{directory}: a second Checkpointer with a path, and its own cadence.",
        )
        extras = self.parity is not None or self.scrub is not None
        require(not (slots and extras), "parity or scrub in slots, which keep the newest only", f"{directory}.")
        require(not (several and slots), "slots with several ranks", "Give a directory that all ranks see.")
        require(
            not (several and extras),
            "parity or scrub with several ranks",
            "Leave them out: they are for one process so far.",
        )


def check_state(state: object) -> None:
    """A state is a dict whose keys are names, and no container in it holds itself. Raises Refused."""
    require(isinstance(state, MutableMapping), f"state is a {type(state).__name__}", "Give a dict.")
    assert isinstance(state, MutableMapping)
    odd = [key for key in state if not isinstance(key, str)]
    require(not odd, f"state has keys that are no text: {odd[:3]}", 'Give each part a name: {"model": model}.')
    _require_no_cycle(state, "state", [], set())


def _require_no_cycle(obj: object, path: str, above: list[int], done: set[int]) -> None:
    """`above`: ids of the containers around `obj`; `done`: ids of those that were searched to their end.

    Without it, a search of the state takes the number of all paths through it, up to the limit of its depth.
    """
    if not isinstance(obj, (dict, list, tuple)) or id(obj) in done or len(above) > DEPTH_LIMIT:
        return
    require(id(obj) not in above, f"{path} is a container that holds itself", "Take it out of itself.")
    above.append(id(obj))
    for key, one in obj.items() if isinstance(obj, dict) else enumerate(obj):
        _require_no_cycle(one, f"{path}.{key}", above, done)
    done.add(above.pop())
