"""Figures of a job before it runs: the size of its state, the best interval between saves, the cost of failures. Pure.

Symbols, all in seconds but N
    tau  `interval`: training time between two saves
    C    `stall`: how long a save stops the training loop
    Tw   `write`: from the beginning of a save until it is durable, while N saves are in flight
    N    `in_flight`
    M    `mtbf`: mean time between failures of the whole job; the times are exponentially distributed
    R    `restart`: from a failure until training goes on, loading included

Sources: Young 1974 (first order), Daly 2006 (higher order and exact expectation). Both papers have one C, for which
training stops. Here C is the stall only, so tau can be short. It is not shorter than Tw / N, or saves would queue up,
and a failure loses the age of the newest *durable* state: tau / 2 + Tw on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import Refused
from .arguments import require_positive

DAY_SECONDS = 86_400.0
APART = 0.05
"""fraction of all time by which the first order may differ from the expectation before it is said to break down"""


def mtbf_seconds(device_days: float, devices: int) -> float:
    """Mean time between failures of a job that ends when any of its devices fails. Raises Refused."""
    require_positive(device_days=device_days, devices=devices)
    return device_days * DAY_SECONDS / devices


def state_bytes(parameters: float, bytes_per_parameter: float) -> float:
    """Bytes of the state: parameters times bytes per parameter. Raises Refused."""
    require_positive(parameters=parameters, bytes_per_parameter=bytes_per_parameter)
    return parameters * bytes_per_parameter


@dataclass(frozen=True)
class Job:
    """A job, for which intervals are compared. Raises Refused for a number that no job can have."""

    mtbf: float
    stall: float
    write: float = 0.0
    in_flight: int = 1
    restart: float = 0.0

    def __post_init__(self) -> None:
        require_positive(mtbf=self.mtbf, stall=self.stall, in_flight=self.in_flight)
        for name in ("write", "restart"):
            if not 0 <= getattr(self, name) < math.inf:
                raise Refused(
                    f"{name}={getattr(self, name)}", safe="Nothing was touched.", todo="Give a number of at least 0."
                )

    @property
    def young(self) -> float:
        """sqrt(2 C M): the best interval to first order."""
        return math.sqrt(2 * self.stall * self.mtbf)

    @property
    def daly(self) -> float:
        """Daly's higher-order interval (2006, equation 37)."""
        if self.stall >= 2 * self.mtbf:
            return self.mtbf
        part = math.sqrt(self.stall / (2 * self.mtbf))
        return self.young * (1 + part / 3 + part**2 / 9) - self.stall

    @property
    def shortest(self) -> float:
        """Tw / N: if saves begin more often than this, they queue up."""
        return self.write / self.in_flight

    @property
    def best(self) -> float:
        """The interval with the largest `useful`, but at least Tw / N.

        It solves (1 - tau / M) exp((tau + C) / M) = 1. Tw and R reduce `useful`, but do not move its maximum.
        """
        low, high = 0.0, self.mtbf
        for _ in range(200):
            tau = (low + high) / 2
            if tau >= self.mtbf:  # C is many times M: there is no float between the solution and M
                break
            if math.log1p(-tau / self.mtbf) + (tau + self.stall) / self.mtbf > 0:
                low = tau
            else:
                high = tau
        return max(low, self.shortest)

    def wasted_first_order(self, interval: float) -> float:
        """The wasted fraction to first order: C / tau + (tau / 2 + Tw + R) / M; useless above 1. Raises Refused."""
        require_positive(interval=interval)
        return self.stall / interval + (interval / 2 + self.write + self.restart) / self.mtbf

    def useful(self, interval: float) -> float:
        """The expected fraction of all time in which training makes progress that is never lost; with Tw = 0 Daly's.

        x seconds after a start floor((x - Tw) / (tau + C)) intervals are durable, and a restart may fail too. So it is
        tau exp(-Tw / M) / (M exp(R / M) (exp((tau + C) / M) - 1)). Raises Refused.
        """
        require_positive(interval=interval)
        mtbf = self.mtbf
        longest = (interval + self.stall) / mtbf
        if longest > 500:  # exp() would overflow, and the fraction is practically 0
            return 0.0
        return interval / mtbf * math.exp(-(self.write + self.restart) / mtbf) / math.expm1(longest)

    def breaks_down(self, interval: float) -> bool:
        """Whether `wasted_first_order` differs from the exact expectation by more than APART."""
        return abs(self.wasted_first_order(interval) - (1 - self.useful(interval))) > APART
