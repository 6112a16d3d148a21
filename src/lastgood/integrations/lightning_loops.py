"""Parts of a Lightning training that its integration reads and sets by their attributes: loops and torchmetrics."""

from __future__ import annotations

from typing import Any

# ---- Lightning's loops -----------------------------------------------------------------------------------------


def set_counters(loop: Any, saved: dict[str, Any], prefix: str = "") -> None:
    """Set the progress counters of a loop and of the loops inside of it."""
    loop._load_from_state_dict(saved, prefix)
    for name, inner in _inner_loops(loop).items():
        set_counters(inner, saved, f"{prefix}{name}.")


def forget_restart(loop: Any) -> None:
    """Clear the flags of a restart in a loop and in the loops inside of it."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for inner in _inner_loops(loop).values():
        forget_restart(inner)


def _inner_loops(loop: Any) -> dict[str, Any]:
    return {name: one for name, one in vars(loop).items() if hasattr(one, "_load_from_state_dict")}


# ---- torchmetrics ----------------------------------------------------------------------------------------------


def read_metric(metric: Any) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {"states": states, "updates": metric._update_count}


def write_metric(metric: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.get("states", {}).items():
        setattr(metric, name, value)
    metric._update_count = saved.get("updates", 0)
