"""ModuleBinder: the tensors and extra state of live modules beside what is stored for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ..format.values import LEFT_OUT
from . import adapters, subclasses, tensors
from .binding import ABSENT, Put, Walk
from .decode import SavedFlattened, TensorRef
from .objects import module_entries, plain_name
from .own_loading import OwnLoading, calling
from .puts import kind_of, stays
from .rename import Rename


class ModuleBinder:
    """Binds modules. `of_modules`: live name -> stored name of the tensors that belong to modules."""

    def __init__(self, walk: Walk, of_modules: dict[str, str], rename: Rename, own_loading: OwnLoading) -> None:
        self._walk, self._of_modules, self._rename, self._own_loading = walk, of_modules, rename, own_loading
        self._claimed: set[str] = set()
        """names in `of_modules` for which the live state has a place"""

    def offers_below(self, path: str) -> bool:
        """Whether a tensor of a module is stored under this path."""
        return any(name.startswith(f"{path}.") for name in self._of_modules)

    def note_unclaimed(self) -> None:
        """Record the stored tensors of modules that no live module has a place for."""
        differences = self._walk.differences
        for name in self._of_modules:
            listed = name in self._claimed or differences.covers(name)
            if not listed and self._walk.names.keeps(name):
                differences.unexpected.append(name)

    def bind(self, live: nn.Module, extra: dict[str, Any], path: str) -> Put:
        """Plan to write a module's own tensors in place. What its state_dict() computes or adds is handed to its
        load_state_dict(). `extra`: what was stored of it besides tensors.
        """
        differences, names = self._walk.differences, self._walk.names
        if found := adapters.merged(live):  # guard: merged-adapters-refused-on-load
            differences.differs(
                path, f"adapters are merged into its weights here ({found}): call unmerge_adapter() before"
            )
            return stays(live)
        extra = {self._rename.name(name): saved for name, saved in extra.items()}
        own = {tensors.storage(one) for one in (*live.parameters(), *live.buffers())}
        own_parameters = live.named_parameters(remove_duplicate=False)
        parameters = {f"{path}.{plain_name(raw)}": one for raw, one in own_parameters}
        entries, raw_names = module_entries(live, path)
        filled = {id(one) for name, one in parameters.items() if name in self._of_modules and names.keeps(name)}
        handed: dict[str, Put] = {}
        reshaped: list[str] = []
        for name, raw in raw_names.items():
            value = entries[raw]
            if name in extra:
                saved = extra.pop(name)
                if isinstance(saved, SavedFlattened):
                    self._walk.bind(parameters.get(name, value), saved, name)
                else:
                    handed[raw] = self._walk.bind(ABSENT, saved, name)
            elif not names.keeps(name):
                continue
            elif name not in self._of_modules:
                if id(parameters.get(name)) not in filled:  # tied, and stored under another of its names
                    differences.missing.append(name)
            elif not isinstance(value, torch.Tensor):
                differences.differs(name, f"a tensor in the generation, {kind_of(value)} here")
            elif self._own_loading.may_load_shape(name, *self._walk.stored.tensors[self._of_modules[name]]):
                reshaped.append(raw)
                handed[raw] = self._as_new(value, name)
            elif self._is_handed(value, raw, name, own):
                handed[raw] = self._as_new(value, name)
            self._claimed.add(name)
        differences.unexpected += [name for name in extra if names.keeps(name)]
        followed = path in self._own_loading.modules or any(one._load_state_dict_post_hooks for one in live.modules())
        if not handed and not followed:
            return stays(live)
        return partial(self._load, live, entries, handed, reshaped, path)

    def _is_handed(self, value: torch.Tensor, raw: str, name: str, own: set[Any]) -> bool:
        """Whether a tensor goes through load_state_dict(). If not, it is written in place, or differs."""
        if not subclasses.is_flattenable(value):
            tensors.require_storable(value, name)
        why = self._walk.tensors.difference(value, self._of_modules[name])
        if why and not raw.endswith(_EXTRA_STATE_KEY_SUFFIX):  # which may be of any size
            self._walk.differences.differs(name, why)
            return False
        if not why and tensors.storage(value) in own:
            self._walk.tensors.write(value, self._of_modules[name], name)
            return False
        return True

    def _as_new(self, value: torch.Tensor, name: str) -> Put:
        return self._walk.bind(ABSENT, TensorRef(self._of_modules[name], value.device), name)

    def _load(
        self, live: nn.Module, entries: dict[str, Any], handed: dict[str, Put], reshaped: list[str], path: str
    ) -> nn.Module:
        """Call load_state_dict() with the entries of the live module, in which the handed ones are replaced."""
        step = self._walk.stored.step
        made = {raw: one() for raw, one in handed.items()}
        entries.update({raw: value for raw, value in made.items() if value is not LEFT_OUT})
        with calling(live, path, step):
            live.load_state_dict(entries)
        self._own_loading.require_loaded_shapes(live, {raw: made[raw] for raw in reshaped}, path, step)
        return live
