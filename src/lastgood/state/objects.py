"""The objects of a state: which kinds there are, how each is read and loaded, and how parameters are named.

Reads and loads one object at a time. Reading changes nothing and draws no random number, unless a user's own
`state_dict()` does.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..data.loader import Loader
from ..data.sampler import ResumableSampler
from ..errors import Unstorable
from ..format.values import component, join, only_numbers, refusal
from ..limits import DEPTH_LIMIT
from .instances import parts_of

T = TypeVar("T")


def tag_of(obj: Any) -> str:
    """The tag of an object that is restored by writing into it; empty for data, which is replaced."""
    if isinstance(obj, nn.Module):
        return "!module"
    if isinstance(obj, Optimizer) and _has_methods_of(Optimizer, obj):
        return "!optimizer"
    if isinstance(obj, GradScaler) and _has_methods_of(GradScaler, obj):
        return "!scaler"
    if isinstance(obj, torch.Generator):
        return "!torch.Generator"
    if type(obj) is np.random.Generator:
        return "!np.Generator"
    if type(obj) is np.random.RandomState:
        return "!np.RandomState"
    if type(obj) is random.Random:
        return "!random.Random"
    methods = (getattr(obj, name, None) for name in ("state_dict", "load_state_dict"))
    return "!object" if not isinstance(obj, type) and all(map(callable, methods)) else ""


def _has_methods_of(base: Any, obj: Any) -> bool:
    kind: Any = type(obj)
    return kind.state_dict is base.state_dict and kind.load_state_dict is base.load_state_dict


def require_no_loader(obj: Any, path: str) -> None:
    """Raises Unstorable, by name, for a data loader that has no state of its own."""
    if isinstance(obj, Loader):
        what = "is the loader of a ResumableSampler, and the sampler holds the position in the data"
        raise refusal(path, what, 'Store the sampler instead: state={"sampler": sampler}')
    if isinstance(obj, DataLoader):
        what = "is a torch DataLoader, which cannot continue from a position in its data"
        raise refusal(path, what, "Use lastgood.ResumableSampler, or the StatefulDataLoader of torchdata")


def stale_state(optimizer: Optimizer, path: str) -> Unstorable:
    """The error for an optimizer that still keeps the state of tensors that are no longer its parameters."""
    stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
    stale = [one for one in optimizer.state if isinstance(one, torch.Tensor) and id(one) not in stepped]
    shapes = ", ".join(str(list(one.shape)) for one in stale[:3]) + (", ..." if len(stale) > 3 else "")
    return Unstorable(
        f"{path}.state holds the state of a tensor that is in none of its groups: {len(stale)} such, of shape {shapes}",
        safe="Nothing was touched.",
        todo="A parameter was replaced. Move or delete its state where that happens: "
        "optimizer.state[new] = optimizer.state.pop(old), or del optimizer.state[old].",
        names=(f"{path}.state",),
    )


def holds_objects(obj: Any, above: frozenset[int] = frozenset()) -> bool:
    """Whether this object, or one inside of these plain containers, can only be restored by writing into it.

    `above`: as for `_find_objects`; by default it is in none.
    """
    if isinstance(obj, (list, tuple)) and only_numbers(obj):
        return False
    if tag_of(obj):
        return True
    if id(obj) in above or len(above) > DEPTH_LIMIT:
        return False
    if isinstance(obj, (Mapping, list, tuple, deque)):
        parts = obj.values() if isinstance(obj, Mapping) else obj
    else:
        parts = parts_of(obj).values()
    return any(holds_objects(part, above | {id(obj)}) for part in parts)


# ---- kinds of objects ------------------------------------------------------------------------------------------


class Kind:
    """How the objects behind one tag are read and loaded. Here: by their own `state_dict` and `load_state_dict`."""

    def read(self, one: Any) -> Any:
        """The data to be stored; tensors in it are the live ones."""
        return one.state_dict()

    def load(self, one: Any, data: Any) -> None:
        """Restore the object from its data."""
        one.load_state_dict(data)

    def differs(self, one: Any, data: Any) -> str:
        """Why this data cannot be loaded into this object; empty if it can, as far as it is known before the load.

        Only a sampler knows which states it cannot continue from, and a schedule of torch shows its class by what it
        has. Other objects show it only in `load`.
        """
        if isinstance(one, LRScheduler):
            return _schedule_differs(one, data)
        return one.differs(data) if isinstance(one, ResumableSampler) else ""  # guard: order-checked-before-load


class _Scaler(Kind):
    def read(self, one: GradScaler) -> dict[str, Any]:
        """As its `state_dict()`, with live tensors instead of numbers, which would need a synchronization."""
        if not one._enabled:
            return {}
        made = one._scale is not None
        return {
            "scale": one._scale if made else one._init_scale,
            "growth_factor": one._growth_factor,
            "backoff_factor": one._backoff_factor,
            "growth_interval": one._growth_interval,
            "_growth_tracker": one._growth_tracker if made else one._init_growth_tracker,
        }

    def load(self, one: GradScaler, data: dict[str, Any]) -> None:
        one.load_state_dict(
            {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in data.items()}
        )

    def differs(self, one: GradScaler, data: Any) -> str:
        if bool(data) != one._enabled:
            states = ("disabled", "enabled")
            return f"{states[bool(data)]} in the generation, {states[one._enabled]} here"
        complete = isinstance(data, dict) and (not data or data.keys() == self.read(one).keys())
        return "" if complete else "incomplete in the generation"


class _TorchGenerator(Kind):
    def read(self, one: torch.Generator) -> dict[str, Any]:
        return {"device": one.device.type, "state": one.get_state()}

    def load(self, one: torch.Generator, data: Any) -> None:
        one.set_state(data["state"].cpu())

    def differs(self, one: torch.Generator, data: Any) -> str:
        if not isinstance(data, dict) or data.keys() != {"device", "state"}:
            return "incomplete in the generation"
        device = one.device.type
        return "" if data["device"] == device else f"on {data['device']} in the generation, on {device} here"


class _NumpyGenerator(Kind):
    def read(self, one: np.random.Generator) -> Any:
        return one.bit_generator.state

    def load(self, one: np.random.Generator, data: Any) -> None:
        one.bit_generator.state = data

    def differs(self, one: np.random.Generator, data: Any) -> str:
        return _bit_generator_differs(self.read(one), data)


class _NumpyRandomState(Kind):
    def read(self, one: np.random.RandomState) -> Any:
        return one.get_state(legacy=False)

    def load(self, one: np.random.RandomState, data: Any) -> None:
        one.set_state(data)

    def differs(self, one: np.random.RandomState, data: Any) -> str:
        return _bit_generator_differs(self.read(one), data)


class _PythonRandom(Kind):
    def read(self, one: random.Random) -> Any:
        return one.getstate()

    def load(self, one: random.Random, data: Any) -> None:
        one.setstate(data)

    def differs(self, one: random.Random, data: Any) -> str:
        return _random_differs(data)


def _schedule_differs(one: LRScheduler, data: Any) -> str:
    """Why data is that of another class. `load_state_dict` takes it, and the schedule has the attributes of both. Other
    versions of torch have other private attributes, and `verbose`; classes of a user may have lost or got some."""
    if not isinstance(data, dict) or not type(one).__module__.startswith("torch.optim."):
        return ""
    theirs, ours = ({key for key in keys if str(key)[:1] != "_"} - {"verbose"} for keys in (data, one.state_dict()))
    if theirs <= ours or ours <= theirs:
        return ""
    names = (", ".join(sorted(map(str, only))) for only in (theirs - ours, ours - theirs))
    return "a schedule with {} in the generation, with {} here".format(*names)  # guard: other-schedule-refused


def _bit_generator_differs(live: Any, data: Any) -> str:
    if not isinstance(data, dict) or data.keys() != live.keys():
        return "another bit generator, or an incomplete one, in the generation"
    names = (data["bit_generator"], live["bit_generator"])
    return "" if names[0] == names[1] else f"{names[0]} in the generation, {names[1]} here"


def _random_differs(data: Any) -> str:
    try:
        random.Random().setstate(data)
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        return f"no state of this Python's random.Random ({error})"
    return ""


KINDS: dict[str, Kind] = {
    "!object": Kind(),
    "!scaler": _Scaler(),
    "!torch.Generator": _TorchGenerator(),
    "!np.Generator": _NumpyGenerator(),
    "!np.RandomState": _NumpyRandomState(),
    "!random.Random": _PythonRandom(),
}
"""all kinds but modules and optimizers, which consist of more than one tree"""

# ---- global random number generators -----------------------------------------------------------------------------


def read_rng() -> dict[str, Any]:
    """The state of every global generator: Python, numpy, torch on the CPU, and each CUDA device once CUDA is used."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(index) for index in devices],
    }


def load_rng(data: dict[str, Any]) -> None:
    """Set the global generators that `data` has. Those of devices that this machine lacks are skipped."""
    if "python" in data:
        random.setstate(data["python"])
    if "numpy" in data:
        np.random.set_state(data["numpy"])
    if "torch" in data:
        torch.set_rng_state(data["torch"])
    for index, state in enumerate(data.get("cuda", [])):
        if state is not None and index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, index)


def seed_rng(of: str) -> None:
    """Seed every global generator from a text, for a rank that did not exist when the state was saved."""
    seed = int.from_bytes(hashlib.sha256(of.encode()).digest()[:8], "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_differs(data: dict[str, Any]) -> dict[str, str]:
    """Why parts of `data` cannot be loaded into the global generators, by part. Tensors in it are not examined."""
    reasons = {}
    if "python" in data:
        reasons["python"] = _random_differs(data["python"])
    if "numpy" in data:
        reasons["numpy"] = _bit_generator_differs(np.random.get_state(legacy=False), data["numpy"])
    return {part: reason for part, reason in reasons.items() if reason}


# ---- modules and the names of parameters -----------------------------------------------------------------------

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module", "_original_module")
"""DistributedDataParallel, torch.compile, activation checkpointing, Lightning Fabric (two names)"""


def plain_name(raw: str) -> str:
    """A name inside a module without the components that wrappers have added."""
    if not any(f"{one}." in raw for one in _WRAPPERS):
        return raw
    *parents, last = raw.split(".")
    return ".".join([*(one for one in parents if one not in _WRAPPERS), last])


def module_entries(module: nn.Module, path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The module's own state_dict(), and full plain name -> key in it. Raises Unstorable if two keys get one name."""
    entries = module.state_dict()
    names: dict[str, str] = {}
    for raw in entries:
        name = f"{path}.{plain_name(raw)}"
        if name in names:
            what = f"would name both {names[name]} and {raw}: 'module.', '_orig_mod.' are stripped from names"
            raise refusal(name, what, "Rename one of them")
        names[name] = raw
    return entries, names


_DATA = frozenset(
    {torch.Tensor, nn.Parameter, np.ndarray, np.float64, np.float32, np.int64, np.bool_}
    | {int, float, bool, str, bytes, type(None)}
)


_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, tuple, deque})


class Member(NamedTuple):
    """A parameter in a group of an optimizer."""

    qualified: str
    """with the path of its module; its index alone, which has no dot, if no module of the state owns it"""
    short: str
    """as it occurs in the names of the optimizer's tensors"""
    parameter: torch.Tensor


class Parameters:
    """Which parameters the modules of a state own, and under what names."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._owners: dict[int, dict[str, str]] = {}  # id of a parameter -> path of a module -> name there
        for path in sorted(modules):
            for raw, parameter in modules[path].named_parameters():
                self._owners.setdefault(id(parameter), {})[path] = plain_name(raw)

    def of(self, optimizer: Optimizer, path: str) -> list[list[Member]]:
        """Its parameters, group by group. Raises Unstorable when two would have one name."""
        groups = [list(group["params"]) for group in optimizer.param_groups]
        owners = [self._owners.get(id(one), {}) for group in groups for one in group]
        owned = [one for one in owners if one]
        only = next((module for module in (owned[0] if owned else ()) if all(module in one for one in owned)), None)
        members: list[list[Member]] = []
        index, used = 0, set()
        for group in groups:
            members.append([])
            for parameter in group:
                member = _member(parameter, owners[index], only, index)
                if member.short in used:
                    todo = "Put every parameter into a module of the state"
                    raise refusal(f"{path}.state.{member.short}", "is the name of two parameters", todo)
                used.add(member.short)
                members[-1].append(member)
                index += 1
        return members


def _member(parameter: torch.Tensor, owners: dict[str, str], only: str | None, index: int) -> Member:
    if not owners:
        return Member(str(index), str(index), parameter)
    module = min(owners) if only is None else only
    qualified = f"{module}.{owners[module]}"
    return Member(qualified, qualified if only is None else owners[module], parameter)


def find_objects(state: Mapping[str, Any], longest: int = sys.maxsize) -> dict[str, Any]:
    """The objects of a state that are not plain data (modules, optimizers, ...), by path; not those inside of them.

    `longest`: dicts and lists with more entries are left out; default: none are.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        _find_objects(value, component(key), found, frozenset(), longest)
    return found


def _find_objects(obj: Any, path: str, found: dict[str, Any], above: frozenset[int], longest: int) -> None:
    """`above`: the ids of the containers that this object is in. One that contains itself, or is too deep, is refused
    by the first save."""
    kind = type(obj)
    if kind in _DATA or id(obj) in above or len(above) > DEPTH_LIMIT:
        return
    if kind in _CONTAINERS and len(obj) > longest:
        return
    below = above | {id(obj)}
    if kind is dict or kind is OrderedDict or kind is defaultdict:
        if not set(map(type, obj.values())) <= _DATA:
            for key, item in obj.items():
                _find_objects(item, join(path, key), found, below, longest)
    elif kind is list or kind is tuple or kind is deque:
        if not set(map(type, obj)) <= _DATA:
            for index, item in enumerate(obj):
                _find_objects(item, f"{path}.{index}", found, below, longest)
    elif not tag_of(obj) and (parts := parts_of(obj)):
        for name, part in parts.items():
            _find_objects(part, join(path, name), found, below, longest)
    else:
        found[path] = obj


def instances_of(state: Mapping[str, Any], kind: type[T], longest: int = sys.maxsize) -> list[T]:
    """The objects of a class in a state, each of them once. A class with a `state_dict()`, as all in a state have.

    `longest`: as for `find_objects`.
    """
    return list({id(one): one for one in find_objects(state, longest).values() if isinstance(one, kind)}.values())


def held_by_objects(state: Mapping[str, Any], kind: type[T]) -> dict[str, T]:
    """The objects of a class that are attributes of the objects of a state, and not in it themselves, by path."""
    found = find_objects(state)
    known = {id(one) for one in found.values()}
    return {
        join(path, name): part
        for path, one in found.items()
        for name, part in getattr(one, "__dict__", {}).items()
        if isinstance(part, kind) and id(part) not in known
    }


def modules_of(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The modules of a state, by path."""
    return {path: one for path, one in find_objects(state).items() if isinstance(one, nn.Module)}


def exact_sampler(loader: Any) -> ResumableSampler | None:
    """The ResumableSampler of a StatefulDataLoader of torchdata; None: it has none, or is another object."""
    if type(loader).__name__ != "StatefulDataLoader":
        return None
    found = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    return next((one for one in found if isinstance(one, ResumableSampler)), None)


def is_fsdp1(module: nn.Module) -> bool:
    """Whether it is FSDP1, which keeps its weights in flat parameters and moves them in forward and backward."""
    return type(module).__name__ == "FullyShardedDataParallel"


def may_step(obj: Any) -> bool:
    """Whether this acts like an optimizer: torch's, or any object with param_groups and step()."""
    return isinstance(obj, Optimizer) or (hasattr(obj, "param_groups") and callable(getattr(obj, "step", None)))


def can_be_hooked(obj: Any) -> bool:
    """Whether a step pre-hook that is registered on it runs before each step, as `Optimizer.__init__` arranges it."""
    return isinstance(obj, Optimizer) and bool(getattr(type(obj).step, "hooked", False))
