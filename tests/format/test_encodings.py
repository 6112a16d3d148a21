"""Encodings: common Python values in a state are restored unchanged, and restoring them runs no code."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import sys
import types
import typing
import uuid
import zoneinfo

import numpy as np
import pytest
import torch
from torch import nn

import lastgood
from lastgood.errors import ManifestInvalid, Refused, StateMismatch, Unstorable
from lastgood.format import encodings
from lastgood.format.values import decode, encode
from lastgood.state.rules import Stored, capture
from matching import Fed, match


def resumed(path, saved, live):
    """`live`, restored from a generation of `saved`."""
    lastgood.save(path, saved)
    lastgood.load(path, live)
    return live


RECORD = np.dtype([("id", "<i4"), ("at", ">f8", (2,)), ("inner", [("flag", "?")])], align=True)
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
VALUES = {
    "deque": collections.deque([1, [2]]),
    "bounded": collections.deque("abc", 3),
    "defaultdict": collections.defaultdict(list, {"a": [1], 2: [3]}),
    "no_factory": collections.defaultdict(None, x=1),
    "date": datetime.date(2026, 2, 28),
    "naive": datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
    "utc": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    "offset": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-3), "here")),
    "second_of_two": datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN),
    "time": datetime.time(23, 59, 59, 999999, tzinfo=datetime.timezone.utc),
    "timedelta": datetime.timedelta(-3, 5, 7),
    "zone": BERLIN,
    "path": pathlib.Path("data/train.csv"),
    "pure": (pathlib.PurePosixPath("//a/b"), pathlib.PureWindowsPath("C:/x")),
    "bytes_path": pathlib.Path("caf\udce9"),
    "decimal": [decimal.Decimal("1.500"), decimal.Decimal("-0E+5"), decimal.Decimal("sNaN12")],
    "fraction": fractions.Fraction(-(10**40), 7),
    "uuid": uuid.UUID(int=5),
    "range": [range(0, 10, 3), range(10**30, 0, -1)],
    "keys": {datetime.date(2026, 1, 1): 1, pathlib.Path("x"): 2, (uuid.UUID(int=1), range(3)): 3},
    "members": {decimal.Decimal("1.5"), fractions.Fraction(1, 3)},
    "size": torch.Size([2, 3]),
    "dtypes": [torch.bfloat16, torch.quint8, torch.device("cuda:1"), RECORD, np.dtype(("<f4", (2, 3)))],
    "record": np.zeros(1, RECORD)[0],
}


@pytest.mark.parametrize("name", VALUES)
def test_common_values_restore_unchanged(name, tmp_path):
    """A counter, a path or a date in the state was refused: 'cannot be stored without running code on load'."""
    found = resumed(tmp_path, {"x": VALUES[name]}, {"x": None})["x"]
    assert type(found) is type(VALUES[name])
    assert repr(found) == repr(VALUES[name])


def test_a_deque_and_a_defaultdict_are_refilled_in_place():
    saved = {"recent": collections.deque([torch.ones(2), 5], 9), "seen": collections.defaultdict(int, a=torch.ones(1))}
    kept = torch.zeros(2)
    live = {
        "recent": collections.deque([kept], 9),
        "seen": collections.defaultdict(lambda: "the program's own", gone=1),
    }
    before = dict(live)
    stored = capture(saved)
    tensors = {name: (str(one.dtype)[6:], tuple(one.shape)) for name, one in stored.tensors.items()}
    fit = match(live, Stored(1, tensors, stored.aliases, stored.values), exclude=["rng"])
    feed = Fed(lambda sink: [one for name, value in stored.tensors.items() for one in put(sink, name, value)])
    fit.apply(feed, None, False)
    assert all(live[name] is one for name, one in before.items())
    assert live["recent"][0] is kept and kept.tolist() == [1, 1] and live["recent"][1] == 5
    assert list(live["seen"]) == ["a"] and live["seen"]["other"] == "the program's own"


def put(sink, name, value):
    sink.put(name, 0, memoryview(value.numpy().tobytes()))
    sink.done(name)
    return ()


def test_a_deque_gets_the_bound_of_the_generation(tmp_path):
    found = resumed(tmp_path, {"x": collections.deque([1, 2], 2)}, {"x": collections.deque([1, 2, 3], 3)})["x"]
    assert found == collections.deque([1, 2]) and found.maxlen == 2


def test_the_state_of_an_optimizer_may_hold_a_deque(tmp_path):
    """AdaShift of pytorch_optimizer keeps its last gradients in a deque, and every save of it was refused."""

    class Shifted(torch.optim.SGD):
        pass

    def trained():
        layer = nn.Linear(2, 1)
        optimizer = Shifted(layer.parameters(), 0.1)
        optimizer.state[layer.weight]["grads"] = collections.deque([torch.ones(1, 2), torch.zeros(1, 2)], 2)
        return {"model": layer, "optimizer": optimizer}

    saved, live = trained(), trained()
    live["optimizer"].state.clear()
    resumed(tmp_path, saved, live)
    found = live["optimizer"].state[live["model"].weight]["grads"]
    assert found.maxlen == 2 and [one.tolist() for one in found] == [[[1, 1]], [[0, 0]]]


def test_objects_in_a_deque_or_a_dataclass_are_restored_in_place(tmp_path):
    def state(number):
        torch.manual_seed(number)
        return {"all": Training(nn.Linear(2, 1), number), "more": collections.deque([nn.Linear(1, 1)])}

    saved, live = state(1), state(2)
    before = live["all"], live["all"].model, live["more"][0]
    resumed(tmp_path, saved, live)
    assert (live["all"], live["all"].model, live["more"][0]) == before
    assert torch.equal(live["all"].model.weight, saved["all"].model.weight) and live["all"].epoch == 1
    assert torch.equal(live["more"][0].weight, saved["more"][0].weight)


# ---- structured and masked arrays --------------------------------------------------------------------------------


def test_structured_arrays_restore_in_place_or_as_new_ones(tmp_path):
    array = np.zeros((2, 3), RECORD)
    array["id"], array["at"] = 7, 0.5
    live = {"a": np.zeros((2, 3), RECORD), "b": None}
    before = live["a"]
    resumed(tmp_path, {"a": array, "b": array}, live)
    assert live["a"] is before and live["b"].dtype == RECORD
    assert np.array_equal(live["a"], array) and np.array_equal(live["b"], array)


@pytest.mark.parametrize("mask", [np.ma.nomask, [True, False, True]])
def test_masked_arrays_restore_mask_fill_value_and_hardness(tmp_path, mask):
    array = np.ma.MaskedArray([1.0, 2.0, 3.0], mask, fill_value=-1, hard_mask=True)
    live = {"a": np.ma.MaskedArray([0.0, 0.0, 0.0], [False, True, True]), "b": None}
    before = live["a"]
    resumed(tmp_path, {"a": array, "b": array}, live)
    assert live["a"] is before
    for one in live.values():
        assert one.data.tolist() == [1, 2, 3] and one.fill_value == -1 and one.hardmask
        assert np.ma.getmaskarray(one).tolist() == np.ma.getmaskarray(array).tolist()
    assert np.ma.getmask(live["b"]) is np.ma.nomask or mask is not np.ma.nomask


def test_a_masked_array_over_read_only_memory_is_replaced(tmp_path):
    """Its mask was restored and its data was not: the load reported success with the old numbers."""
    data = np.zeros(3)
    data.flags.writeable = False
    live = {"a": np.ma.array(data, mask=[False] * 3, copy=False)}
    resumed(tmp_path, {"a": np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])}, live)
    assert live["a"].data.tolist() == [1, 2, 3] and live["a"].mask.tolist() == [False, True, False]


# ---- instances of the program's own classes ----------------------------------------------------------------------


class Phase(enum.Enum):
    WARMUP = "w"
    STEADY = ("s", 1)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Name(str, enum.Enum):
    A = "a"


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


class Side(enum.Flag):
    LEFT = enum.auto()
    RIGHT = enum.auto()


class Point(typing.NamedTuple):
    x: typing.Any
    y: int = 0


Pair = collections.namedtuple("Pair", "one two")


@dataclasses.dataclass
class Config:
    lr: float
    tags: list[str] = dataclasses.field(default_factory=list)
    phase: Phase = Phase.WARMUP

    def __post_init__(self) -> None:
        raised.append("__post_init__")

    def __setattr__(self, name: str, value: object) -> None:
        raised.append("__setattr__")
        object.__setattr__(self, name, value)


raised: list[str] = []


@dataclasses.dataclass(frozen=True)
class Frozen:
    weights: torch.Tensor | None
    name: str = "x"


@dataclasses.dataclass(slots=True)
class Slotted:
    a: int
    b: typing.Any = None


@dataclasses.dataclass
class Delegating:
    """A class that answers for every attribute that it lacks, and has an unset slot."""

    __slots__ = ("low", "parent")
    low: float

    def __getattr__(self, name: str) -> object:
        return None


@dataclasses.dataclass
class Measured:
    weights: torch.Tensor

    @functools.cached_property
    def total(self) -> float:
        return float(self.weights.sum())


class Counted(enum.Flag):
    A = 1
    B = 2

    def __bool__(self) -> bool:
        raised.append("__bool__")
        return True


@dataclasses.dataclass
class Resumable:
    path: str = "safe"
    place: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@dataclasses.dataclass
class Training:
    model: nn.Module
    epoch: int = 0


class Text(str):
    pass


class Count(int):
    pass


class Outer:
    class Inner(enum.Enum):
        ONE = 1


INSTANCES = [
    Phase.STEADY,
    Level.HIGH,
    Name.A,
    Access.READ,
    Access.READ | Access.WRITE,
    Access(64),
    Side.LEFT | Side.RIGHT,
    Side(0),
    Outer.Inner.ONE,
    Point([1, {"a": Phase.WARMUP}], 2),
    Pair(1, "b"),
    Config(0.1, ["a"], Phase.STEADY),
    Frozen(None),
    Slotted(1, [Point(1)]),
    Text("words"),
    Count(10**30),
    torch.torch_version.TorchVersion("2.13.0"),
]


@pytest.mark.parametrize("value", INSTANCES, ids=repr)
def test_an_instance_of_an_imported_class_restores_without_its_code(value, tmp_path):
    """A config dataclass, an Enum (as in SCION of pytorch_optimizer) or a namedtuple in the state was refused."""
    lastgood.save(tmp_path, {"x": [value]})
    live = {"x": []}
    raised.clear()
    lastgood.load(tmp_path, live)
    assert type(live["x"][0]) is type(value) and live["x"][0] == value
    assert not raised


def test_a_live_dataclass_restores_in_place_and_a_frozen_one_is_replaced(tmp_path):
    saved = {"config": Config(0.5, ["new"]), "frozen": Frozen(torch.ones(2), "new"), "slots": Slotted(2)}
    weights = torch.zeros(2)
    live = {"config": Config(0.1, ["old", "er"]), "frozen": Frozen(weights, "old"), "slots": Slotted(1)}
    config, tags, frozen, slots = live["config"], live["config"].tags, live["frozen"], live["slots"]
    resumed(tmp_path, saved, live)
    assert live["config"] is config and config.tags is tags and (config.lr, tags) == (0.5, ["new"])
    assert live["slots"] is slots and slots.a == 2
    assert frozen.name == "old" and live["frozen"].name == "new"
    assert live["frozen"].weights is weights and weights.tolist() == [1, 1]


def test_a_slot_that_is_not_set_is_left_out_despite_a_getattr(tmp_path):
    """A dataclass delegated unknown attributes with `__getattr__`: each save ended with a plain AttributeError.

    hasattr() calls `__getattr__`, so an unset slot appeared to be set.
    """
    live = Delegating(0.0)
    state = resumed(tmp_path, {"x": Delegating(2.5)}, {"x": live})
    assert state["x"] is live and live.low == 2.5


def test_a_cached_property_is_not_stored_and_recomputed_after_a_load(tmp_path):
    """Once the property had been read, the next save in the middle of a run was refused: 'attributes that are no
    fields'."""
    saved, live = {"x": Measured(torch.ones(2))}, {"x": Measured(torch.zeros(2))}
    assert (saved["x"].total, live["x"].total) == (2, 0)
    lastgood.save(tmp_path, saved)
    before = live["x"]
    lastgood.load(tmp_path, live)
    assert live["x"] is before and before.total == 2


def test_an_objects_own_state_dict_may_hold_instances(tmp_path):
    class Sampler:
        def __init__(self, phase):
            self.phase = phase

        def state_dict(self):
            return {"phase": self.phase, "at": Point(torch.ones(1), 3)}

        def load_state_dict(self, state):
            self.phase, self.at = state["phase"], state["at"]

    live = resumed(tmp_path, {"sampler": Sampler(Phase.STEADY)}, {"sampler": Sampler(Phase.WARMUP)})
    assert live["sampler"].phase is Phase.STEADY
    assert type(live["sampler"].at) is Point and live["sampler"].at.x.tolist() == [1]


@pytest.fixture
def of_a_class_elsewhere(tmp_path, monkeypatch):
    """A run that contains a namedtuple of a class whose module is no longer imported."""
    elsewhere = types.ModuleType("elsewhere")
    elsewhere.Pair = collections.namedtuple("Pair", "one two", module="elsewhere")
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    lastgood.save(tmp_path, {"x": elsewhere.Pair(1, 2)})
    monkeypatch.delitem(sys.modules, "elsewhere")
    return tmp_path


def test_a_moved_class_resolves_to_that_of_the_live_object(of_a_class_elsewhere):
    live = {"x": Pair(3, 4)}
    lastgood.load(of_a_class_elsewhere, live)
    assert type(live["x"]) is Pair and live["x"] == (1, 2)


def test_a_class_that_is_not_imported_is_a_named_difference(of_a_class_elsewhere):
    live = {"x": None}
    with pytest.raises(StateMismatch, match=r"x: a namedtuple of class elsewhere\.Pair .* import its module"):
        lastgood.load(of_a_class_elsewhere, live)
    assert live == {"x": None}


class Dropped:
    def __del__(self):
        pass


@dataclasses.dataclass
class Closing(Dropped):
    a: int = 1


@dataclasses.dataclass
class Ordered(collections.OrderedDict):
    a: int = 1


class Renamed(enum.Enum):
    A = 1


Renamed.__qualname__ = "Phase"


def cached():
    config = Config(0.1)
    config.__dict__["cache"] = 1
    return config


def labelled():
    text = Text("a")
    text.label = 1
    return text


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Closing, "cannot be stored without running code"),
        (Ordered, "cannot be stored without running code"),
        (cached, "not fields: cache"),
        (labelled, "not fields: label"),
        (lambda: Renamed.A, "cannot be found under its name"),
        (lambda: collections.namedtuple("Local", "a")(1), "cannot be found under its name"),
        (lambda: object.__new__(Config), "without a value of its own for the field lr"),
        (lambda: Frozen(print), r"x\.0\.weights is a builtin_function_or_method"),
    ],
)
def test_an_instance_that_would_not_restore_completely_is_refused_by_name(make, why):
    with pytest.raises(Unstorable, match=why) as caught:
        capture({"x": [make()]})
    assert caught.value.what.startswith("x.0")


def test_patterns_match_the_fields_of_a_dataclass(tmp_path):
    saved = capture({"config": Config(0.5, ["new"])}, exclude=["config.lr", "rng"])
    assert saved.values["config"]["!dataclass"]["parts"].keys() == {"tags", "phase"}
    live = {"config": Config(0.1)}
    stored = Stored(1, {}, {}, saved.values)
    with pytest.raises(StateMismatch, match=r"missing in the generation: config\.lr"):
        match(live, stored, exclude=["rng"])
    match(live, stored, exclude=["rng", "config.lr"]).apply(Fed(lambda sink: None), None)
    assert live["config"] == Config(0.1, ["new"])


# ---- forged generations ------------------------------------------------------------------------------------------


class Trap(types.ModuleType):
    """A module, a class and a metaclass that record any access beyond their dictionaries."""

    def __getattribute__(self, name):
        raised.append(name)
        return super().__getattribute__(name)


class Meta(type):
    def __getattribute__(cls, name):
        raised.append(name)
        return super().__getattribute__(name)


@dataclasses.dataclass
class Guarded(metaclass=Meta):
    a: int = 1


@dataclasses.dataclass
class Property:
    a: int = 1

    def __new__(cls, *_):
        raised.append("__new__")
        return super().__new__(cls)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:eval",
        "builtins:object",
        "antigravity:fly",
        "trap:Config",
        f"{__name__}:Guarded",
        f"{__name__}:Closing",
        f"{__name__}:raised.append",
        f"{__name__}:Config.__init__",
        "subprocess:Popen",
        ":",
        "",
        "a" * 10_000,
    ],
    ids=lambda name: name[:30],
)
@pytest.mark.parametrize("tag", ["!Enum", "!subclass", "!namedtuple", "!dataclass"])
def test_a_forged_class_name_imports_and_calls_nothing(tag, name, monkeypatch):
    trap = Trap("trap")
    monkeypatch.setitem(sys.modules, "trap", trap)
    parts = {"!Enum": {"member": "x"}, "!subclass": {"value": 1}}.get(tag, {"a": 1})
    stored = Stored(1, {}, {}, {"x": {tag: {"class": name, "parts": parts}}})
    before = set(sys.modules)
    raised.clear()
    with pytest.raises(StateMismatch, match="x: a "):
        match({"x": None}, stored, exclude=["rng"])
    assert set(sys.modules) == before and not raised


@pytest.mark.parametrize(
    ("tag", "name", "parts"),
    [
        ("!Enum", "Phase", {"member": "w"}),
        ("!Enum", "Phase", {"member": 1}),
        ("!Enum", "Phase", {"member": {"!tuple": ["s", 1]}}),
        ("!Enum", "Phase", {"member": "__class__"}),
        ("!Enum", "Phase", {}),
        ("!Enum", "Side", {"member": 64}),
        ("!Enum", "Config", {"member": "lr"}),
        ("!dataclass", "Config", {"lr": 1}),
        ("!dataclass", "Config", {"lr": 1, "tags": [], "phase": 1, "__class__": 1}),
        ("!dataclass", "Phase", {}),
        ("!namedtuple", "Pair", {"one": 1}),
        ("!namedtuple", "Pair", {"one": 1, "two": 2, "three": 3}),
        ("!namedtuple", "Config", {"lr": 1}),
        ("!subclass", "Count", {"value": "12"}),
        ("!subclass", "Count", {"value": 1.5}),
        ("!subclass", "Point", {"value": 1}),
        ("!np.ma", "Config", {}),
    ],
    ids=repr,
)
def test_parts_that_do_not_fit_a_class_are_refused_before_any_change(tag, name, parts):
    live = {"x": Config(0.1)}
    stored = Stored(1, {}, {}, {"x": {tag: {"class": f"{__name__}:{name}", "parts": parts}}})
    with pytest.raises((StateMismatch, ManifestInvalid)):
        match(live, stored, exclude=["rng"])
    assert live == {"x": Config(0.1)}


def test_encoding_a_flag_never_calls_its_bool():
    values = capture({"x": Counted.A | Counted.B}, exclude=["rng"]).values
    raised.clear()
    match({"x": None}, Stored(1, {}, {}, values), exclude=["rng"])
    assert not raised


def test_fields_are_not_set_around_the_load_state_dict_of_a_live_object():
    """A forged file could set every field of a dataclass that has a load_state_dict, without calling that method."""
    live = {"x": Resumable()}
    forged = {"!dataclass": {"class": f"{__name__}:Resumable", "parts": {"path": "/etc", "place": 3}}}
    with pytest.raises(StateMismatch, match="x: data in the generation, Resumable here"):
        match(live, Stored(1, {}, {}, {"x": forged}), exclude=["rng"])


@pytest.mark.parametrize("forged", [{"torch": 5}, {"torch": {"!tensor": "w"}}, {"cuda": [1]}, {"cuda": 1}], ids=repr)
def test_malformed_generator_states_are_refused_before_any_change(forged):
    """torch's TypeError was raised by the restore after the model had been overwritten."""
    captured = capture({"w": torch.ones(2)})
    entries = dict(captured.values["rng"]["!dict"]) | forged
    values = captured.values | {"rng": {"!dict": [list(one) for one in entries.items()]}}
    tensors = {name: (str(one.dtype)[6:], tuple(one.shape)) for name, one in captured.tensors.items()}
    with pytest.raises(ManifestInvalid, match=r"rng\."):
        match({"w": torch.zeros(2)}, Stored(1, tensors, captured.aliases, values))


@pytest.mark.parametrize(
    "tree",
    [
        {"!dataclass": []},
        {"!dataclass": {"class": 1, "parts": {}}},
        {"!dataclass": {"class": "a:b", "parts": []}},
        {"!dataclass": {"class": "a:b", "parts": {}, "more": 1}},
        {"!np.ma": {"class": "numpy.ma:MaskedArray", "parts": {"data": 1}}},
        {"!np.ma": {"class": "numpy.ma:MaskedArray", "parts": {"data": {"!ndarray": ["x", "<f4"]}, "mask": 5}}},
        {
            "!np.ma": {
                "class": "numpy.ma:MaskedArray",
                "parts": {"data": {"!ndarray": ["x", "<f4"]}, "fill_value": "not a number"},
            }
        },
        {"!ndarray": ["x", {"fields": [], "itemsize": 4, "aligned": False}]},
        {"!flattened": {"class": "torch:Tensor"}},
    ],
    ids=repr,
)
def test_malformed_instances_and_arrays_are_refused(tree):
    with pytest.raises(ManifestInvalid):
        match({"x": None}, Stored(1, {"x": ("float32", (2,))}, {}, {"x": tree}), exclude=["rng"])


def test_a_time_zone_that_this_machine_lacks_is_not_damage(monkeypatch):
    def unknown(key):
        raise zoneinfo.ZoneInfoNotFoundError(key)

    tree = encode(VALUES["second_of_two"], "x")
    monkeypatch.setattr(encodings.zoneinfo, "ZoneInfo", unknown)
    with pytest.raises(Refused, match="pip install tzdata"):
        decode(tree)
