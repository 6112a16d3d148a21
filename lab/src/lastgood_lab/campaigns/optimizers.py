"""Every available optimizer and learning rate schedule: interrupted and resumed training against uninterrupted.

A trial trains a small network, saves, makes new objects, restores, and trains on. The losses and every tensor of model
and optimizer, with its strides, must equal those of the uninterrupted run bit for bit. Where they differ, the trial is
repeated with `torch.save` of the state_dicts and of the generator's state: what resumes exactly with torch.save must
resume exactly with lastgood. Each optimizer trains a network in the default memory format and one in channels_last. The
libraries are torch.optim and, where they can be imported, pytorch_optimizer and transformers. Writes
lab/reports/optimizers.*

    python -m venv VENV
    VENV/bin/pip install -c constraints.txt -e '.[torch]' -e ./lab pytorch_optimizer einops transformers
    VENV/bin/python -m lastgood_lab.campaigns.optimizers

This takes about a minute on an idle core. Names on the command line select optimizers: then only these are tried, every
outcome is printed, and no report is written.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import io
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import lastgood
from lastgood.errors import LastgoodError, Refused
from lastgood_lab.campaigns.reports import report

BEFORE, AFTER = 12, 13
"""training steps before and after the interruption: more than ten, since some optimizers act at every tenth step"""
ALL = BEFORE + AFTER
LAYOUTS = {"default": torch.contiguous_format, "channels_last": torch.channels_last}

State = dict[str, Any]
Make = Callable[[nn.Module], optim.Optimizer]


class Trial(NamedTuple):
    """The outcome of one optimizer or schedule."""

    library: str
    name: str
    layout: str
    outcome: str
    """exact, refused, differs, fails, "does not train" (even uninterrupted), or "not with torch.save either" """
    detail: str = ""


# ---- training ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two convolutions, of which one has a kernel of one element, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.point, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1), nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.point(self.wide(x).tanh()).flatten(1))


def by_closure(state: State, loss: Callable[[], torch.Tensor], graph: bool = False) -> None:
    """A step with a closure, which most optimizers accept; those that need the loss again call it."""
    optimizer = state["optimizer"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            found = loss()
            found.backward(create_graph=graph)
        return found

    closure()
    optimizer.step(closure)


def plainly(state: State, loss: Callable[[], torch.Tensor]) -> None:
    """A step for optimizers that accept no closure."""
    state["optimizer"].zero_grad()
    loss().backward()
    state["optimizer"].step()


def fused_with_backward(state: State, loss: Callable[[], torch.Tensor]) -> None:
    """A step for LOMO, which updates each parameter as soon as its gradient is computed."""
    state["optimizer"].fused_backward(loss(), 1e-3)


def sparsely(state: State, loss: Callable[[], torch.Tensor]) -> None:
    """A step for SparseAdam, with sparse gradients."""
    state["optimizer"].zero_grad()
    loss().backward()
    for one in state["model"].parameters():
        one.grad = one.grad.to_sparse()
    state["optimizer"].step()


STEPS: tuple[Callable[..., None], ...] = (
    by_closure,
    plainly,
    partial(by_closure, graph=True),
    fused_with_backward,
    sparsely,
)


def constructors(kind: Any) -> Iterator[Make]:
    """The ways to construct an optimizer, the most common first."""
    yield lambda model: kind(model.parameters(), lr=1e-3)
    yield lambda model: kind(model.parameters())
    yield lambda model: kind(model.parameters(), lr=1e-3, num_iterations=ALL)
    yield lambda model: kind(model.parameters(), 1e-3)
    yield lambda model: kind(model.parameters(), lr=1e-3, num_data=4)
    yield lambda model: kind([one for one in model.parameters() if one.dim() == 2], lr=1e-3)
    yield lambda model: kind(by_rank(model), lr=1e-3)
    yield lambda model: kind(model, lr=1e-3)
    yield lambda model: kind(model)
    yield lambda model: kind(optim.AdamW(model.parameters(), 1e-3))
    yield lambda model: kind(model.parameters(), base_optimizer=optim.AdamW, lr=1e-3)
    yield lambda model: kind(model, model.parameters(), optim.AdamW, lr=1e-3)


def by_rank(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, as the optimizers of the Muon family require."""
    wide = [one for one in model.parameters() if one.dim() >= 2]
    flat = [one for one in model.parameters() if one.dim() < 2]
    return [{"params": wide, "use_muon": True}, {"params": flat, "use_muon": False}]


def train(state: State, first: int, last: int, step: Callable[..., None] = plainly) -> list[float]:
    """Train steps `first` to `last`, each on its own batch; returns the loss before each step."""
    losses = []
    for number in range(first, last + 1):
        batch = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(number))

        def loss(batch: torch.Tensor = batch) -> torch.Tensor:
            return state["model"](batch).square().mean()

        losses.append(loss().item())
        step(state, loss)
        if "scheduler" in state:
            of_loss = "metrics" in inspect.signature(state["scheduler"].step).parameters
            state["scheduler"].step(*losses[-1:] if of_loss else ())
    return losses


# ---- one trial ---------------------------------------------------------------------------------------------------


def contents(obj: Any) -> Any:
    """A comparable value, in which the dtype, shape, strides and bytes stand for each tensor."""
    if isinstance(obj, torch.Tensor):
        plain = obj.detach().contiguous().reshape(-1).clone()
        return str(obj.dtype), tuple(obj.shape), obj.stride(), plain.view(torch.uint8).numpy().tobytes()
    if isinstance(obj, dict):
        return {key: contents(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [contents(value) for value in obj]
    return obj if isinstance(obj, (int, float, str, bool)) else None


def snapshot(state: State) -> Any:
    """The contents of every state_dict in a state, and the state of the random number generator."""
    return [contents(one.state_dict()) for one in state.values()], contents(torch.get_rng_state())


def through_torch(straight: State, path: Path) -> Callable[[State], None]:
    """Save with torch.save; the returned function loads the saved state into new objects."""
    file = io.BytesIO()
    torch.save([{key: one.state_dict() for key, one in straight.items()}, torch.get_rng_state()], file)

    def load(fresh: State) -> None:
        file.seek(0)
        saved, generator = torch.load(file, weights_only=False)
        for key, one in fresh.items():
            one.load_state_dict(saved[key])
        torch.set_rng_state(generator)

    return load


def through_lastgood(straight: State, path: Path) -> Callable[[State], None]:
    """Save with lastgood; the returned function restores the saved state into new objects."""
    with lastgood.Checkpointer(path, straight) as ckpt:
        ckpt.save(BEFORE).result()

    def load(fresh: State) -> None:
        with lastgood.Checkpointer(path, fresh) as ckpt:
            ckpt.restore()

    return load


def resumes(make: Callable[[int], State], step: Callable[..., None], through: Callable[..., Any]) -> bool:
    """Whether an interrupted run equals the uninterrupted one bit for bit."""
    straight = make(1)
    train(straight, 1, BEFORE, step)
    with tempfile.TemporaryDirectory() as folder:
        load = through(straight, Path(folder) / "run")
        expected = train(straight, BEFORE + 1, ALL, step), snapshot(straight)
        fresh = make(2)
        load(fresh)
    return (train(fresh, BEFORE + 1, ALL, step), snapshot(fresh)) == expected


def attempt(work: Callable[[], bool]) -> tuple[str, str]:
    """Run a trial; returns (outcome, detail)."""
    try:
        return ("exact", "") if work() else ("differs", "")
    except Refused as error:
        return "refused", first_sentence(error)
    except LastgoodError as error:
        return "fails", first_sentence(error)
    except Exception as error:
        return "fails", f"{type(error).__name__}: {first_sentence(error)}"


def first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.split(". ")[0][:160]


def judged(library: str, name: str, layout: str, make: Callable[[int], State], step: Callable[..., None]) -> Trial:
    """Try lastgood; unless it is exact or refuses the state, try torch.save, too."""
    outcome, detail = attempt(lambda: resumes(make, step, through_lastgood))
    if outcome in ("exact", "refused"):
        return Trial(library, name, layout, outcome, detail)
    other, why = attempt(lambda: resumes(make, step, through_torch))
    if other == "exact":
        return Trial(library, name, layout, outcome, detail or "exact with torch.save")
    return Trial(
        library,
        name,
        layout,
        "not with torch.save either",
        f"lastgood: {outcome}, torch.save: {other}: {why or detail}",
    )


# ---- optimizers --------------------------------------------------------------------------------------------------


def optimizers() -> Iterator[tuple[str, str, Any]]:
    """(library, name, class) of every optimizer."""
    for library in ("torch.optim", "pytorch_optimizer"):
        if (module := imported(library)) is not None:
            kinds = {one for one in vars(module).values() if isinstance(one, type) and issubclass(one, optim.Optimizer)}
            own = (one for one in kinds if one.__module__.startswith(library) and one is not optim.Optimizer)
            yield from ((library, one.__name__, one) for one in sorted(own, key=lambda one: one.__name__))


def imported(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError:
        return None


def fresh(make: Make, layout: torch.memory_format, seed: int) -> State:
    torch.manual_seed(seed)
    model = Net().to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = make(model)
    getattr(optimizer, "train", lambda: None)()  # schedule-free optimizers have a training mode
    return {"model": model, "optimizer": optimizer}


def workable(kind: Any, layout: torch.memory_format) -> tuple[Make, Callable[..., None]]:
    """The first combination of a constructor and a step with which an optimizer changes the parameters.

    If none works, raises the first exception of a step, or, if every construction fails, the first of a construction.
    """
    problems: dict[bool, Exception] = {}
    for make, step in product(constructors(kind), STEPS):
        constructed = False
        try:
            state = fresh(make, layout, 0)
            constructed = True
            before = contents([*state["model"].parameters()])
            train(state, 1, ALL, step)
            if contents([*state["model"].parameters()]) == before:
                raise RuntimeError(f"{ALL} steps change no parameter")
            return make, step
        except Exception as error:
            problems.setdefault(constructed, error)
    raise problems.get(True) or problems[False]


def tried(library: str, name: str, kind: Any) -> Iterator[Trial]:
    """The trials of one optimizer, one for each memory format."""
    for layout, memory_format in LAYOUTS.items():
        try:
            make, step = workable(kind, memory_format)
        except Exception as error:
            detail = f"{type(error).__name__}: {first_sentence(error)}"
            yield Trial(library, name, layout, "does not train", detail)
        else:
            yield judged(library, name, layout, partial(fresh, make, memory_format), step)


# ---- schedules ---------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
    "StepLR": {"step_size": 5},
    "MultiStepLR": {"milestones": [5, 15]},
    "ConstantLR": {"total_iters": 15},
    "LinearLR": {"total_iters": 20},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 20, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 10},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
    "ReduceLROnPlateau": {"patience": 0},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 7},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": ALL + 1},
    "CosineAnnealingWarmupRestarts": {"first_cycle_steps": 10, "warmup_steps": 3},
    "REXScheduler": {"total_steps": ALL},
    "CosineScheduler": {"t_max": ALL, "max_lr": 0.1},
    "LinearScheduler": {"t_max": ALL, "max_lr": 0.1},
    "PolyScheduler": {"t_max": ALL, "max_lr": 0.1},
}


def schedules() -> Iterator[tuple[str, str, Callable[[optim.Optimizer], Any]]]:
    """(library, name, function that makes one for an optimizer) of every learning rate schedule."""
    for name, kind in sorted(vars(lr_scheduler).items()):
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and name.strip("_") != "LRScheduler":
            yield "torch.optim.lr_scheduler", name, partial(torch_schedule, name, kind)
    yield "torch.optim.swa_utils", "SWALR", lambda optimizer: optim.swa_utils.SWALR(optimizer, 0.05)
    if (module := imported("pytorch_optimizer.lr_scheduler")) is not None:
        for name, kind in sorted(vars(module).items()):
            own = getattr(kind, "__module__", "").startswith("pytorch_optimizer.lr_scheduler")
            if own and isinstance(kind, type) and hasattr(kind, "step"):
                yield "pytorch_optimizer", name, partial(torch_schedule, name, kind)
    if imported("transformers") is not None:
        from transformers import SchedulerType

        for one in SchedulerType:
            yield "transformers.get_scheduler", one.value, partial(transformers_schedule, one)


def torch_schedule(name: str, kind: Any, optimizer: optim.Optimizer) -> Any:
    if name == "ChainedScheduler":
        return kind(
            [lr_scheduler.ConstantLR(optimizer, 0.1, 15), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
        )
    if name == "SequentialLR":
        parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 15), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return kind(optimizer, parts, milestones=[14])
    return kind(optimizer, **ARGUMENTS.get(name, {}))


def transformers_schedule(kind: Any, optimizer: optim.Optimizer) -> Any:
    from transformers import get_scheduler

    more = {
        "cosine_with_min_lr": {"min_lr": 1e-4},
        "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
        "warmup_stable_decay": {"num_decay_steps": 5},
    }
    return get_scheduler(
        kind, optimizer, num_warmup_steps=3, num_training_steps=ALL, scheduler_specific_kwargs=more.get(kind.value, {})
    )


def scheduled(make: Callable[[optim.Optimizer], Any], seed: int) -> State:
    state = fresh(lambda model: optim.SGD(model.parameters(), 0.05, momentum=0.9), torch.contiguous_format, seed)
    return {**state, "scheduler": make(state["optimizer"])}


def tried_schedule(library: str, name: str, make: Callable[[optim.Optimizer], Any]) -> Trial:
    try:
        train(scheduled(make, 0), 1, 2)
    except Exception as error:
        return Trial(library, name, "", "does not train", f"{type(error).__name__}: {first_sentence(error)}")
    return judged(library, name, "", partial(scheduled, make), plainly)


# ---- the report --------------------------------------------------------------------------------------------------


def counted(trials: list[Trial]) -> str:
    return ", ".join(f"{outcome} {count}" for outcome, count in Counter(one.outcome for one in trials).most_common())


def table(title: str, trials: list[Trial]) -> str:
    """A table with one row for each distinct outcome of a name."""
    rows = [f"## {title}", "", "| library | name | layout | outcome | |", "|---|---|---|---|---|"]
    for one in trials:
        alike = {other.layout for other in trials if (other[:2], other[3:]) == (one[:2], one[3:])}
        if one.layout == min(alike):
            layout = "all" if alike >= LAYOUTS.keys() else one.layout
            detail = one.detail.replace("|", "\\|")
            rows.append(f"| {one.library} | {one.name} | {layout} | {one.outcome} | {detail} |")
    return "\n".join(rows)


def version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begun, only = time.monotonic(), set(sys.argv[1:])
    kinds = [one for one in optimizers() if not only or one[1] in only]
    of_optimizers = [trial for one in kinds for trial in tried(*one)]
    of_schedules = [] if only else [tried_schedule(*one) for one in schedules()]
    for one in (*of_optimizers, *of_schedules):
        if only or one.outcome not in ("exact", "refused", "does not train"):
            print(*one, sep="  ")
    wrong = [one for one in (*of_optimizers, *of_schedules) if one.outcome in ("differs", "fails")]
    if not only:
        facts = {
            **{
                library.replace("-", "_"): version(library)
                for library in ("torch", "pytorch-optimizer", "transformers")
            },
            "steps": f"{BEFORE} before the interruption, {AFTER} after it",
            "optimizers": f"{len(kinds)}, in {len(LAYOUTS)} layouts: {counted(of_optimizers)}",
            "schedules": f"{len(of_schedules)}: {counted(of_schedules)}",
            "exact_with_torch.save_and_not_here": len(wrong),
            "seconds": round(time.monotonic() - begun),
            "trials": [one._asdict() for one in (*of_optimizers, *of_schedules)],
        }
        title = "Optimizers and schedules, interrupted and resumed"
        report("optimizers", title, facts, [table("Optimizers", of_optimizers), table("Schedules", of_schedules)])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
