"""Match: whether a generation fits the live state, and how it is written there. See state/rules.py for the rules.

    decode every value -> bind each live object to what is stored for it -> a Match, with all differences
                          Match.apply: verify all tensors, write all tensors, then objects, generators last

Nothing live is written before `Match.apply`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import LoadFailed, Refused, StateMismatch
from ..format.encodings import need
from ..format.values import Filter, component
from ..run.content import Content, ReadSettings
from .binder import Binder
from .binding import ABSENT, Put
from .capture import require_keys, wanted
from .decode import SavedObject, Stored, TensorRef, read_values
from .objects import load_rng, modules_of, rng_differs
from .rename import Rename
from .tensor_sink import Take, TensorSink
from .tensors import dtype_of


class Match:
    """How a generation goes into a live state, and every difference between the two. `apply` writes it there."""

    def __init__(
        self,
        state: MutableMapping[str, Any],
        stored: Stored,
        plan: Binder,
        puts: list[tuple[str, Put]],
        strict: bool,
        unused: list[str],
    ) -> None:
        self._state, self._stored, self._puts, self._last, self._strict = state, stored, puts, plan.last, strict
        self._unused = unused  # rules of a rename that rename nothing, for the error
        self._differences, self._tensors = plan.differences, plan.tensors
        self._sink = TensorSink(stored.tensors, plan.tensors.places, plan.tensors.takers, plan.tensors.boxed)
        self.unexpected = plan.differences.unexpected
        """stored names that have no place in this state; the caller removes those that have one on another rank"""

    @property
    def begun(self) -> bool:
        """Whether `apply` has begun to write."""
        return self._sink.begun

    @property
    def bytes(self) -> int:
        """How many bytes of the generation go into this state."""
        return self._checks().bytes

    def chunks_wanted(self, content: Content, rank: int) -> dict[str, list[int]]:
        """As `Content.chunks_wanted`, of what goes into this state."""
        return content.chunks_wanted(self._checks(), rank)

    @property
    def skipped(self) -> list[str]:
        """Everything that does not fit, each with the reason."""
        missing = [f"{name}: missing in the generation" for name in self._differences.missing]
        unexpected = [f"{name}: unexpected in the generation" for name in self.unexpected]
        return missing + unexpected + self._differences.mismatched

    def require_fit(self) -> None:
        """Raises StateMismatch with every difference, unless strict=False was asked for."""
        if self._strict and self.skipped:
            missing, mismatched = self._differences.missing, self._differences.mismatched + self._unused
            raise StateMismatch(self._stored.step, missing, self.unexpected, mismatched)

    def apply(self, content: Content, settings: ReadSettings, verify_first: bool = True) -> None:
        """Write everything that fits into the live state, the random number generators last.

        With `verify_first` the tensors are read twice: once to verify them, and again to write them. What is raised the
        first time leaves the live state untouched. Without it they are read once, except where a live tensor is
        expanded (one element in memory for many): such a tensor is checked first, and raises StateMismatch if it would
        have to hold different elements.
        """
        if verify_first or self._tensors.checks:
            content.read_into(self._checks(), settings)
            if self._tensors.conflicts:
                raise StateMismatch(self._stored.step, [], [], self._tensors.conflicts)
        self._tensors.make_new()
        comparisons = self._tensors.comparisons()
        self._sink.in_place = not comparisons  # guard: overlapping-tensors-not-in-place
        self._sink.begin()
        content.read_into(self._sink, settings)
        self._sink.begun = True  # there may be no tensor, and values are written too
        self._compare_overlapping(comparisons, content, settings)
        for key, put in self._puts:
            made = put()
            if made is not self._state[key]:
                self._state[key] = made
        for act in self._last:
            act()

    def _compare_overlapping(
        self, comparisons: Mapping[str, Sequence[Take]], content: Content, settings: ReadSettings
    ) -> None:
        """Raises LoadFailed if live tensors share a part of their memory, and the stored ones differ there."""
        if comparisons:
            content.read_into(TensorSink(self._stored.tensors, {}, comparisons, self._tensors.boxed), settings)
            if changed := sorted(self._tensors.overwritten):
                raise LoadFailed(
                    f"step {self._stored.step} does not fit in {', '.join(changed)}: another live tensor shares a part "
                    "of this memory, and has other bytes there in the generation",
                    safe="\nThe generations are untouched. The live state is part of that step: do not train on it.",
                    todo="Build the state anew, with tensors of their own, and restore again.",
                )

    def _checks(self) -> TensorSink:
        """A sink that wants everything, tensors that are made later included, and writes nothing."""
        wanted = dict.fromkeys(self._tensors.targets, ())  # guard: new-tensors-verified-first
        return TensorSink(self._stored.tensors, wanted, self._tensors.checks, self._tensors.boxed)


def match(
    state: MutableMapping[str, Any],
    stored: Stored,
    *,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    partial: bool = False,
) -> Match:
    """Match `stored` with the live state. Touches nothing.

    `strict`: whether a difference is an error (`Match.require_fit`), or is skipped. `rename`: stored name -> live name;
    both are exact names, or both prefixes that end in ".". `include`, `exclude`: name patterns; what they leave out is
    not required and stays as it is. `partial`: the state may lack top-level entries of the generation; where it does,
    the random number generators stay as they are. Raises ManifestInvalid for malformed values, Unstorable for live
    tensors that cannot be written, Refused for a state or a `rename` that makes no sense.
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
    renaming, names = Rename(rename or {}), wanted(include, exclude)
    for name, (dtype, _) in stored.tensors.items():
        if names.keeps(name):
            dtype_of(dtype)
    values, referenced = read_values(stored)
    of_modules = renaming.names(name for name in stored.tensors if name not in referenced)
    plan = Binder(stored, of_modules, names, renaming, modules_of(state))
    puts, without_place = _bind_entries(plan, state, values, renaming, names)
    missing = plan.differences.missing
    # guard: partial-load-leaves-generators
    if partial and without_place and not any(component(key) in missing for key in state):  # a key may be misspelt
        plan.differences.leave_out(without_place)
    else:
        for path in without_place:
            plan.differences.has_no_place(path)
        _bind_rng(plan, values, stored, names)
    plan.modules.note_unclaimed()
    return Match(state, stored, plan, puts, strict, renaming.unused([*stored.tensors, *values]))


def _bind_entries(
    plan: Binder, state: Mapping[str, Any], values: dict[str, Any], renaming: Rename, names: Filter
) -> tuple[list[tuple[str, Put]], list[str]]:
    """How each entry of the state is written, and the entries of the generation that it has no place for."""
    entries = renaming.entries(name for name in values if name != "rng")
    puts = []
    for key, live in state.items():
        path = component(key)
        saved = values[entries.pop(path)] if path in entries else ABSENT
        if saved is ABSENT and isinstance(live, nn.Module) and plan.modules.offers_below(path):
            saved = SavedObject("!module", {})  # its tensors were stored under another entry, and are renamed
        if saved is not ABSENT:
            puts.append((key, plan.bind(live, saved, path)))
        elif names.keeps(path):
            plan.differences.missing.append(path)
    return puts, list(entries)


def _bind_rng(plan: Binder, values: dict[str, Any], stored: Stored, names: Filter) -> None:
    if "rng" not in values:
        if names.keeps("rng"):
            plan.differences.missing.append("rng")
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
        plan.differences.mismatched += [f"rng.{part}: {why}" for part, why in reasons.items()]
        put = plan.bind(ABSENT, {part: one for part, one in saved.items() if part not in reasons}, "rng")
        plan.last.append(lambda: load_rng(put()))


def _is_rng_state(saved: Any, stored: Stored) -> bool:
    return isinstance(saved, TensorRef) and stored.tensors[saved.name][0] == "uint8"
