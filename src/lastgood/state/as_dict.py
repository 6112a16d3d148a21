"""A generation as a nested dict: what `lastgood.load(path)` returns. Needs no live state; runs no code of the user.

Made of:
    a module              {"0.weight": tensor, ...}, as its state_dict() has it
    an optimizer          {"state": {0: {...}}, "param_groups": [{"params": [0, ...], "lr": ...}]}, as torch's has it
    a scheduler, sampler, scaler, loader, generator, ...                what it was saved as: what its state_dict() said
    "rng"                 the states of the global random number generators
    tensors, arrays       new ones on the CPU, without gradients; the names of one tensor give one tensor
    everything else       as it was
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from urllib.parse import unquote

import torch

from ..format.values import EVERYTHING, LEFT_OUT, Filter, join
from .binder import ABSENT, Binder, Home, Put
from .capture import wanted
from .decode import SavedFlattened, SavedInstance, SavedObject, SavedOptimizer, Stored, TensorRef, read_values
from .match import Rename
from .patterns import Patterns, Recorder
from .tensor_sink import Filling

CPU = torch.device("cpu")


class Everything:
    """A request for all of a generation that the patterns leave. Takes the place of a `Request` in a load."""

    strict = True

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._include, self._exclude = include, exclude
        self._made: AsDict | None = None

    @property
    def content(self) -> dict[str, Any]:
        """What was loaded last; empty where there was nothing to load."""
        return self._made.content if self._made else {}

    def has_place(self, entry: str) -> bool:
        return True

    def fit(self, stored: Stored, nowhere: Callable[[list[str]], list[str]], alone: bool) -> AsDict:
        """Raises ManifestInvalid for malformed values, Refused for patterns that match nothing."""
        patterns = Patterns(self._include, self._exclude)
        if patterns.pending:
            names = stored_names(stored)
            patterns.note(names)
            patterns.require({})
            patterns.require_something(names)
        self._made = AsDict(stored, wanted(self._include, self._exclude))
        return self._made


def stored_names(stored: Stored) -> set[str]:
    """Every name in a generation."""
    names = Recorder(EVERYTHING)
    _DataBinder(stored, names).bind_all()
    return {*stored.tensors, *names.found}


class AsDict:
    """A nested dict of new tensors, which `apply` fills. Takes the place of a `Match`."""

    begun = False  # nothing live is written
    skipped: Sequence[str] = ()

    def __init__(self, stored: Stored, names: Filter) -> None:
        self._plan = _DataBinder(stored, names)
        self._puts = self._plan.bind_all()
        self._plan.make_new()
        self._sink = Filling(stored.tensors, self._plan.places, self._plan.takers, self._plan.boxed)
        self.content: dict[str, Any] = {}

    @property
    def bytes(self) -> int:
        return self._sink.bytes

    def apply(self, feed: Callable[[Filling], None], look_first: bool = True) -> None:
        """Fill the tensors, which nobody else has yet: there is nothing to be looked at first."""
        feed(self._sink)
        made = {key: put() for key, put in self._puts.items()}
        self.content = _kept(made)


class _DataBinder(Binder):
    """Binds what was saved of objects as the data that it is, and every tensor to a new one on the CPU."""

    def __init__(self, stored: Stored, names: Filter) -> None:
        values, referenced = read_values(stored)
        of_modules = {name: name for name in stored.tensors if name not in referenced}
        super().__init__(stored, of_modules, names, Rename({}), {})
        self._modules = sorted(path for key, tree in values.items() for path in _modules(tree, key))
        self._values = values | _unowned(of_modules, self._modules, values)

    def bind_all(self) -> dict[str, Put]:
        """How each top-level entry is made, by its key."""
        return {
            unquote(path, errors="surrogatepass"): self.bind(ABSENT, one, path) for path, one in self._values.items()
        }

    def _tensor(self, live: Any, ref: TensorRef, path: str, home: Home | None) -> Put:
        return super()._tensor(ABSENT, replace(ref, device=CPU, is_parameter=False, wants_grad=False), path, None)

    def _instance(self, live: Any, saved: SavedInstance, path: str, home: Home | None) -> Put:
        """Its parts by name: no class is looked up, so its module need not be imported."""
        return self.bind(ABSENT, saved.parts, path)

    def _flattened(self, live: Any, saved: SavedFlattened, path: str, home: Home | None) -> Put:
        """Its inner tensors by name."""
        return self.bind(ABSENT, dict(saved.parts), path)

    def _mapping(self, live: dict[Any, Any], saved: dict[Any, Any], path: str, home: Home | None) -> Put:
        return self._unless_empty(super()._mapping(live, saved, path, home), path)

    def _sequence(self, live: Any, saved: Any, path: str, home: Home | None) -> Put:
        return self._unless_empty(super()._sequence(live, saved, path, home), path)

    def _unless_empty(self, put: Put, path: str) -> Put:
        """Leaves out a container of which the patterns want nothing; a list has None where an item is left out."""
        if self._names.keeps(path):
            return put

        def made() -> Any:
            found = put()
            rest = found.values() if isinstance(found, dict) else [one for one in found if one is not None]
            return found if rest else LEFT_OUT

        return made

    def _object(self, live: Any, saved: SavedObject, path: str) -> Put:
        if saved.tag == "!module":
            own = {name: TensorRef(name, CPU) for name in self._offered if name.startswith(f"{path}.")}
            puts = {name: self.bind(ABSENT, one, name) for name, one in (own | saved.data).items()}
            return lambda: _kept({name[len(path) + 1 :]: put() for name, put in puts.items()}) or self._nothing(path)
        if saved.tag == "!optimizer":
            return self._as_torch_has_it(saved.data, path)
        data = self.bind(ABSENT, saved.data, path)
        return (lambda: _numbers(data())) if saved.tag == "!scaler" else data

    def _as_torch_has_it(self, saved: SavedOptimizer, path: str) -> Put:
        """Parameters by their place, counted through all groups."""
        names = list(chain.from_iterable(group.params for group in saved.groups))
        at = {name: index for index, name in enumerate(names)}
        state = {at[name]: self.bind(ABSENT, saved.state[name], own) for name, own in self._own(names, saved, path)}
        common = self.bind(ABSENT, saved.common, f"{path}.state")
        options = [
            self.bind(ABSENT, one.options, f"{path}.param_groups.{index}") for index, one in enumerate(saved.groups)
        ]

        def put() -> Any:
            held = _kept({index: one() for index, one in state.items()}) | _kept(common())
            groups = [_kept(one()) for one in options]
            if not held and not any(groups):
                return self._nothing(path)
            params = [[at[name] for name in group.params] for group in saved.groups]
            return {
                "state": held,
                "param_groups": [own | {"params": some} for own, some in zip(groups, params, strict=True)],
            }

        return put

    def _own(self, names: list[str], saved: SavedOptimizer, path: str) -> Iterator[tuple[str, str]]:
        """Each parameter that has state, and the name of its state, as `objects.Parameters` makes it."""
        owned = [name for name in names if "." in name]
        only = next((one for one in self._modules if all(name.startswith(f"{one}.") for name in owned)), "")
        for name in names:
            if name in saved.state:
                yield name, f"{path}.state.{name[len(only) + 1 :] if only and '.' in name else name}"

    def _nothing(self, path: str) -> Any:
        return {} if self._names.keeps(path) else LEFT_OUT


def _unowned(names: Iterable[str], modules: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Entries for tensors that no value speaks of, as of an imported file: by the first part of their name, like the
    tensors of a module; where a value has that name, each by itself.
    """
    found: dict[str, Any] = {}
    for name in names:
        top, _, rest = name.partition(".")
        if any(name.startswith(f"{one}.") for one in modules):
            continue
        found |= {top: SavedObject("!module", {})} if rest and top not in values else {name: TensorRef(name, CPU)}
    return found


def _modules(tree: Any, path: str) -> Iterator[str]:
    """The path of every module in nested dicts, sequences and instances."""
    if isinstance(tree, SavedObject):
        if tree.tag == "!module":
            yield path
    elif isinstance(tree, SavedInstance):
        yield from _modules(tree.parts, path)
    elif isinstance(tree, dict):
        for key, part in tree.items():
            yield from _modules(part, join(path, key))
    elif isinstance(tree, (list, tuple, deque)):
        for index, part in enumerate(tree):
            yield from _modules(part, f"{path}.{index}")


def _kept(entries: Any) -> dict[Any, Any]:
    return {} if entries is LEFT_OUT else {key: one for key, one in entries.items() if one is not LEFT_OUT}


def _numbers(data: Any) -> Any:
    """What `GradScaler.state_dict()` says: numbers, where it was read as tensors without waiting for the device."""
    if data is LEFT_OUT:
        return data
    return {key: one.item() if isinstance(one, torch.Tensor) else one for key, one in data.items()}
