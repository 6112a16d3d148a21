"""Sentinel: what a `Checkpointer` looks at to notice that training diverges. Looks at nothing itself (sentinel.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ..policy.arguments import is_positive, is_whole, require


@dataclass(frozen=True, kw_only=True)
class Sentinel:
    """What is looked at in the `metrics` of each `step(n, metrics=...)`: `Checkpointer(..., sentinel=Sentinel())`.

    `every`: the ranks compare every so many steps (default 10), and wait for their devices then; a single process reads
    a CUDA device one step later, without a wait. `loss`: name of the metric that must be finite, a number or a tensor
    without a dimension, on any device (default "loss"; None: none).
    `grad_norm`: another one (default None: none). `spike`: a metric may be at most mean + (spike - 1) * |mean|,
    which is spike * mean for a positive one, once 20 steps have given a running mean (default None: no limit).
    `at_most`: how often training may diverge in the life of the run until no more batches are left out (default 10).
    Raises Refused for values that cannot be meant.

        sentinel = lastgood.Sentinel(every=20, grad_norm="grad_norm", spike=10)
        with lastgood.Checkpointer("run", state, sentinel=sentinel) as ckpt:
            ...
            ckpt.step(n, metrics={"loss": loss.detach(), "grad_norm": norm})
    """

    every: int = 10
    loss: str | None = "loss"
    grad_norm: str | None = None
    spike: float | None = None
    at_most: int = 10

    def __post_init__(self) -> None:
        for name in ("every", "at_most"):
            value = getattr(self, name)
            require(is_whole(value, 1), f"Sentinel({name}={value!r})", "Give a whole number of at least 1.")
        require(bool(self.names), "Sentinel(loss=None, grad_norm=None)", "Name a metric.")
        for name in self.names:
            require(isinstance(name, str) and bool(name), f"Sentinel: {name!r} is no name of a metric", "Give a text.")
        require(
            self.spike is None or (is_positive(self.spike) and self.spike > 1),
            f"Sentinel(spike={self.spike!r})",
            "Give a factor above 1, or None.",
        )

    @property
    def names(self) -> list[str]:
        """The metrics that are looked at."""
        return [one for one in (self.loss, self.grad_norm) if one is not None]
