"""What Puts do: refill live containers, or make new ones."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import Any

import torch
from torch import nn

from ..format.values import LEFT_OUT
from .binding import ABSENT, Put


def stays(live: Any) -> Put:
    """The live object remains as it is; where there is none, nothing is put."""
    return partial(_itself, LEFT_OUT if live is ABSENT else live)


def _itself(obj: Any) -> Any:
    return obj


def refill(live: Any, content: Any) -> Any:
    """Replace the content of a dict, set, counter or bytearray."""
    live.clear()
    (live.extend if isinstance(live, bytearray) else live.update)(content)
    return live


def empty(saved: Any) -> Any:
    """A new container of the kind of a stored one."""
    if type(saved) is deque:
        return deque(maxlen=saved.maxlen)
    return defaultdict(saved.default_factory) if type(saved) is defaultdict else type(saved)()


def refill_sequence(live: Any, content: Put) -> Any:
    """Replace the content of a list or deque; for a tuple that would change, return a new one."""
    items = [None if item is LEFT_OUT else item for item in content()]
    if type(live) is list:
        live[:] = items
        return live
    if type(live) is deque:
        live.clear()
        live.extend(items)
        return live
    same = len(items) == len(live) and all(one is other for one, other in zip(items, live, strict=True))
    return live if same else tuple(items)


def set_entry(entries: Any, key: Any, put: Put) -> None:
    """Set one entry of a dict, unless it is left out."""
    if (made := put()) is not LEFT_OUT:
        entries[key] = made


def set_or_clear(entries: Any, key: Any, put: Put) -> None:
    """Set one entry of a dict, or remove it if it would be empty."""
    made = put()
    if made is LEFT_OUT or made == {}:
        entries.pop(key, None)
    else:
        entries[key] = made


def replace_entries(entries: Any, before: set[Any], put: Put) -> None:
    """Replace the entries `before` of a dict."""
    made = put()
    for key in before - made.keys():
        del entries[key]
    entries.update(made)


def formed(made: torch.Tensor, is_parameter: bool, wants_grad: bool) -> torch.Tensor:
    """A new tensor as a Parameter, or with the gradient flag that was stored."""
    if is_parameter:
        return nn.Parameter(made, requires_grad=wants_grad)
    return made.detach().requires_grad_() if wants_grad else made


def kind_of(obj: Any) -> str:
    """The name of a class, for reports of differences."""
    return type(obj).__qualname__
