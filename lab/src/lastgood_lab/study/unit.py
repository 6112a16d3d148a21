"""One unit of the study: what is trained, how it saves, and when it fails. Names only; runs nothing."""

from __future__ import annotations

import difflib

import msgspec

from lastgood.errors import Refused

from .conditions import CONDITIONS, Condition

VARIANTS = ("ref", "blk", "ovl")
"""without failures; saves that the loop waits for; saves behind the loop"""
DATASETS = ("digits", "photos")
"""in the place of CIFAR-10 and CIFAR-100 (images.py)"""
REAL_DATASETS = ("cifar10", "cifar100")
MODELS = ("resnet18", "resnet50")
STEPS, EVERY = 1600, 50
SCHEDULES = {"base": (400, 1200), "late": (800, 1400)}
"""name -> the steps after which rank 0 exits with code 137"""
STORAGES = {
    "disk": "a directory",
    "objects": "an object store: an S3 server of this machine",
    "memory": "the memory of the machine, and every fourth save a directory",
    "peers": "the memory of two nodes, which have copies of each other's files, and every fourth save a directory",
}
"""name -> where a run is saved"""
STORE_NODE = "node-0"
"""the node that holds the store of a job of several nodes, which is never lost"""
SCALES = (1, 2, 5, 10, 25, 50)
"""divisors of all of these numbers"""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How large the study is. `scale`: by which all numbers of steps are divided, K and the schedules included."""

    scale: int = 1
    ranks: int = 4
    global_batch: int = 16
    width: int = 8
    """of the first stage of each network; 64 is the full one"""
    side: int = 16
    """pixels of an image"""
    max_inflight: int = 4
    every: int = EVERY
    """steps between two saves, before they are divided by the scale"""
    flushed: bool = True
    """whether all saves have ended before a failure, as in ECRL's study; else failures meet them"""
    device_ms: int = 0
    """milliseconds that each step waits as for a device, while the processor is free; 0: all is computed on it"""


def sized(text: str, cifar: bool) -> Size:
    """The size that a command gives: names and numbers such as "scale=5,flushed=0". `cifar`: whether images are of its
    own 32 x 32 pixels. Raises Refused."""
    fields = Size.__struct_fields__
    given: dict[str, int] = {"side": 32} if cifar else {}
    for one in filter(None, text.split(",")):
        name, _, number = one.partition("=")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            todo = f"Did you mean {near[0]}?" if near else f"Give some of {', '.join(fields)}."
            raise Refused(f"--size {one}: there is no such field", safe="Nothing was run.", todo=todo)
        if not number.isdecimal() or (int(number) < 1 and name not in ("flushed", "device_ms")):
            todo = "Give a number of at least 1; flushed=0 or 1; device_ms=0 or more."
            raise Refused(f"--size {one}", safe="Nothing was run.", todo=todo)
        given[name] = int(number)
    return msgspec.convert({**given, "flushed": bool(given.get("flushed", 1))}, Size)


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One training under the supervisor."""

    dataset: str
    model: str
    schedule: str
    variant: str
    seed: int
    size: Size
    condition: str = "exit"
    storage: str = "disk"
    images: str = ""
    """digest of CIFAR's files; empty for images that ship with scikit-learn"""

    @property
    def rules(self) -> Condition:
        """What its condition is."""
        return CONDITIONS[self.condition]

    @property
    def suite(self) -> str:
        return f"{self.dataset}-{self.model}-{self.schedule}"

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    @property
    def target(self) -> int:
        return STEPS // self.size.scale

    @property
    def save_every(self) -> int:
        return max(1, self.size.every // self.size.scale)

    @property
    def failures(self) -> tuple[int, ...]:
        """The last step of each attempt that fails."""
        return () if self.variant == "ref" else self._scheduled

    @property
    def _scheduled(self) -> tuple[int, ...]:
        return tuple(one // self.size.scale for one in SCHEDULES[self.schedule])

    @property
    def flushed(self) -> bool:
        """Whether all saves have ended before a failure."""
        return self.size.flushed and self.rules.flushes

    @property
    def in_memory(self) -> bool:
        """Whether it saves to memory first."""
        return self.storage in ("memory", "peers")

    @property
    def nodes(self) -> str:
        """How many nodes the job has, as `--nnodes` takes it; empty: one, by itself."""
        return self.rules.nodes or ("2" if self.storage == "peers" else "")

    @property
    def ranks_of_node(self) -> int:
        return self.size.ranks // (2 if self.nodes else 1)

    @property
    def keeps_durable(self) -> bool:
        """Whether each save that was durable outlives a failure: not in the memory of a lost node, without copies."""
        return not (self.rules.loses_nodes and self.in_memory) or (self.storage == "peers" and self.flushed)

    def left_out(self, windows: int) -> list[tuple[int, int]]:
        """(epoch, window) of the batches that make a loss NaN. `windows`: of an epoch.

        The first one is that of the step after the first failure. When the second one comes, one more batch has gone.
        """
        steps = self._scheduled if self.rules.poisons else ()
        return [divmod(step + before, windows) for before, step in enumerate(steps)]


def suites(datasets: tuple[str, ...] = DATASETS) -> list[str]:
    """The names of all suites."""
    return [f"{data}-{model}-{failures}" for data in datasets for model in MODELS for failures in SCHEDULES]


def units(suite: str, seed: int, size: Size, condition: str = "exit", storage: str = "disk") -> list[Unit]:
    """The variants of a suite for one seed: the reference first, then the two others in an order that alternates."""
    calm = condition if CONDITIONS[condition].poisons else "exit"
    dataset, model, schedule = suite.split("-")
    order = VARIANTS if seed % 2 == 0 else ("ref", "ovl", "blk")
    return [
        Unit(
            dataset=dataset,
            model=model,
            schedule=schedule,
            variant=variant,
            seed=seed,
            size=size,
            condition=calm if variant == "ref" else condition,
            storage=storage,
        )
        for variant in order
    ]
