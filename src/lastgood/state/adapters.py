"""Adapters: what a PEFT model keeps beside its weights. PEFT's own classes identify it, if PEFT is imported at all.

Three things are not in `state_dict()`. A restore without them would continue another training without any error:

- A merged adapter. `merge_adapter()` adds it to the weights of its base layer, and only an attribute records this. A
  merged model is not saved, and no generation is loaded into one.
- Which adapters are active, as `set_adapter()` changes it.
- AdaLoRA's running averages of the importance of each LoRA rank, and which of these ranks it has pruned.

`Adapters` is an entry of the state that stores the last two. A save without it is refused if it would lose them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import Refused
from ..format.values import Filter, refusal
from .objects import find_objects

_TUNERS = "peft.tuners.tuners_utils"
_RANKS = ("ipt", "exp_avg_ipt", "exp_avg_unc")
"""attributes of AdaLoRA's rank allocator: name of a parameter -> tensor"""
_REMEDY = 'Add an entry to the state: "adapters": lastgood.integrations.peft.Adapters(model)'


class Adapters:
    """An entry of the state that stores which adapters of a PEFT model are active, and AdaLoRA's importance of ranks.

    `model`: the model that `get_peft_model()` returned, or a model of transformers after `model.add_adapter()`. The
    entry is needed if `set_adapter()` is called during the training, and for AdaLoRA:

        model = get_peft_model(base, config)
        state = {"model": model, "adapters": lastgood.integrations.peft.Adapters(model), "optimizer": optimizer}

    A restore activates the adapters of the restored step, as `model.set_adapter()` does. Raises Refused for a model
    that has no adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        if not _has_adapters(model):
            raise Refused(
                f"Adapters was given a {type(model).__qualname__}, which has no adapters",
                safe="Nothing was touched.",
                todo="Give it the model that get_peft_model() returned.",
            )
        self._model: Any = model

    def state_dict(self) -> dict[str, Any]:
        """The names of the active adapters; for AdaLoRA also its averages and its pattern of ranks."""
        allocator = rank_allocator(self._model)
        if allocator is None:
            return {"active": self._active()}
        ranks = {name: getattr(allocator, name) for name in _RANKS}
        return {"active": self._active(), "ranks": ranks, "pattern": allocator.peft_config.rank_pattern}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Activate the adapters, and restore the data of AdaLoRA. What `saved` lacks stays as it is."""
        active = saved.get("active", self._active())
        if active != self._active():
            several = (
                self._model.base_model if _is_peft_model(self._model) else self._model
            )  # PeftModel accepts only one
            if len(active) == 1:
                self._model.set_adapter(active[0])
            else:
                several.set_adapter(active)
        allocator = rank_allocator(self._model)
        if allocator is not None:
            vars(allocator).update(saved.get("ranks", {}))
            allocator.peft_config.rank_pattern = saved.get("pattern", allocator.peft_config.rank_pattern)

    def _active(self) -> list[str]:
        names = self._model.active_adapters
        return [*(names() if callable(names) else names)]


class Watch:
    """Watches the PEFT models of a state from save to save."""

    def __init__(self) -> None:
        self._active: dict[str, set[str]] = {}  # path of a model -> the active adapters at its first save

    def require_storable(self, state: Mapping[str, Any], names: Filter) -> None:
        """Raises Unstorable, by name, for a model of which a save would lose something."""
        if _TUNERS not in sys.modules:
            return
        objects = {path: one for path, one in find_objects(state).items() if names.enters(path)}
        complete = any(isinstance(one, Adapters) for one in objects.values())
        for path, module in objects.items():
            layers = [*_layers(module)] if isinstance(module, nn.Module) else []
            if found := _merged(layers):  # guard: merged-adapters-refused-on-save
                remedy = "Save before merge_adapter(), after unmerge_adapter(), or what merge_and_unload() returned"
                raise refusal(path, f"has adapters merged into its weights ({found})", remedy)
            if complete or not layers:
                continue
            if rank_allocator(module) is not None:  # guard: adalora-needs-rank-allocator
                raise refusal(path, "is an AdaLoRA model, whose importance of ranks is not in its weights", _REMEDY)
            active = {name for layer in layers for name in layer.active_adapters}
            if active != self._active.setdefault(path, active):  # guard: active-adapter-change-stored
                what = "has other active adapters than in its first save, and a restore would not activate them"
                raise refusal(path, what, _REMEDY)


def adapters_entry(module: nn.Module) -> dict[str, Adapters]:
    """The entry that an integration must add to its state beside a module; empty if the module needs none."""
    names = {name for layer in _layers(module) for name in layer._all_available_adapter_names()}
    if len(names) < 2 and rank_allocator(module) is None:
        return {}
    models = [one for one in module.modules() if _has_adapters(one)]
    return {"adapters": Adapters(models[0])} if models else {}


def merged(module: nn.Module) -> str:
    """The names of the adapters that are merged into the weights of a module; empty if none is."""
    return _merged(_layers(module))


def rank_allocator(module: nn.Module) -> Any:
    """The rank allocator of an AdaLoRA model; None for any other."""
    return next((vars(one)["rankallocator"] for one in module.modules() if "rankallocator" in vars(one)), None)


def _layers(module: nn.Module) -> Iterator[Any]:
    """The layers of a module that hold adapters."""
    if _TUNERS in sys.modules:
        kind = sys.modules[_TUNERS].BaseTunerLayer
        yield from (one for one in module.modules() if isinstance(one, kind))


def _is_peft_model(module: nn.Module) -> bool:
    return _TUNERS in sys.modules and isinstance(module, sys.modules["peft"].PeftModel)


def _has_adapters(module: nn.Module) -> bool:
    """Whether this is a module whose `set_adapter()` chooses the active adapters of its layers."""
    if _is_peft_model(module):
        return True
    layers = [*_layers(module)]
    return bool(layers) and layers[0] is not module and callable(getattr(module, "set_adapter", None))


def _merged(layers: Iterable[Any]) -> str:
    return ", ".join(sorted({name for layer in layers for name in layer.merged_adapters}))
