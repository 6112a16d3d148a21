"""Tiers of a run, as the user gives them: further places above the durable one, and when each is due.

`Tier` is one entry of `Checkpointer(tiers=[...])`. `PlaceCadence` decides when a copy to a place is due. Neither reads
nor writes anything; run/places.py opens the places.
"""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from ..format import parity_layout
from ..policy.arguments import is_whole, require
from ..policy.cadence import Every
from ..policy.retention import KEEP, Keep
from ..run import memory_place, paths
from ..run.save_handle import Save


@dataclass(frozen=True)
class Tier:
    """A place of a run above its durable place, such as a local disk in front of an object store.

    `url`: a directory, `slots:///...`, `s3://`, `gs://` or `az://`; not that of another place of the run. "memory://",
    for the first tier only, is the memory of each machine (docs/agent.md): its saves outlive the training process, not
    the machine.
    `cadence`: when `step()` saves here; default None: the first tier as the run, a further one each save of the first
    place. "auto": as often as it pays, by what saves to this place cost, and by the failures that the places above do
    not survive.
    `retention`: which generations are kept here; default Keep(last=3), in memory Keep(last=1).
    `parity`: as that of a Checkpointer; default None: no parity. In memory, and with shared=False, parity="4+2" is kept
    among nodes: the loss of any two of them loses nothing that is protected, and it takes half as much as each node's
    part. With fewer than six nodes three copies are made instead, which is reported.
    `shared`: whether all nodes see this place; False, for the first tier only: each node has a directory of its own
    under this path, for the files of its ranks; default True.
    `copies`: on how many nodes each file lies, in memory and with shared=False; default 1: on the node of its rank.
    With 2, a lost node loses nothing that was copied. `spread`: copies, and chunks that share parity, lie in different
    failure domains of this kind: spread="rack" reads the label of each node from LASTGOOD_RACK; default None: on any
    other nodes.
    Raises Refused for other values.

        tiers=[lastgood.Tier("/nvme/gpt", cadence=lastgood.Every(steps=100), retention=lastgood.Keep(last=2))]
    """

    url: str | os.PathLike[str]
    _: KW_ONLY
    cadence: Every | Literal["auto"] | None = None
    retention: Keep = KEEP
    parity: str | None = None
    copies: int = 1
    spread: str | None = None
    shared: bool = True

    def __post_init__(self) -> None:
        require(
            is_whole(self.copies, 1) and (self.copies == 1 or self.node_local),
            f"Tier({self.url!r}, copies={self.copies!r})",
            'Give a whole number of nodes, for "memory://" or with shared=False.',
        )
        require(
            self.copies == 1 or self.parity is None,
            f"Tier({self.url!r}, copies={self.copies}, parity={self.parity!r})",
            "Give one of both: parity among nodes takes the place of copies.",
        )
        among_nodes = self.copies > 1 or self.node_parity is not None
        require(
            self.spread is None or (isinstance(self.spread, str) and self.spread.isidentifier() and among_nodes),
            f"Tier(spread={self.spread!r}) with copies={self.copies!r} and parity={self.parity!r}",
            'Give the name of a failure domain such as "rack", with copies of at least 2 or with parity among nodes.',
        )
        require(isinstance(self.shared, bool), f"Tier(shared={self.shared!r})", "Give True or False.")
        meant = str(self.url).rstrip("/").rstrip(":") == "memory" or str(self.url).startswith("memory:")
        require(
            self.in_memory or not meant,
            f"Tier({self.url!r})",
            f"Give {paths.MEMORY!r} for the memory of each machine ({memory_place.VARIABLE} names the tmpfs). A folder "
            'of that name is "./memory".',
        )
        kind = "memory" if self.in_memory else paths.parsed(self.url).kind
        require(
            self.shared or kind in ("directory", "memory"),
            f"Tier({self.url!r}, shared=False)",
            "Give a directory, which each node has for itself.",
        )
        require(isinstance(self.retention, Keep), f"Tier(retention={self.retention!r})", "Give lastgood.Keep(last=3).")
        keep = self.retention
        require(
            not self.in_memory or not (keep.every or keep.milestones or keep.best),
            f"{keep} in memory, which keeps the newest only",
            "Keep others in a place below.",
        )
        require(
            self.cadence is None or isinstance(self.cadence, Every) or self.cadence == "auto",
            f"Tier(cadence={self.cadence!r})",
            'Give lastgood.Every(...), "auto" or None.',
        )
        require(
            self.parity is None or isinstance(self.parity, str),
            f"Tier(parity={self.parity!r})",
            'Give text such as "10+2".',
        )
        if self.parity is not None:
            parity_layout.parsed(self.parity)
        require(self.parity is None or kind != "slots", "parity in slots", "Put it into a directory.")

    @property
    def in_memory(self) -> bool:
        """Whether this is the memory of each machine."""
        return self.url == paths.MEMORY

    @property
    def node_local(self) -> bool:
        """Whether each node has this place for itself."""
        return self.in_memory or not self.shared

    @property
    def survives_nodes(self) -> bool:
        """Whether what was saved here survives the loss of a machine with its disks."""
        among_nodes = self.copies > 1 or self.node_parity is not None
        return among_nodes or "node" in paths.survived_by(str(self.url))

    @property
    def node_parity(self) -> str | None:
        """The parity among nodes, as "4+2"; None: there is none."""
        return self.parity if self.node_local else None

    @property
    def file_parity(self) -> str | None:
        """The parity that each rank writes for its own files; None: there is none."""
        return None if self.node_local else self.parity

    @property
    def keep(self) -> Keep:
        """Which generations are kept here: `retention`, or one where memory is given no retention."""
        return Keep(last=1) if self.in_memory and self.retention is KEEP else self.retention


class PlaceCadence:
    """When copies to one place below are due. `cadence`: None: every save is copied. `alone`: whether there is one rank
    only; several ranks save for this place at the same steps, so they do not follow their own clocks."""

    def __init__(self, cadence: Every | None, alone: bool) -> None:
        self._cadence, self._alone = cadence, alone
        self._saved_at, self._step = 0.0, 0
        self._asks = False
        self.is_due = cadence is None
        """whether the next save is to be copied to this place"""

    def restored(self, n: int, now: float) -> None:
        """Note that the state is that of step `n`: intervals begin there. `now`: in seconds of a monotonic clock."""
        self._begin_at(n, now)
        self._step = n

    def due(self, n: int, now: float) -> bool:
        """Whether step `n` is to be saved for this place. Called once for each step; stays true until a save begins.

        With several ranks an interval in seconds asks for no save: the next one that is made is copied here.
        """
        if self._cadence is None:
            return False  # it saves when the place above does
        waited_seconds = now - self._saved_at
        self._asks |= self._cadence.due(n, waited_seconds if self._alone else 0.0, self._step)
        self.is_due |= self._asks or self._cadence.due(n, waited_seconds, self._step)
        self._step = max(n, self._step)
        return self._asks

    def begun(self, save: Save, copied: bool, now: float) -> None:
        """Note that a save has begun, and whether it is copied to this place."""
        if copied:
            self._begin_at(save.step, now)

    def _begin_at(self, n: int, now: float) -> None:
        self._saved_at, self._step = now, max(n, self._step)
        self._asks, self.is_due = False, self._cadence is None
