"""The sums of a job, before it runs: how large, how long, how often, and what failures cost. Pure.

Words, in seconds: tau `interval`, training between two saves; C `stall`, what a save takes from the loop; Tw `write`,
from a save's begin until it is durable, with N `in_flight` at once; M `mtbf`, the mean time between failures of the
whole job; R `restart`, from a failure until training goes on, loading included. Failures come at random (exponential).

Sources: Young 1974 (first order), Daly 2006 (higher order and exact expectation). Both know one C, for which training
stands still. Here C is the stall alone, so tau can be short; but no shorter than Tw / N, or saves would queue up, and
what a failure loses is the age of the newest *durable* state: tau / 2 + Tw on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import Refused

DAY_SECONDS = 86_400.0
APART = 0.05
"""from which on the first order is said to break down: a twentieth of all time between it and the expectation"""


def mtbf_seconds(device_days: float, devices: int) -> float:
    """Mean time between failures of a job that any device's failure ends. Raises Refused."""
    _require_positive(device_days=device_days, devices=devices)
    return device_days * DAY_SECONDS / devices


def state_bytes(parameters: float, bytes_per_parameter: float) -> float:
    """Raises Refused."""
    _require_positive(parameters=parameters, bytes_per_parameter=bytes_per_parameter)
    return parameters * bytes_per_parameter


@dataclass(frozen=True)
class Job:
    """What an interval is weighed for. Raises Refused for what no job has."""

    mtbf: float
    stall: float
    write: float = 0.0
    in_flight: int = 1
    restart: float = 0.0

    def __post_init__(self) -> None:
        _require_positive(mtbf=self.mtbf, stall=self.stall, in_flight=self.in_flight)
        for name in ("write", "restart"):
            if not 0 <= getattr(self, name) < math.inf:
                raise Refused(f"{name}={getattr(self, name)}", todo="Give a number from 0 on.")

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
        """Tw / N: with less between them saves queue up."""
        return self.write / self.in_flight

    @property
    def best(self) -> float:
        """The interval of most useful time by the exact expectation, never below Tw / N.

        It solves (1 - tau / M) exp((tau + C) / M) = 1; Tw and R shift no optimum, they only cost.
        """
        low, high = 0.0, self.mtbf
        for _ in range(200):
            tau = (low + high) / 2
            if tau >= self.mtbf:  # a stall of many M: no float lies between it and M
                break
            if math.log1p(-tau / self.mtbf) + (tau + self.stall) / self.mtbf > 0:
                low = tau
            else:
                high = tau
        return max(low, self.shortest)

    def wasted_first_order(self, interval: float) -> float:
        """C / tau + (tau / 2 + Tw + R) / M. May be more than 1: then it has broken down. Raises Refused."""
        _require_positive(interval=interval)
        return self.stall / interval + (interval / 2 + self.write + self.restart) / self.mtbf

    def useful(self, interval: float) -> float:
        """The part of all time that is training which is not done again, exactly: with Tw = 0 it is Daly's.

        A failure finds floor((x - Tw) / (tau + C)) intervals durable, x seconds after a start; a restart may fail too:
        tau exp(-Tw / M) / (M exp(R / M) (exp((tau + C) / M) - 1)). Raises Refused.
        """
        _require_positive(interval=interval)
        mtbf = self.mtbf
        longest = (interval + self.stall) / mtbf
        if longest > 500:  # beyond what a float holds, and beyond all hope
            return 0.0
        return interval / mtbf * math.exp(-(self.write + self.restart) / mtbf) / math.expm1(longest)

    def breaks_down(self, interval: float) -> bool:
        """Whether the first order is far from the expectation."""
        return abs(self.wasted_first_order(interval) - (1 - self.useful(interval))) > APART


def _require_positive(**given: float) -> None:
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise Refused(f"{name}={value}", todo="Give a number above 0.")
