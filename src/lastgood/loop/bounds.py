"""Bounds: how much each place of a run takes at most, reported before the first save. Writes nothing.

A place that each node has for itself, as memory, is reported for the node with the largest part, and compared with the
room on the node of the coordinator. Object stores below the first place have no bound. The bound of each other one is
reported by the thread of that place: a network file system that hangs answers no question about its space.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..format import parity_layout
from ..run import disk_space, paths
from ..run.node_disks import NodeDisks
from ..run.pipeline import Pipeline
from ..run.planned_save import RunOptions
from ..run.writer import RunWriter
from ..state.saved_size import RECORDS_BYTES
from .options import Options


class Bounds:
    """The bounds of the places of one run. Used at the coordinator."""

    def __init__(self, options: Options, pipeline: Pipeline) -> None:
        self._options, self._pipeline = options, pipeline
        self._reported = False

    def report(self, parts: Sequence[int]) -> None:
        """Report the bound of each place, and where it has less room. `parts`: the bytes that each rank writes in a
        save. Only the first call reports."""
        front, whole = self._pipeline.run, sum(parts) + RECORDS_BYTES
        if self._reported or not isinstance(front, RunWriter):
            return
        self._reported = True
        own, held = self._front_bytes(front, parts), _held(front)
        held = round(held * min(own / whole, 1.0)) if isinstance(front.tier, NodeDisks) else held
        below = self._pipeline.places.below
        # As many wait as the place keeps, beside the one that is copied there, and one whose copy has just ended.
        waiting = max((one.writer.keep.last for one in below), default=0) + len(below) + 1 - front.keep.last
        waiting = max(waiting, 0) if below else 0
        compared, flights = int(self._options.sentinel is not None), self._options.tuning.in_flight
        disk_space.report_bound(front.tier, front.keep, flights, own, held, waiting, compared)
        for place in below:
            if paths.parsed(place.tier.place).kind != "objects":
                report = partial(_report_below, place.writer, whole, compared)
                place.report_first(report)  # guard: bound-below-holds-no-save

    def _front_bytes(self, front: RunWriter, parts: Sequence[int]) -> int:
        """The bytes of a generation in the place that is written first, on one node if each has it for itself."""
        tier, options = front.tier, self._options
        if not isinstance(tier, NodeDisks):
            parity = options.front.parity
            return round((sum(parts) + RECORDS_BYTES) * (1 + (parity_layout.share(parity) if parity else 0)))
        leaders, table = tier.nodes.leaders, tier.links.table
        largest = max(sum(part for part, of in zip(parts, leaders, strict=True) if of == one) for one in leaders)
        node_parity = options.tiers[0].node_parity if options.tiers else None
        run = RunOptions(copies=options.copies, node_parity=node_parity)
        return round(largest * run.times_own_part(len(table.nodes) if table else 1)) + RECORDS_BYTES


def _report_below(writer: RunWriter, whole: int, compared: int) -> None:
    """Report the bound of a place below. `whole`: the bytes of a generation without its parity. `compared`: as for
    `report_bound`."""
    code = writer.verifier.code
    size = round(whole * (1 + code.parity / code.data)) if code else whole
    disk_space.report_bound(writer.tier, writer.keep, None, size, _held(writer), compared=compared)


def _held(writer: RunWriter) -> int:
    """The bytes of the generations that a place holds already, as all nodes have them together, without copies."""
    with writer.known.lock:
        return sum(one.bytes for one in writer.survey.generations.values())
