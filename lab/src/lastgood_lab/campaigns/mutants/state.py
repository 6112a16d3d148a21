"""Safeguards of the live state: what is saved, what is loaded, and in which memory order."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import ADAPTERS, DROP_IN, LAYOUT, LOOP, REQUEST, SAVED_TWICE

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "exempt parameters",
        LOOP,
        (
            "what an optimizer steps is demanded",
            "trained-parameters-not-exempt",
            Swap(" and captured.origins.get(name) is Origin.PARAMETER", ""),
        ),
        ("what was restored as demanded is demanded", "exemption-follows-restore", Swap(", stored", "")),
    ),
    *table(
        "adapters",
        ADAPTERS,
        ("merged adapters are not saved", "merged-adapters-refused-on-save", Swap("layers", "[]")),
        (
            "nothing is loaded into merged adapters",
            "merged-adapters-refused-on-load",
            Swap("adapters.merged(live)", "False"),
        ),
        ("AdaLoRA is not saved without its ranks", "adalora-needs-rank-allocator", Never()),
        ("a change of the active adapter is stored", "active-adapter-change-stored", Never()),
        ("a frozen subclass is looked at by its inner tensors", "frozen-subclass-inner-tensors", Always()),
    ),
    *table(
        "argument checks",
        REQUEST,
        ("state_dict() in the state is refused", "state-dict-snapshots-refused", Remove()),
        ("a number is watched from the beginning", "numbers-tracked-from-start", Swap("in (int, float)", "is float")),
        ("a pattern is checked at the first step", "patterns-checked-at-first-step", Remove()),
        (
            "a pattern for an optimizer's state is not waited for without end",
            "pattern-wait-bounded",
            Swap("self._checks < CHECKS and ", ""),
        ),
        (
            "an optimizer's state may come with its first step",
            "pattern-wait-bounded",
            Swap("self._checks < CHECKS", "False"),
        ),
        ("a pattern that matches on one rank only is right", "pattern-matches-some-rank", Instead("return first")),
        ("a pattern that matches on no rank is refused", "pattern-matches-some-rank", Instead("return []")),
        ("a forgotten restore is known at the first step", "forgotten-restore-refused", Remove()),
        ("every unstorable entry is listed", "unstorable-entries-listed", Swap("len(found) < LISTED", "False")),
        ("the list of them has an end", "unstorable-entries-listed", Swap("len(found) < LISTED", "True")),
        (
            "a part of a run leaves the generators",
            "partial-load-leaves-generators",
            Swap("partial and without_place", "False"),
        ),
        (
            "a misspelt key shows what is there",
            "partial-load-leaves-generators",
            Swap(" and not any(component(key) in missing for key in state)", ""),
        ),
        ("a restore takes no part", "restore-is-never-partial", Swap("False", "True")),
        (
            "generators are loaded with a pattern only if it names them",
            "generators-loaded-only-if-named",
            Swap(', "rng"', ""),
        ),
    ),
    *table(
        "torch DCP storage",
        DROP_IN,
        (
            "the generation that comes with a plan is used once",
            "plan-generation-used-once",
            Swap(", self.at = self.at, None", " = self.at"),
        ),
        (
            "a rank with a kept plan waits for the record of this save",
            "cached-plan-awaits-this-save",
            Swap("newest.order", "newest.order + 1"),
        ),
        ("all ranks have written the generation that is committed", "commit-after-all-ranks-wrote", Never()),
        ("what was planned has been written", "all-planned-items-written", Never()),
        ("a part without elements is not stored", "empty-shard-not-stored", Never()),
        (
            "a tensor without elements is stored all the same",
            "empty-shard-not-stored",
            Swap(" and (0 not in whole or any(box.offsets))", ""),
        ),
        ("one rank records a sharded tensor without elements", "empty-shard-recorded-once", Never()),
    ),
    *table(
        "memory order",
        LAYOUT,
        (
            "bytes of a single element with a stride",
            "single-element-stride-bytes",
            Swap("as_strided((tensor.numel(),), (1,))", "reshape(-1)"),
        ),
        (
            "a dimension of one element comes after others of its stride",
            "unit-dimensions-sort-last",
            Swap("(-stride[at], shape[at] == 1)", "-stride[at]"),
        ),
        ("an expanded tensor counts as row-major", "expanded-counts-as-row-major", Swap(" or 0 in stride", "")),
        (
            "new state has its stored order",
            "new-state-memory-order",
            Swap("and ref.order == order else ref.order", "else ()"),
        ),
        (
            "new state takes the order of its parameter",
            "new-state-memory-order",
            Swap("tensors.order(parameter) if alike and ref.order == order else ", ""),
        ),
        (
            "state that differed from its parameter keeps its order",
            "new-state-memory-order",
            Swap(" and ref.order == order", ""),
        ),
        (
            "live state of another order is replaced",
            "live-memory-order-must-match",
            Instead("fits = live.device == making.device"),
        ),
        ("the order of a parameter is stored", "parameter-order-stored", Swap(", *([[*order]] if order else [])", "")),
        (
            "a plan sees other strides",
            "plan-compares-strides",
            Swap("and (self._strides is None or list(map(_stride, block)) == self._strides[to])", ""),
        ),
        (
            "a plan sees other strides of a parameter",
            "plan-compares-parameter-strides",
            Instead("return kept if same else None"),
        ),
    ),
    *table(
        "step saved twice",
        SAVED_TWICE,
        ("a restored step that is the same is not written again", "unchanged-restore-not-rewritten", Never()),
        (
            "a rewind that is saved at once is durable",
            "rewind-durable-at-once",
            Swap(" and run.known.resumes_at(generation.id)", ""),
        ),
        (
            "values of a restored step are compared",
            "unchanged-restore-compares-all",
            Swap("and _values(captured.values) == _values(manifest.values)", ""),
        ),
        (
            "names of a restored step are compared",
            "unchanged-restore-compares-all",
            Swap(
                "{piece.name for piece in pieces} == {name for name in captured.tensors if not _is_random(name)}",
                "True",
            ),
        ),
        (
            "tensors of a restored step are compared",
            "unchanged-restore-compares-all",
            Swap("and all(_holds(captured, piece, manifest.digest) for piece in pieces)", ""),
        ),
    ),
)
