"""Objects of a state that are no tensors: what kinds there are, what each is made of, and how it is given that back.

Reads and loads one object at a time; it walks no state. Reading changes nothing and draws no random number (what a
user's own `state_dict()` does is its own affair).
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..data.sampler import Loader, ResumableSampler
from ..errors import Unstorable
from ..format.values import DEPTH_LIMIT, component, join, only_numbers, refusal
from .instances import parts_of


class Kind(NamedTuple):
    """How the objects behind one tag are read and loaded. `differs`: why this data does not go there, or nothing."""

    read: Callable[[Any], Any]
    load: Callable[[Any, Any], None]
    differs: Callable[[Any, Any], str]


def tag_of(obj: Any) -> str:
    """The tag of an object that is restored by writing into it; empty for data."""
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
        what = "is the loader of a ResumableSampler: the sampler holds its place in the data"
        raise refusal(path, what, 'Put the sampler there: state={"sampler": sampler}')
    if isinstance(obj, DataLoader):
        what = "is a torch DataLoader, which cannot continue from a place in its data"
        raise refusal(path, what, "Use lastgood.ResumableSampler, or the StatefulDataLoader of torchdata")


def stale_state(optimizer: Optimizer, path: str) -> Unstorable:
    """The error for an optimizer that keeps the state of tensors which are not its parameters any more."""
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


def holds_objects(obj: Any, depth: int = 0) -> bool:
    """Whether something in plain containers here can only be restored by writing into it."""
    if isinstance(obj, (list, tuple)) and only_numbers(obj):
        return False
    if tag_of(obj):
        return True
    if depth > DEPTH_LIMIT:
        return False
    if isinstance(obj, (Mapping, list, tuple, deque)):
        parts = obj.values() if isinstance(obj, Mapping) else obj
    else:
        parts = parts_of(obj).values()
    return any(holds_objects(part, depth + 1) for part in parts)


def _object_differs(one: Any, data: Any) -> str:
    """A sampler knows which states it cannot continue; other objects show it only when they load."""
    return one.differs(data) if isinstance(one, ResumableSampler) else ""  # guard: order-checked-before-load


# ---- loss scale ------------------------------------------------------------------------------------------------


def _read_scaler(scaler: GradScaler) -> dict[str, Any]:
    """What its `state_dict()` says, without the synchronisation of the device: live tensors in place of numbers."""
    if not scaler._enabled:
        return {}
    made = scaler._scale is not None
    return {
        "scale": scaler._scale if made else scaler._init_scale,
        "growth_factor": scaler._growth_factor,
        "backoff_factor": scaler._backoff_factor,
        "growth_interval": scaler._growth_interval,
        "_growth_tracker": scaler._growth_tracker if made else scaler._init_growth_tracker,
    }


def _load_scaler(scaler: GradScaler, data: dict[str, Any]) -> None:
    scaler.load_state_dict(
        {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in data.items()}
    )


def _scaler_differs(scaler: GradScaler, data: Any) -> str:
    if bool(data) != scaler._enabled:
        words = ("disabled", "enabled")
        return f"{words[bool(data)]} in the generation, {words[scaler._enabled]} here"
    complete = isinstance(data, dict) and (not data or data.keys() == _read_scaler(scaler).keys())
    return "" if complete else "incomplete in the generation"


# ---- random numbers --------------------------------------------------------------------------------------------


def _load_numpy(generator: np.random.Generator, data: Any) -> None:
    generator.bit_generator.state = data


def _torch_generator_differs(generator: torch.Generator, data: Any) -> str:
    if not isinstance(data, dict) or data.keys() != {"device", "state"}:
        return "incomplete in the generation"
    here = generator.device.type
    return "" if data["device"] == here else f"on {data['device']} in the generation, on {here} here"


def _bit_generator_differs(here: Any, data: Any) -> str:
    if not isinstance(data, dict) or data.keys() != here.keys():
        return "another bit generator, or an incomplete one, in the generation"
    names = (data["bit_generator"], here["bit_generator"])
    return "" if names[0] == names[1] else f"{names[0]} in the generation, {names[1]} here"


def _random_differs(_: random.Random, data: Any) -> str:
    try:
        random.Random().setstate(data)
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        return f"no state of this Python's random.Random ({error})"
    return ""


KINDS: dict[str, Kind] = {
    "!object": Kind(lambda one: one.state_dict(), lambda one, data: one.load_state_dict(data), _object_differs),
    "!scaler": Kind(_read_scaler, _load_scaler, _scaler_differs),
    "!torch.Generator": Kind(
        lambda one: {"device": one.device.type, "state": one.get_state()},
        lambda one, data: one.set_state(data["state"].cpu()),
        _torch_generator_differs,
    ),
    "!np.Generator": Kind(
        lambda one: one.bit_generator.state,
        _load_numpy,
        lambda one, data: _bit_generator_differs(one.bit_generator.state, data),
    ),
    "!np.RandomState": Kind(
        lambda one: one.get_state(legacy=False),
        lambda one, data: one.set_state(data),
        lambda one, data: _bit_generator_differs(one.get_state(legacy=False), data),
    ),
    "!random.Random": Kind(
        lambda one: one.getstate(),
        lambda one, data: one.setstate(data),
        _random_differs,
    ),
}
"""all but modules and optimizers, which are more than one tree"""


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
    """Set them; what is not in `data` stays, and what belongs to a device that is not here is skipped."""
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
    """Set every global generator to what follows from a text: of a rank that was not there when the state was saved."""
    seed = int.from_bytes(hashlib.sha256(of.encode()).digest()[:8], "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_differs(data: dict[str, Any]) -> dict[str, str]:
    """Why parts of this do not go into the global generators here, by part; tensors in it are not looked at."""
    reasons = {}
    if "python" in data:
        reasons["python"] = _random_differs(random.Random(), data["python"])
    if "numpy" in data:
        reasons["numpy"] = _bit_generator_differs(np.random.get_state(legacy=False), data["numpy"])
    return {part: reason for part, reason in reasons.items() if reason}


# ---- modules and the names of parameters -----------------------------------------------------------------------

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module", "_original_module")
"""DistributedDataParallel, torch.compile, activation checkpointing, Lightning Fabric (two names)"""


def plain_name(raw: str) -> str:
    """A name inside a module without what wrappers have put into it."""
    if not any(f"{one}." in raw for one in _WRAPPERS):
        return raw
    *parents, last = raw.split(".")
    return ".".join([*(one for one in parents if one not in _WRAPPERS), last])


def module_entries(module: nn.Module, path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The module's own state_dict, and its full plain names -> the keys in it. Raises Unstorable when two collide."""
    entries = module.state_dict()
    names: dict[str, str] = {}
    for raw in entries:
        name = f"{path}.{plain_name(raw)}"
        if name in names:
            what = f"would name both {names[name]} and {raw}: 'module.', '_orig_mod.' are stripped from names"
            raise refusal(name, what, "Rename one of them")
        names[name] = raw
    return entries, names


_DATA = frozenset({torch.Tensor, nn.Parameter, np.ndarray, int, float, bool, str, bytes, type(None)})


class Member(NamedTuple):
    """A parameter in a group of an optimizer."""

    qualified: str
    """with the path of its module; only its index, which has no dot, if it belongs to none"""
    short: str
    """as it stands in the names of the optimizer's tensors"""
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
        only = next((home for home in (owned[0] if owned else ()) if all(home in one for one in owned)), None)
        members: list[list[Member]] = []
        index, taken = 0, set()
        for group in groups:
            members.append([])
            for parameter in group:
                member = _member(parameter, owners[index], only, index)
                if member.short in taken:
                    todo = "Put every parameter into a module of the state"
                    raise refusal(f"{path}.state.{member.short}", "is the name of two parameters", todo)
                taken.add(member.short)
                members[-1].append(member)
                index += 1
        return members


def _member(parameter: torch.Tensor, owners: dict[str, str], only: str | None, index: int) -> Member:
    if not owners:
        return Member(str(index), str(index), parameter)
    home = min(owners) if only is None else only
    qualified = f"{home}.{owners[home]}"
    return Member(qualified, qualified if only is None else owners[home], parameter)


def find_objects(state: Mapping[str, Any]) -> dict[str, Any]:
    """What in a state is no plain data (modules, optimizers, ...), by path; nothing is sought inside of it."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        _find_objects(value, component(key), found, 0)
    return found


def _find_objects(obj: Any, path: str, found: dict[str, Any], depth: int) -> None:
    kind = type(obj)
    if kind in _DATA or depth > DEPTH_LIMIT:
        return
    if kind is dict or kind is OrderedDict or kind is defaultdict:
        if not set(map(type, obj.values())) <= _DATA:
            for key, item in obj.items():
                _find_objects(item, join(path, key), found, depth + 1)
    elif kind is list or kind is tuple or kind is deque:
        if not set(map(type, obj)) <= _DATA:
            for index, item in enumerate(obj):
                _find_objects(item, f"{path}.{index}", found, depth + 1)
    elif not tag_of(obj) and (parts := parts_of(obj)):
        for name, part in parts.items():
            _find_objects(part, join(path, name), found, depth + 1)
    else:
        found[path] = obj


def modules_of(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The modules of a state, by path."""
    return {path: one for path, one in find_objects(state).items() if isinstance(one, nn.Module)}


def is_fsdp1(module: nn.Module) -> bool:
    """Whether it keeps its weights in flat parameters, and moves them about in forward and backward."""
    return type(module).__name__ == "FullyShardedDataParallel"


def may_step(obj: Any) -> bool:
    """Whether this looks like an optimizer, of torch or not."""
    return isinstance(obj, Optimizer) or (hasattr(obj, "param_groups") and callable(getattr(obj, "step", None)))


def can_be_hooked(obj: Any) -> bool:
    """Whether a step pre-hook registered here runs before each step; `Optimizer.__init__` sees to that in the class."""
    return isinstance(obj, Optimizer) and bool(getattr(type(obj).step, "hooked", False))
