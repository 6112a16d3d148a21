"""Stand-ins for tests of training loops: a file system that fails on request, and a clock that a test moves.

Needs neither torch nor pytest. Nothing else in the package imports it.
"""

from .clock import Clock
from .faulty_files import Call, Fault, FaultyFiles

__all__ = ["Call", "Clock", "Fault", "FaultyFiles"]
