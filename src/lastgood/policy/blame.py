"""Which of several ranks that ended failed first, and the others only because of it. Pure.

When one rank of a job dies, the others lose their connections to it and fail too. Their errors come later, and name
connections and timeouts; the report of an attempt names the first cause.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .. import errors
from .recovery import PREEMPTED

FOLLOWERS = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|closed by (the )?(remote )?peer|"
    r"socket timeout|timed out|timeout caused|store of the process group|watchdog|nccl (communicator|error)|"
    r"ncclRemoteError|RankFailed|posted nothing within|"
    r"\b(TCPStore|DistStoreError|recvValue|sendBytes)\b|another rank",
    re.IGNORECASE,
)
"""What errors of ranks say that fail because another one did."""
TIMEOUTS = re.compile(
    r"time(d )?[ -]?out|has sent no message for|no answer in|posted nothing within|has not opened the run within",
    re.IGNORECASE,
)
"""What errors of ranks say that have waited for another one for too long."""
_BETWEEN_RANKS = re.compile(
    r"([\w.]+\.)?(RuntimeError(?!: DataLoader )|\w*Dist\w*Error|RankFailed)\b|TierDown: the store of the process group|"
    r"TimedOut: rank \d+: posted nothing"
)
"""How the errors of torch's collectives and stores begin, and those of saves of several ranks: a request of the script
to a server, or a worker of a DataLoader, has timeouts too."""
_RELAYED = re.compile(r"(?:lastgood\.errors\.)?(\w+): rank (\d+): ")
"""How an error of this package begins that another rank has posted, and that all ranks raise."""
ABORTED = -6
"""SIGABRT: so NCCL ends a process whose peers are gone, or that has waited for one until its timeout."""
LEAST_ABORTS = 2
"""One rank that aborts may have a fault of its own, as an assertion in C++; a timeout ends all that have waited."""
WAITED_TIMES, WAITED_SECONDS = 5.0, 5.0
"""One that has shown no step for so many times its longest one, and at least for so long, has waited as well."""


@dataclass(frozen=True)
class Ended:
    """How one rank has ended."""

    rank: int
    at_seconds: float
    """when: the moment of its error if it has left one, else of its end; all ranks by the same clock"""
    code: int
    """exit code; negative: the number of the signal that killed it"""
    error: str = ""
    """type and message of the exception that ended it; empty if it has left none"""

    @property
    def failed(self) -> bool:
        """Whether it is no regular end. One that was asked for is regular."""
        return self.code not in (0, PREEMPTED)


def first_cause(ended: Sequence[Ended]) -> Ended | None:
    """The rank that failed first; None if none has failed.

    Ranks whose error is that of a lost connection or of a timeout count only if no other rank has failed. Example:
    of a rank that was killed and one with "Connection closed by peer" it is the former, whatever was noticed first.
    """
    failed = [one for one in ended if one.failed]
    causes = [one for one in failed if not follows(one)] or failed  # guard: followers-are-not-blamed
    return min(causes, key=lambda one: (one.at_seconds, one.rank), default=None)


def follows(one: Ended) -> bool:
    """Whether a rank looks as if it had failed only because another one did."""
    relayed = _RELAYED.match(one.error)
    is_relayed = relayed is not None and hasattr(errors, relayed[1]) and int(relayed[2]) != one.rank
    return is_follower(one.error) or aborted(one) or is_relayed  # guard: relayed-error-is-not-blamed


def is_follower(error: str) -> bool:
    """Whether an error, as type and message, is one of ranks that fail because another one did."""
    return bool(FOLLOWERS.search(error))


def timed_out(one: Ended) -> bool:
    """Whether a rank has failed because it had waited for another one until a timeout."""
    return bool(TIMEOUTS.search(one.error) and _BETWEEN_RANKS.match(one.error))  # guard: only-collectives-are-waits


def lost_others(one: Ended) -> bool:
    """Whether a rank has failed in what ranks do together: a collective, a store, a save of several ranks."""
    return aborted(one) or bool(_BETWEEN_RANKS.match(one.error))


def may_have_timed_out(failed: Sequence[Ended], waited: Collection[int]) -> bool:
    """Whether the ranks that have failed may have waited for another one until NCCL's timeout, which leaves no error.

    Aborts alone do not show it: one that goes on, and did nothing since, may be the one for which they have waited.
    `failed`: of all nodes. `waited`: those of them whose steps show that they had waited (`had_waited`).
    """
    aborts = [one.rank for one in failed if aborted(one)]
    enough = len(aborts) >= LEAST_ABORTS or not {*waited}.isdisjoint(aborts)  # guard: lone-abort-is-no-timeout
    return enough and all(map(follows, failed))  # guard: known-cause-is-no-timeout


def had_waited(silent_seconds: float, longest_seconds: float) -> bool:
    """Whether the steps of a rank show that it had waited when it ended.

    `silent_seconds`: from its newest sign of life until its end. `longest_seconds`: the longest time between two signs
    before; 0.0: not known, so that nothing is shown.
    """
    return 0.0 < WAITED_TIMES * longest_seconds < silent_seconds and silent_seconds > WAITED_SECONDS


def aborted(one: Ended) -> bool:
    """Whether SIGABRT has ended a rank, and no exception."""
    return one.code == ABORTED and not one.error
