"""What follows when a host shows signs that it may fail. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..records import Record

Unhealthy = Literal["report", "leave"]
"""what follows a fatal finding: it is reported, or its node leaves the job too"""


class Finding(Record, frozen=True, kw_only=True):
    """A sign that a host may fail. `source`: who has found it. `fatal`: whether work there is likely to be lost."""

    source: str
    what: str
    fatal: bool
    host: str = ""


def leaves(findings: Sequence[Finding], unhealthy: Unhealthy) -> bool:
    """Whether a node is to leave its job because of these findings, after its ranks have saved.

    Example: a fatal finding is not enough with `unhealthy="report"`.
    """
    return unhealthy == "leave" and any(one.fatal for one in findings)


def described(one: Finding) -> str:
    """A finding, for people."""
    return f"{one.host}: {one.source}: {one.what}"
