"""A generation as a nested dict, as `lastgood.load(path)` returns it. Needs no live state; runs no code of the user.

Made of:
    a module              {"0.weight": tensor, ...}, as its state_dict() has it
    an optimizer          {"state": {0: {...}}, "param_groups": [{"params": [0, ...], "lr": ...}]}, as torch's has it
    a scheduler, sampler, scaler, loader, generator, ...                what its state_dict() returned
    "rng"                 the states of the global random number generators
    tensors, arrays       new ones on the CPU, without gradients; all names of a tensor refer to one new tensor
    everything else       equal to what was saved
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from urllib.parse import unquote

import torch

from ..format.values import EVERYTHING, LEFT_OUT, Filter, join, only_numbers
from ..run.content import Content, ReadSettings
from . import tensors
from .binding import ABSENT, Put
from .capture import wanted
from .decode import (
    ArrayRef,
    SavedFlattened,
    SavedInstance,
    SavedObject,
    SavedOptimizer,
    Stored,
    TensorRef,
    read_values,
)
from .differences import Differences
from .patterns import Patterns, Recorder
from .puts import empty, refill, refill_sequence, stays
from .tensor_plan import Making, TensorPlan
from .tensor_sink import TensorSink

CPU = torch.device("cpu")


@dataclass(frozen=True)
class DictRequest:
    """A request for a generation as a nested dict, which is put into `content`. Takes the place of a `LoadRequest`.

    `step`: None for the newest good generation. `include`, `exclude`: name patterns.
    """

    content: dict[str, Any]
    step: int | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    strict: bool = field(default=True, init=False)

    def has_place(self, entry: str) -> bool:
        """A dict has a place for every entry."""
        return True

    def fit(self, stored: Stored, alone: bool) -> AsDict:
        """Plan the dict. Raises ManifestInvalid for malformed values, Refused for patterns that match nothing."""
        patterns = Patterns(self.include, self.exclude)
        if patterns.pending:
            names = stored_names(stored)
            patterns.note(names)
            patterns.require({})
            patterns.require_something(names)
        return AsDict(stored, wanted(self.include, self.exclude), self.content)


def stored_names(stored: Stored) -> set[str]:
    """Every name in a generation."""
    names = Recorder(EVERYTHING)
    DataBinder(stored, names).bind_all()
    return {*stored.tensors, *names.found}


class AsDict:
    """How a generation becomes a nested dict of new tensors. Takes the place of a `Match`."""

    begun = False  # nothing live is written
    skipped: Sequence[str] = ()

    def __init__(self, stored: Stored, names: Filter, content: dict[str, Any]) -> None:
        binder = DataBinder(stored, names)
        self._content, self._puts = content, binder.bind_all()
        plan = binder.tensors
        plan.make_new()
        self._sink = TensorSink(stored.tensors, plan.places, plan.takers, plan.boxed)
        self.unexpected: list[str] = []

    @property
    def bytes(self) -> int:
        """How many bytes of the generation go into the dict."""
        return self._sink.bytes

    def chunks_wanted(self, content: Content, rank: int) -> dict[str, list[int]]:
        """As `Content.chunks_wanted`, of what goes into this dict."""
        return content.chunks_wanted(self._sink, rank)

    def require_fit(self) -> None:
        """A dict has a place for everything."""

    def apply(self, content: Content, settings: ReadSettings, verify_first: bool = True) -> None:
        """Fill the new tensors and the dict. Nobody has them yet, so nothing has to be verified before."""
        content.read_into(self._sink, settings)
        self._content.clear()
        self._content.update(_kept({key: put() for key, put in self._puts.items()}))


class DataBinder:
    """Plans what was saved of objects as the data that it is, and every tensor as a new one on the CPU."""

    def __init__(self, stored: Stored, names: Filter) -> None:
        values, referenced = read_values(stored)
        self._names = names
        self.tensors = TensorPlan(stored, Differences(names))
        self._of_modules = [name for name in stored.tensors if name not in referenced]
        self._modules = sorted(path for key, tree in values.items() for path in _modules(tree, key))
        self._values = values | _unowned(self._of_modules, self._modules, values)

    def bind_all(self) -> dict[str, Put]:
        """How each top-level entry is made, by its key."""
        return {unquote(path, errors="surrogatepass"): self.bind(one, path) for path, one in self._values.items()}

    def bind(self, saved: Any, path: str) -> Put:
        """How the object at `path` is made; LEFT_OUT where the patterns do not want it.

        Instances and tensor subclasses become dicts of their parts: no class is looked up, so no module is imported.
        """
        if saved is LEFT_OUT or not self._names.enters(path):
            return stays(ABSENT)
        if isinstance(saved, SavedObject):
            return self._object(saved, path)
        if isinstance(saved, (SavedInstance, SavedFlattened)):
            return self.bind(dict(saved.parts), path)
        if type(saved) in (dict, OrderedDict, defaultdict):
            return self._mapping(saved, path)
        if type(saved) in (list, tuple, deque):
            return self._sequence(saved, path)
        if not self._names.keeps(path):
            return stays(ABSENT)
        if isinstance(saved, (TensorRef, ArrayRef)):
            return self._tensor(saved, path)
        return lambda: saved

    def _tensor(self, ref: TensorRef | ArrayRef, path: str) -> Put:
        made = self.tensors.new(ref.name, Making(CPU, ref.order), path)
        return lambda: tensors.to_array(made[0], ref.dtype) if isinstance(ref, ArrayRef) else made[0]

    def _mapping(self, saved: dict[Any, Any], path: str) -> Put:
        puts = {key: self.bind(item, join(path, key)) for key, item in saved.items()}
        return self._unless_empty(lambda: refill(empty(saved), _kept({key: put() for key, put in puts.items()})), path)

    def _sequence(self, saved: Any, path: str) -> Put:
        if self._names.everything and only_numbers(saved):
            return lambda: refill_sequence(empty(saved), lambda: saved)
        puts = [self.bind(item, f"{path}.{index}") for index, item in enumerate(saved)]
        return self._unless_empty(lambda: refill_sequence(empty(saved), lambda: [put() for put in puts]), path)

    def _unless_empty(self, put: Put, path: str) -> Put:
        """Leaves out a container of which the patterns want nothing. In a list None stands for what is left out."""
        if self._names.keeps(path):
            return put

        def made() -> Any:
            found = put()
            rest = found.values() if isinstance(found, dict) else [one for one in found if one is not None]
            return found if rest else LEFT_OUT

        return made

    def _object(self, saved: SavedObject, path: str) -> Put:
        if saved.tag == "!module":
            own = {name: TensorRef(name, CPU) for name in self._of_modules if name.startswith(f"{path}.")}
            puts = {name: self.bind(one, name) for name, one in (own | saved.data).items()}
            return lambda: _kept({name[len(path) + 1 :]: put() for name, put in puts.items()}) or self._nothing(path)
        if saved.tag == "!optimizer":
            return self._as_torch_has_it(saved.data, path)
        data = self.bind(saved.data, path)
        return (lambda: _numbers(data())) if saved.tag == "!scaler" else data

    def _as_torch_has_it(self, saved: SavedOptimizer, path: str) -> Put:
        """Plan an optimizer as its state_dict() has it: parameters by their index, counted through all groups."""
        names = list(chain.from_iterable(group.params for group in saved.groups))
        at = {name: index for index, name in enumerate(names)}
        state = {at[name]: self.bind(saved.state[name], own) for name, own in self._own(names, saved, path)}
        common = self.bind(saved.common, f"{path}.state")
        options = [self.bind(one.options, f"{path}.param_groups.{index}") for index, one in enumerate(saved.groups)]

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
        """Each parameter that has state, and the name of that state, as `objects.Parameters` makes it."""
        owned = [name for name in names if "." in name]
        only = next((one for one in self._modules if all(name.startswith(f"{one}.") for name in owned)), "")
        for name in names:
            if name in saved.state:
                yield name, f"{path}.state.{name[len(only) + 1 :] if only and '.' in name else name}"

    def _nothing(self, path: str) -> Any:
        return {} if self._names.keeps(path) else LEFT_OUT


def _unowned(names: Iterable[str], modules: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Entries for tensors that no value refers to, as those of an imported file.

    They are grouped by the first part of their name, like the tensors of a module; where a value or a tensor has that
    name, each tensor is an entry of its own.
    """
    found: dict[str, Any] = {}
    own = [name for name in names if not any(name.startswith(f"{one}.") for one in modules)]
    taken = {*values, *own}
    for name in own:
        top, _, rest = name.partition(".")
        found |= {top: SavedObject("!module", {})} if rest and top not in taken else {name: TensorRef(name, CPU)}
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
    """What `GradScaler.state_dict()` returns: numbers, which were saved as tensors so as not to wait for the device."""
    if data is LEFT_OUT:
        return data
    return {key: one.item() if isinstance(one, torch.Tensor) else one for key, one in data.items()}
