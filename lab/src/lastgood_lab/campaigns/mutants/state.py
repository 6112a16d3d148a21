"""Mutants of the safeguards of the live state: which entries are saved and loaded, and in which memory order."""

from __future__ import annotations

from .change import Always, Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import ADAPTERS, DROP_IN, LAYOUT, LOOP, REQUEST, SAVED_TWICE

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "exempt parameters",
        LOOP,
        (
            "a parameter that requires no gradient is exempt even if an optimizer updates it",
            "trained-parameters-not-exempt",
            Swap(" and captured.origins.get(name) is Origin.PARAMETER", ""),
        ),
        (
            "a parameter that was not exempt when it was saved may be exempt afterwards",
            "exemption-follows-restore",
            Swap(", stored", ""),
        ),
    ),
    *table(
        "adapters",
        ADAPTERS,
        ("merged adapters are saved", "merged-adapters-refused-on-save", Swap("layers", "[]")),
        (
            "a state is loaded into merged adapters",
            "merged-adapters-refused-on-load",
            Swap("adapters.merged(live)", "False"),
        ),
        ("AdaLoRA is saved without its rank allocator", "adalora-needs-rank-allocator", Never()),
        ("a change of the active adapter is saved without a refusal", "active-adapter-change-stored", Never()),
        ("a frozen tensor subclass is not examined by its inner tensors", "frozen-subclass-inner-tensors", Always()),
    ),
    *table(
        "argument checks",
        REQUEST,
        ("a state_dict() in the state is accepted", "state-dict-snapshots-refused", Remove()),
        (
            "only floats are tracked from the start, and no integers",
            "numbers-tracked-from-start",
            Swap("in (int, float)", "is float"),
        ),
        ("patterns are not checked at the first step", "patterns-checked-at-first-step", Remove()),
        (
            "a pattern for an optimizer's state is waited for without end",
            "pattern-wait-bounded",
            Swap("self._checks < CHECKS and ", ""),
        ),
        (
            "a pattern for state that comes with the first step is refused at once",
            "pattern-wait-bounded",
            Swap("self._checks < CHECKS", "False"),
        ),
        ("a pattern that matches on one rank only is refused", "pattern-matches-some-rank", Instead("return first")),
        ("a pattern that matches on no rank is accepted", "pattern-matches-some-rank", Instead("return []")),
        ("a forgotten restore is not detected at the first step", "forgotten-restore-refused", Remove()),
        (
            "only the first unstorable entry is listed",
            "unstorable-entries-listed",
            Swap("len(found) < LISTED", "False"),
        ),
        (
            "the list of unstorable entries has no limit",
            "unstorable-entries-listed",
            Swap("len(found) < LISTED", "True"),
        ),
        (
            "a load of a part of a run refuses the entries that it leaves out",
            "partial-load-leaves-generators",
            Swap("partial and without_place", "False"),
        ),
        (
            "a load with a misspelt key leaves out the entries that it should list",
            "partial-load-leaves-generators",
            Swap(" and not any(component(key) in missing for key in state)", ""),
        ),
        ("a restore counts as a partial load", "restore-is-never-partial", Swap("False", "True")),
        (
            "a pattern loads generators that it does not name",
            "generators-loaded-only-if-named",
            Swap(', "rng"', ""),
        ),
    ),
    *table(
        "torch DCP storage",
        DROP_IN,
        (
            "a reused plan writes to the generation of an earlier save",
            "plan-generation-used-once",
            Swap(", self.at = self.at, None", " = self.at"),
        ),
        (
            "a rank with a cached plan waits for the record of a later save",
            "cached-plan-awaits-this-save",
            Swap("newest.order", "newest.order + 1"),
        ),
        ("the metadata of an imported folder reads any attribute", "metadata-reads-no-attribute", Never()),
        ("a save is committed although a rank wrote another generation", "commit-after-all-ranks-wrote", Never()),
        ("a save is committed although planned items were not written", "all-planned-items-written", Never()),
        ("a shard without elements is stored", "empty-shard-not-stored", Never()),
        (
            "a whole tensor without elements is not stored",
            "empty-shard-not-stored",
            Swap(" and (0 not in whole or any(box.offsets))", ""),
        ),
        ("a sharded tensor without elements is not recorded", "empty-shard-recorded-once", Never()),
    ),
    *table(
        "memory order",
        LAYOUT,
        ("an optimizer in a list is not completed from other ranks", "lists-completed", Instead("return tree")),
        (
            "the bytes of a single element with a stride are taken with reshape",
            "single-element-stride-bytes",
            Swap("as_strided((tensor.numel(),), (1,))", "reshape(-1)"),
        ),
        (
            "a dimension of one element may come before others of its stride",
            "unit-dimensions-sort-last",
            Swap("(-stride[at], shape[at] == 1)", "-stride[at]"),
        ),
        (
            "an expanded tensor takes its memory order from its strides",
            "expanded-counts-as-row-major",
            Swap(" or 0 in stride", ""),
        ),
        (
            "new state is row-major instead of in its stored order",
            "new-state-memory-order",
            Swap("and ref.order == order else ref.order", "else ()"),
        ),
        (
            "new state does not take the order of its parameter",
            "new-state-memory-order",
            Swap("tensors.order(parameter) if alike and ref.order == order else ", ""),
        ),
        (
            "state with another order than its parameter's takes that of the parameter",
            "new-state-memory-order",
            Swap(" and ref.order == order", ""),
        ),
        (
            "live state in another memory order is not replaced",
            "live-memory-order-must-match",
            Instead("fits = live.device == making.device"),
        ),
        (
            "the memory order of a parameter is not stored",
            "parameter-order-stored",
            Swap(", *([[*order]] if order else [])", ""),
        ),
        (
            "a plan is used although strides have changed",
            "plan-compares-strides",
            Swap("and (self._strides is None or list(map(_stride, block)) == self._strides[to])", ""),
        ),
        (
            "a plan is used although strides of a parameter have changed",
            "plan-compares-parameter-strides",
            Instead("return kept if same else None"),
        ),
    ),
    *table(
        "tensors that share memory",
        ("restore",),
        ("they are read into the same memory at once", "overlapping-tensors-not-in-place", Instead("pass")),
    ),
    *table(
        "chunks in place",
        ("in_place",),
        (
            "a chunk is read in place before any was good",
            "first-chunk-through-buffer",
            Swap(" and self._delivered", ""),
        ),
    ),
    *table(
        "step saved twice",
        SAVED_TWICE,
        ("a saved step that cannot be read ends the loop", "unread-step-does-not-end-loop", Instead("raise")),
        (
            "a restored step that cannot be read ends the loop",
            "unread-restored-step-saved-again",
            Swap("Damaged, NotWritable, Unavailable", "Damaged"),
        ),
        ("a restored step is written again although it is unchanged", "unchanged-restore-not-rewritten", Never()),
        (
            "a save right after a rewind does not make the rewind durable",
            "rewind-durable-at-once",
            Swap(" and run.known.resumes_at(generation.id)", ""),
        ),
        (
            "a restored step counts as unchanged although values differ",
            "unchanged-restore-compares-all",
            Swap("and _values(captured.values) == _values(manifest.values)", ""),
        ),
        (
            "a restored step counts as unchanged although names differ",
            "unchanged-restore-compares-all",
            Swap(
                "{piece.name for piece in pieces} == {name for name in captured.tensors if not _is_random(name)}",
                "True",
            ),
        ),
        (
            "a restored step counts as unchanged although tensors differ",
            "unchanged-restore-compares-all",
            Swap("and all(_holds(captured, piece, manifest.digest) for piece in pieces)", ""),
        ),
    ),
    *table(
        "arguments",
        ("arguments", "paths"),
        ("metrics in its place make a milestone", "milestone-is-true-or-false", Remove()),
        ("a run is made within another one", "no-run-within-a-run", Never()),
    ),
)
