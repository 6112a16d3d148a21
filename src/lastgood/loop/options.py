"""Options: those of a `Checkpointer`, checked as a whole before anything is touched. Reads and writes nothing.

The options that most loops set are keyword arguments of `Checkpointer`; the others are fields of `Tuning` and `Ranks`.
Each field of these two is also a keyword argument of its own, as in earlier versions.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, get_args

from ..events import Event
from ..format import parity_layout
from ..io.checksum import ALGORITHMS
from ..limits import (
    CHUNK_BYTES,
    CHUNK_LIMIT_BYTES,
    DEPTH_LIMIT,
    MAX_IN_FLIGHT,
    MEMORY_LEAST_BYTES,
    PAGE_BYTES,
    RANK_TIMEOUT_SECONDS,
    WORKERS,
)
from ..policy.arguments import is_positive, is_whole, require
from ..policy.cadence import Every
from ..policy.failures import Known
from ..policy.interval import IN_FLIGHT, Rule, longest_interval
from ..policy.retention import KEEP, Keep
from ..policy.scrub import Scrub
from ..run import access, memory_place, paths
from ..run.planned_save import PlaceOptions, RunOptions
from ..storage.directory import WriteMode
from .preemption import Preemption
from .sentinel_options import Sentinel
from .tiers import Tier

Staging = Literal["overlap", "blocking"]
TornCheck = Literal["sampled", "full"]
OnError = Literal["warn", "raise"]
WhenFull = Literal["wait", "skip", "raise"]
CADENCE = Every(seconds=300)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the saves of a `Checkpointer` use memory, threads and the disk. The defaults serve most jobs.

    `memory`: bound of all buffers, in bytes, at least 1 MiB; default None: as large as the state. With less, the next
    update waits until enough of the state is written.
    `in_flight`: the number of saves that are written side by side, 1 to 64; default 2. `writers`: the number of threads
    that write each of them, 1 to 64; default 3. In memory one thread writes each of them.
    `chunk`: bytes of one buffer, a multiple of 4096 up to 256 MiB; default 8 MiB.
    `staging`: "overlap" copies the state during the next forward and backward, "blocking" before the call returns;
    default None: overlap, if the optimizers can be made to wait until the copy is complete.
    `torn_check`: how changes of the state during its copy are found: "sampled" (default) compares samples of each
    tensor before and after the copy, "full" digests every tensor.
    `when_full`: what becomes of a save while `in_flight` others are under way: it waits ("wait", the default), is
    skipped if the cadence asked for it ("skip"), or raises InFlightFull ("raise").
    `mtbf`: with cadence="auto", the mean time between failures of the whole job that is expected, in seconds, at least
    1; then the interval loses the least time, whatever part of it saving takes. Default None: not known.
    `overhead`: with cadence="auto", the fraction of the training time that saving may cost, between 0 and 1; default
    None: 0.03, or no bound where `mtbf` is given.
    `write_mode`: "atomic_dirsync" (default), or a mode that syncs less, see docs/format.md.
    `digest`: "xxh3_128" (default), or another algorithm of docs/format.md. `persist`: how slots are written: "direct"
    (default) with direct I/O, "mmap" through a mapping.
    Raises Refused, which names the option, for a value that cannot be meant.

        Checkpointer("runs/gpt", state, tuning=lastgood.Tuning(in_flight=3, memory=8 << 30))
    """

    memory: int | None = None
    in_flight: int = IN_FLIGHT
    writers: int = WORKERS
    chunk: int = CHUNK_BYTES
    staging: Staging | None = None
    torn_check: TornCheck = "sampled"
    when_full: WhenFull = "wait"
    overhead: float | None = None
    mtbf: float | None = None
    write_mode: WriteMode = "atomic_dirsync"
    digest: str = "xxh3_128"
    persist: access.Persist = "direct"

    def __post_init__(self) -> None:
        _require_one_of("digest", self.digest, tuple(ALGORITHMS))
        _require_one_of("write_mode", self.write_mode, get_args(WriteMode))
        _require_one_of("staging", self.staging, (None, *get_args(Staging)))
        _require_one_of("torn_check", self.torn_check, get_args(TornCheck))
        _require_one_of("when_full", self.when_full, get_args(WhenFull))
        _require_one_of("persist", self.persist, get_args(access.Persist))
        whole = "Give a whole number"
        require(
            self.memory is None or is_whole(self.memory, MEMORY_LEAST_BYTES),
            f"memory={self.memory!r}",
            f"{whole} of bytes, at least {MEMORY_LEAST_BYTES} (1 MiB).",
        )
        for name in ("in_flight", "writers"):
            value = getattr(self, name)
            require(
                is_whole(value, 1) and value <= MAX_IN_FLIGHT,
                f"{name}={value!r}",
                f"{whole} from 1 to {MAX_IN_FLIGHT}.",
            )
        require(
            is_whole(self.chunk, PAGE_BYTES) and self.chunk <= CHUNK_LIMIT_BYTES and self.chunk % PAGE_BYTES == 0,
            f"chunk={self.chunk!r}",
            f"{whole} of bytes: a multiple of {PAGE_BYTES}, up to {CHUNK_LIMIT_BYTES} (256 MiB).",
        )


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How the ranks of a process group coordinate their saves. In a world of one it has no effect.

    `patience`: timeout of a rank that waits for another one, in seconds, above 0; default 120. The timeout for rank 0
    is twice as long, that for the store of the process group three times.
    `just_in_time_seconds`: when a rank dies under `lastgood run`, the others may save the newest step for all ranks, in
    so many seconds, above 0; default None: they do not (docs/recovery.md). For replicas, and for shards that several
    ranks hold; one place of the run must be a directory that all ranks see.
    Raises Refused for other values.

        Checkpointer("runs/gpt", state, ranks=lastgood.Ranks(patience=600))
    """

    patience: float = RANK_TIMEOUT_SECONDS
    just_in_time_seconds: float | None = None

    def __post_init__(self) -> None:
        require(is_positive(self.patience), f"patience={self.patience!r}", "Give seconds above 0.")
        seconds = self.just_in_time_seconds
        require(
            seconds is None or is_positive(seconds),
            f"just_in_time_seconds={seconds!r}",
            "Give seconds above 0, such as 20, or None.",
        )


class EarlierKeywords(TypedDict, total=False):
    """The fields of `Tuning` and `Ranks`, as keyword arguments of a `Checkpointer`."""

    memory: int | None
    in_flight: int
    writers: int
    chunk: int
    staging: Staging | None
    torn_check: TornCheck
    when_full: WhenFull
    overhead: float | None
    mtbf: float | None
    write_mode: WriteMode
    digest: str
    persist: access.Persist
    patience: float
    just_in_time_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of `Checkpointer`, described there. Raises Refused for a value that cannot be meant."""

    cadence: Every | Literal["auto"] = CADENCE
    retention: Keep = KEEP
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    on_error: OnError = "warn"
    on_event: Callable[[Event], None] | None = None
    parity: str | None = None
    scrub: Scrub | None = None
    finite_also: Sequence[str] = ()
    finite_except: Sequence[str] = ()
    preemption: Preemption | None = None
    sentinel: Sentinel | None = None
    save_on_exit: bool = True
    durable_within_seconds: float | None = None
    tuning: Tuning = field(default_factory=Tuning)
    ranks: Ranks = field(default_factory=Ranks)
    tiers: Sequence[Tier] = ()

    def __post_init__(self) -> None:
        _require_one_of("on_error", self.on_error, get_args(OnError))
        _require_one_of("save_on_exit", self.save_on_exit, (True, False))
        self._check_objects()
        self._check_tiers()
        self._check_times()

    def with_keywords(self, earlier: Mapping[str, Any]) -> Options:
        """These options, with single fields of `tuning` and `ranks` replaced. `earlier`: name of the field -> value.

        Raises TypeError for a name that is no option; Refused if `tuning` or `ranks` has another value for it already.
        """
        groups: dict[str, Any] = {"tuning": self.tuning, "ranks": self.ranks}
        for name, value in earlier.items():
            group = next((one for one, of in groups.items() if name in {entry.name for entry in fields(of)}), "")
            if not group:
                near = near_option(name)
                more = f"; did you mean {near!r}?" if near else ""
                raise TypeError(f"Checkpointer() got an unexpected keyword argument {name!r}{more}")
            default = type(groups[group])()
            twice = getattr(groups[group], name) not in (getattr(default, name), value)
            require(not twice, f"{name} is given twice, and in {group}={groups[group]}", "Give it in one place.")
            groups[group] = replace(groups[group], **{name: value})
        return replace(self, **groups)

    def _check_times(self) -> None:
        limit, overhead, mtbf = self.durable_within_seconds, self.tuning.overhead, self.tuning.mtbf
        auto = self.adapts
        require(
            limit is None or is_positive(limit), f"durable_within_seconds={limit!r}", "Give seconds above 0, or None."
        )
        require(
            isinstance(self.cadence, Every) or self.cadence == "auto",
            f"cadence={self.cadence!r}",
            'Give lastgood.Every(steps=...), lastgood.Every(seconds=...) or "auto".',
        )
        require(
            overhead is None or (auto and is_positive(overhead) and overhead < 1),
            f"overhead={overhead!r}",
            'Give a share between 0 and 1, with cadence="auto".',
        )
        require(
            mtbf is None or (auto and is_positive(mtbf) and mtbf >= 1),
            f"mtbf={mtbf!r}" + ("" if auto else f" with {self.front_cadence()}"),
            'Give the seconds between two failures of the job, at least 1, with cadence="auto".',
        )
        seconds = self.cadence.seconds if isinstance(self.cadence, Every) else None
        require(
            seconds is None or limit is None or seconds < limit,
            f"durable_within_seconds={limit} with {self.cadence}",
            "Allow more time than lies between two saves.",
        )

    def _check_objects(self) -> None:
        require(isinstance(self.tuning, Tuning), f"tuning={self.tuning!r}", "Give lastgood.Tuning(...).")
        require(isinstance(self.ranks, Ranks), f"ranks={self.ranks!r}", "Give lastgood.Ranks(...).")
        require(isinstance(self.retention, Keep), f"retention={self.retention!r}", "Give lastgood.Keep(last=3).")
        require(self.on_event is None or callable(self.on_event), f"on_event={self.on_event!r}", "Give a function.")
        require(self.scrub is None or isinstance(self.scrub, Scrub), f"scrub={self.scrub!r}", "Give lastgood.Scrub().")
        require(
            self.preemption is None or isinstance(self.preemption, Preemption),
            f"preemption={self.preemption!r}",
            "Give lastgood.Preemption().",
        )
        require(
            self.sentinel is None or isinstance(self.sentinel, Sentinel),
            f"sentinel={self.sentinel!r}",
            "Give lastgood.Sentinel().",
        )
        require(
            self.parity is None or isinstance(self.parity, str), f"parity={self.parity!r}", 'Give text such as "10+2".'
        )
        if self.parity is not None:
            parity_layout.parsed(self.parity)

    def _check_tiers(self) -> None:
        listed = isinstance(self.tiers, (list, tuple)) and all(isinstance(one, Tier) for one in self.tiers)
        require(listed, f"tiers={self.tiers!r}", 'Give a list: tiers=[lastgood.Tier("/nvme/gpt")].')
        lower = [one.url for one in self.tiers[1:] if one.node_local]
        require(not lower, f"memory or shared=False for {lower[:1]}, which is not the first tier", "Put it first.")

    @property
    def keep(self) -> Keep:
        """Which generations are kept at `path`, the durable place of the run."""
        return self.retention

    @property
    def front(self) -> Tier | Options:
        """The options of the place that is written first: its cadence, retention and parity."""
        return self.tiers[0] if self.tiers else self

    @property
    def copies(self) -> int:
        """On how many nodes each file of the first place lies."""
        return self.tiers[0].copies if self.tiers else 1

    def front_cadence(self) -> Every | Literal["auto"]:
        """The cadence of the place that is written first."""
        return self.front.cadence or self.cadence

    @property
    def adapts(self) -> bool:
        """Whether any place is saved to at an interval that adapts."""
        return "auto" in (self.front_cadence(), *self.cadences_below())

    def rule(self, failures: Known) -> Rule:
        """From what the interval of the first place follows. `failures`: what is known of those of the job."""
        return Rule(failures.all, self.tuning.overhead, self._longest_seconds)

    def rule_below(self, place: int, failures: Known) -> Rule:
        """The same for the place of this position among the lower ones, which is read after a failure that the places
        above it do not survive."""
        above = self.tiers[: place + 1]
        counted = failures.of_nodes
        if any(one.survives_nodes for one in above):
            counted = replace(counted, count=0)
        durable_above = any(not one.in_memory for one in above)
        return Rule(counted, self.tuning.overhead, math.inf if durable_above else self._longest_seconds)

    @property
    def _longest_seconds(self) -> float:
        return longest_interval(self.durable_within_seconds)

    def cadences_below(self) -> list[Every | Literal["auto"] | None]:
        """The cadences of the places that receive copies; None: all that are saved in the first place."""
        if not self.tiers:
            return []
        first = self.tiers[0].cadence
        follows = first is None or (first == self.cadence and first != "auto")
        return [*(one.cadence for one in self.tiers[1:]), None if follows else self.cadence]

    def places(self, path: str | os.PathLike[str]) -> list[PlaceOptions]:
        """The places of the run, the one that is written first in front. Raises Refused if one is given twice.

        `path`: of the run, which is the last of them.
        """
        require(
            paths.parsed(path).kind != "memory",
            f"path={path!r}: the last place of a run has to be durable",
            "Give a directory or a bucket.",
        )
        require(
            self.ranks.just_in_time_seconds is None or self.tuning.torn_check != "full",
            f'torn_check="full" with just_in_time_seconds={self.ranks.just_in_time_seconds}',
            "Leave one of them out: a just-in-time save compares versions and samples.",
        )
        if self.ranks.just_in_time_seconds is not None:
            self.just_in_time_place(path)
        places = [
            PlaceOptions(
                path=memory_place.url_of(path) if one.in_memory else one.url, keep=one.keep, parity=one.file_parity
            )
            for one in self.tiers
        ]
        places.append(PlaceOptions(path=path, keep=self.retention, parity=self.parity))
        below = [one.path for one in places[1:] if paths.parsed(one.path).kind == "slots"]
        require(not below, f"{below[:1]}: slots below another place", "Give slots as the first tier, or a directory.")
        urls = [paths.parsed(one.path).url for one in places]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        require(not twice, f"{', '.join(twice)} is given as two places of the run", "Give each place once.")
        return places

    def just_in_time_place(self, path: str | os.PathLike[str]) -> str:
        """Where a just-in-time save is written: the nearest directory that all ranks see. Raises Refused without one.

        `path`: of the run.
        """
        shared = [paths.parsed(one.url) for one in self.tiers if not one.node_local] + [paths.parsed(path)]
        seen = [one.url for one in shared if one.kind == "directory"]
        first = shared[0].kind if not (self.tiers and self.tiers[0].node_local) else "directory"
        require(
            bool(seen) and first == "directory",
            f"just_in_time_seconds={self.ranks.just_in_time_seconds} for a run in {first if seen else 'no directory'}",
            "Leave it out, or give a directory that all ranks see, and slots or a bucket not as the first place.",
        )
        return seen[0]

    def of_run(self, places: Sequence[PlaceOptions]) -> RunOptions:
        """Those of the options with which the run is opened in these places."""
        tuning, (front, *below) = self.tuning, places
        return RunOptions(
            write_mode=tuning.write_mode,
            keep=front.keep,
            algorithm=tuning.digest,
            in_flight=tuning.in_flight,
            writers=tuning.writers,
            persist=tuning.persist,
            parity=front.parity,
            scrub=self.scrub,
            shared=not (self.tiers and self.tiers[0].node_local),
            copies=self.copies,
            node_parity=self.tiers[0].node_parity if self.tiers else None,
            spread=self.tiers[0].spread if self.tiers else None,
            below=below,
        )

    def check_place(self, slots: bool) -> None:
        """Raises Refused for options that do not exist for a run whose first place is in `slots`."""
        keep, persist, directory = self.front.keep, self.tuning.persist, "Put what is to be kept into a directory"
        require(slots or persist == "direct", f"persist={persist!r}", '"mmap" is for slots://.')
        require(
            not slots or not (keep.every or keep.milestones or keep.best),
            f"{keep} in slots, which keep the newest only",
            f"{directory}: a second Checkpointer with a path, and its own cadence.",
        )
        extras = self.front.parity is not None or (self.scrub is not None and not self.tiers)
        require(not (slots and extras), "parity or scrub in slots, which keep the newest only", f"{directory}.")


def option_names() -> list[str]:
    """The names of all keyword arguments of a `Checkpointer`."""
    return [one.name for group in (Options, Tuning, Ranks) for one in fields(group)]


def near_option(name: str, further: Sequence[str] = ()) -> str:
    """The option that a mistaken name may mean; empty if there is none. `further`: names that are options too."""
    names = [*further, *option_names()]
    begun = [one for one in names if name.startswith(f"{one}_")]  # such as mtbf_seconds
    return next(iter(begun or difflib.get_close_matches(name, names)), "")


def _require_one_of(name: str, value: object, known: Sequence[object]) -> None:
    require(
        any(value is one or (isinstance(value, str) and value == one) for one in known),
        f"{name}={value!r}",
        f"Give one of {', '.join(map(repr, known))}.",
    )


def check_state(state: object) -> None:
    """Raises Refused unless a state is a dict whose keys are strings, and no container in it contains itself."""
    require(isinstance(state, MutableMapping), f"state is a {type(state).__name__}", "Give a dict.")
    assert isinstance(state, MutableMapping)
    odd = [key for key in state if not isinstance(key, str)]
    require(not odd, f"state has keys that are no text: {odd[:3]}", 'Give each part a name: {"model": model}.')
    _require_no_cycle(state, "state", [], set())


def _require_no_cycle(obj: object, path: str, above: list[int], done: set[int]) -> None:
    """`above`: ids of the containers around `obj`; `done`: ids of those that were searched to their end.

    Each container is searched once. Otherwise the time would grow with the number of paths through the state, which is
    exponential in its depth if containers are shared.
    """
    if not isinstance(obj, (dict, list, tuple)) or id(obj) in done or len(above) > DEPTH_LIMIT:
        return
    require(id(obj) not in above, f"{path} is a container that holds itself", "Take it out of itself.")
    above.append(id(obj))
    for key, one in obj.items() if isinstance(obj, dict) else enumerate(obj):
        _require_no_cycle(one, f"{path}.{key}", above, done)
    done.add(above.pop())
