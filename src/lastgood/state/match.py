"""Match: whether a generation fits the live state, and how it goes there. See state.py for the rules.

    read every value -> bind each live thing to what is stored for it -> all differences at once, or a Match
                          Match.apply: look at all tensors, write all tensors, then objects, RNG last

Nothing live is written before `Match.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import Refused, StateMismatch
from ..format.encodings import need
from ..format.values import Filter, component
from .binder import ABSENT, Binder, Put
from .capture import require_keys, wanted
from .decode import SavedObject, Stored, TensorRef, read_values
from .objects import load_rng, modules_of, rng_differs
from .tensor_sink import Filling
from .tensors import dtype_of


class Match:
    """A generation that fits; `apply` puts it into the live state."""

    def __init__(self, state: MutableMapping[str, Any], stored: Stored, plan: Binder, puts: list[tuple[str, Put]]):
        self._state, self._stored, self._plan, self._puts = state, stored, plan, puts
        self._written = Filling(stored.tensors, plan.places, plan.takers, plan.boxed)
        self.skipped = plan.differences()
        """with strict=False: what did not fit, each with the reason"""

    @property
    def begun(self) -> bool:
        """Whether `apply` has begun to write."""
        return self._written.begun

    @property
    def bytes(self) -> int:
        """What of the generation is wanted here."""
        return self._written.bytes

    def apply(self, feed: Callable[[Filling], None], look_first: bool = True) -> None:
        """Write everything into the live state, the random number generators last.

        `feed(sink)` reads what is wanted, and hands it to the sink. It is called once to look, and again to write: what
        it raises the first time, and the StateMismatch where a live tensor that is expanded (one element in memory for
        many) would have to take different ones, leave the live state untouched. Without `look_first` it is called
        once, where there is nothing expanded to be looked at.
        """
        if look_first or self._plan.checks:
            looking = Filling(self._stored.tensors, {}, self._plan.checks, self._plan.boxed)
            feed(looking)
            if self._plan.conflicts:
                raise StateMismatch(self._stored.step, [], [], self._plan.conflicts)
        self._plan.make_new()
        self._written.begin()
        feed(self._written)
        self._written.begun = True  # there may be no tensor, and values are written too
        for key, put in self._puts:
            made = put()
            if made is not self._state[key]:
                self._state[key] = made
        for act in self._plan.last:
            act()


def match(
    state: MutableMapping[str, Any],
    stored: Stored,
    *,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    nowhere: Callable[[list[str]], list[str]] = list,
    partial: bool = False,
) -> Match:
    """How `stored` goes into the live state. Touches nothing.

    Raises StateMismatch with all that is missing, unexpected or different; with strict=False that is skipped, and
    listed. `rename`: stored name -> live name, exact or both prefixes that end in ".". `include`, `exclude`: what is
    not wanted is not demanded and stays as it is. `nowhere`: of what this state has no place for, and other processes
    may have, what they have not either. `partial`: the state may lack top-level entries of the generation; where it
    does, the random number generators stay as they are. Raises ManifestInvalid for malformed values, Unstorable for
    live tensors that cannot be written, Refused for a state or a `rename` that makes no sense.
    """
    if not isinstance(state, MutableMapping):
        raise Refused(f"the state is a {type(state).__name__}, which cannot be written to", todo="Pass a dict.")
    if partial and not state:
        raise Refused(
            "the state is empty, and would take nothing of the generation",
            safe="Nothing was touched.",
            todo='Name what is wanted: {"model": model}; or leave the state out, and get a dict of everything.',
        )
    require_keys(state)
    moved, names = Rename(rename or {}), wanted(include, exclude)
    for name, (dtype, _) in stored.tensors.items():
        if names.keeps(name):
            dtype_of(dtype)
    values, referenced = read_values(stored)
    offered = moved.all((name for name in stored.tensors if name not in referenced), moved)
    plan = Binder(stored, offered, names, moved, modules_of(state))
    puts, others = _bind_entries(plan, state, values, moved, names)
    # guard: partial-load-leaves-generators
    if partial and others and not any(component(key) in plan.missing for key in state):  # a key may be misspelt
        plan.leave_out(others)
    else:
        for path in others:
            plan.has_no_place(path)
        _bind_rng(plan, values, stored, names)
    plan.note_unclaimed()
    plan.unexpected = nowhere(plan.unexpected)
    if strict and plan.differences():
        raise StateMismatch(stored.step, plan.missing, plan.unexpected, plan.mismatched)
    return Match(state, stored, plan, puts)


def _bind_entries(
    plan: Binder, state: Mapping[str, Any], values: dict[str, Any], moved: Rename, names: Filter
) -> tuple[list[tuple[str, Put]], list[str]]:
    """The Puts of the state, and the entries of the generation that it has no place for."""
    entries = moved.all((name for name in values if name != "rng"), moved.key)
    puts = []
    for key, live in state.items():
        path = component(key)
        saved = values[entries.pop(path)] if path in entries else ABSENT
        if saved is ABSENT and isinstance(live, nn.Module) and plan.offers_below(path):
            saved = SavedObject("!module", {})  # its tensors were elsewhere, and are renamed
        if saved is not ABSENT:
            puts.append((key, plan.bind(live, saved, path)))
        elif names.keeps(path):
            plan.missing.append(path)
    return puts, list(entries)


def _bind_rng(plan: Binder, values: dict[str, Any], stored: Stored, names: Filter) -> None:
    if "rng" not in values:
        if names.keeps("rng"):
            plan.missing.append("rng")
        return
    saved = values["rng"]
    need(type(saved) is dict, "rng")
    if names.enters("rng"):
        reasons = rng_differs(saved)
        cpu, cuda = saved.get("torch"), saved.get("cuda", [])
        need("torch" not in saved or _is_rng_state(cpu, stored), "rng.torch")
        need(type(cuda) is list and all(one is None or _is_rng_state(one, stored) for one in cuda), "rng.cuda")
        if cpu is not None and stored.tensors[cpu.name][1] != torch.get_rng_state().shape:
            reasons["torch"] = "the generator state of another version of torch"
        plan.mismatched += [f"rng.{part}: {why}" for part, why in reasons.items()]
        put = plan.bind(ABSENT, {part: one for part, one in saved.items() if part not in reasons}, "rng")
        plan.last.append(lambda: load_rng(put()))


def _is_rng_state(saved: Any, stored: Stored) -> bool:
    return isinstance(saved, TensorRef) and stored.tensors[saved.name][0] == "uint8"


class Rename:
    """Stored names to live ones: an exact rule, else the one with the longest prefix, else the name itself."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        for old, new in rules.items():
            if old.endswith(".") != new.endswith("."):
                raise Refused(f"rename {old!r} -> {new!r}: a prefix and a name", todo='Let both end in ".", or none.')
        self._rules = rules
        self._prefixes = sorted((old for old in rules if old.endswith(".")), key=len, reverse=True)

    def __call__(self, name: str) -> str:
        if name in self._rules:
            return self._rules[name]
        prefix = next((one for one in self._prefixes if name.startswith(one)), None)
        return name if prefix is None else self._rules[prefix] + name[len(prefix) :]

    def key(self, name: str) -> str:
        """The name of a top-level entry: a rule for `name.` speaks of it too."""
        return self._rules.get(name) or self._rules.get(f"{name}.", f"{name}.")[:-1]

    def all(self, names: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
        """Live name -> stored name. Raises Refused when two become one."""
        renamed: dict[str, str] = {}
        for old in names:
            new = rename(old)
            if new in renamed:
                raise Refused(f"rename makes {new} of both {renamed[new]} and {old}", safe="Nothing was touched.")
            renamed[new] = old
        return renamed
