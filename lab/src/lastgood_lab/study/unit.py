"""One unit of the study: what is trained, how it saves, and when it fails. Names only; runs nothing."""

from __future__ import annotations

import difflib

import msgspec

from lastgood.errors import Refused

VARIANTS = ("ref", "blk", "ovl")
"""without failures; saves that the loop waits for; saves behind the loop"""
DATASETS = ("digits", "photos")
"""in the place of CIFAR-10 and CIFAR-100 (images.py)"""
REAL_DATASETS = ("cifar10", "cifar100")
MODELS = ("resnet18", "resnet50")
STEPS, EVERY = 1600, 50
SCHEDULES = {"base": (400, 1200), "late": (800, 1400)}
"""name -> the steps after which rank 0 exits with code 137"""
CONDITIONS = {
    "exit": "rank 0 exits with code 137",
    "kill": "all ranks are killed at once",
    "hang": "rank 1 makes no further step",
    "errors": "rank 0 exits, and in each attempt a write of one save fails on another rank",
}
"""name -> what happens after the steps of a schedule"""
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
        if not number.isdecimal() or (int(number) < 1 and name != "flushed"):
            raise Refused(f"--size {one}", safe="Nothing was run.", todo="Give a number of at least 1; flushed=0 or 1.")
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
        return () if self.variant == "ref" else tuple(one // self.size.scale for one in SCHEDULES[self.schedule])


def suites(datasets: tuple[str, ...] = DATASETS) -> list[str]:
    """The names of all suites."""
    return [f"{data}-{model}-{failures}" for data in datasets for model in MODELS for failures in SCHEDULES]


def units(suite: str, seed: int, size: Size, condition: str = "exit") -> list[Unit]:
    """The variants of a suite for one seed: the reference first, then the two others in an order that alternates."""
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
            condition="exit" if variant == "ref" else condition,
        )
        for variant in order
    ]
