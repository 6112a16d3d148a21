"""Mutants of the safeguards of the placement of copies and of parity on nodes."""

from __future__ import annotations

from .change import Always, Never, Remove, Swap
from .record import Mutant, table

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "placement",
        ("placement",),
        ("a copy lies on the node whose part it is", "copies-on-other-nodes", Swap("first + step)", "first)")),
        (
            "nodes are grouped without regard to their domains",
            "copies-in-other-domains",
            Swap("(inside[entry[1]], entry)", "entry"),
        ),
        (
            "a group is extended by a node of a domain that it contains",
            "extension-keeps-domains",
            Swap("self._crowding(best) <= most", "True"),
        ),
        ("a group that is split off has two nodes of a domain", "split-keeps-domains", Always()),
        (
            "copies of a node outside of the groups lie in its own domain",
            "attached-in-other-domains",
            Swap("max(inside.values()) <= level", "True"),
        ),
        ("a node holds more copies than the limit permits", "copies-within-limit", Swap("< self._extra", "< 10**9")),
        ("larger groups are not split when they could be", "few-sets-of-nodes", Always()),
        ("groups whose nodes are all there are formed again", "whole-groups-stay", Never()),
        ("the nodes that a lost node leaves are separated", "rest-of-group-stays", Never()),
        ("copies move although nothing becomes better", "no-change-without-gain", Swap("best", "found")),
        ("groups of before are kept where new ones survive more", "domains-before-stability", Never()),
        ("two nodes may have one name", "node-names-differ", Remove()),
    ),
)
