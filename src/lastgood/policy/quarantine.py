"""Whether the last failures of a job point to one machine, which is better left out of it. Pure.

A signal that no exception explains, a hang, a lost node, and errors that speak of a broken device point to a machine.
Exceptions of the program do not, and neither does a process that the kernel has killed for memory. Failures at one step
with one cause count once: they come from the state or the batches, and policy/recovery.py answers them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .membership import Next
from .recovery import HANG, NODE, Outcome

MACHINE_CAUSES = ("signal SIGKILL", "signal SIGBUS", "signal SIGSEGV", "signal SIGILL", HANG, NODE)
"""causes of attempts that point to a machine"""
_BROKEN_DEVICE = re.compile(
    r"uncorrectable (ECC|NVLink)|ECC error|hardware (stack )?error|GPU is lost|fallen off the bus|ncclSystemError|"
    r"device\(s\) is/are busy or unavailable|Input/output error|Remote I/O error",
    re.IGNORECASE,
)
"""what errors say of a broken device; a device-side assertion is the program's"""


@dataclass(frozen=True)
class Suspect:
    """A machine to which failures point. `why`: the evidence, for people."""

    host: str
    why: str


def suspect(outcomes: Sequence[Outcome], failures: int) -> Suspect | None:
    """The machine to which the last failures point; None: to none.

    `outcomes`: all attempts so far, oldest first; at least one. `failures`: so many in a row, of those that point to a
    machine, must have begun on the same one, since it was left out last; 0: never.

    Example: after three attempts that SIGKILL has ended on "a" at different steps it is "a".
    """
    host = outcomes[-1].host
    if not failures or not host or not points_to_machine(outcomes[-1]):
        return None
    found = dict[tuple[int, str], None]()
    for one in reversed(outcomes):
        if one.left_out == host:
            return None
        if not points_to_machine(one):
            continue
        if one.host != host:  # guard: failures-elsewhere-clear-a-host
            return None
        found[one.last_step, one.cause] = None  # guard: equal-failures-count-once
        if len(found) == failures:
            each = ", ".join(f"{cause.removeprefix('signal ')} at step {step}" for step, cause in reversed(found))
            return Suspect(host, f"the last {failures} failures that point to a machine began on {host} ({each})")
    return None


def kept(without: Next, holds_store: bool) -> str:
    """Why a suspect stays in the job, as the end of a sentence about it; empty: it leaves.

    `without`: what the nodes do without it. `holds_store`: whether the job ends with it.
    """
    if holds_store:  # guard: node-of-store-stays
        return ", which stays: it holds the store of the nodes"
    return "" if without.act == "join" else ", which stays: no other node can take its place"


def points_to_machine(one: Outcome) -> bool:
    """Whether an attempt has failed in a way that points to a machine."""
    return one.cause in MACHINE_CAUSES or bool(_BROKEN_DEVICE.search(one.error))
