"""Signals to `lastgood run`."""

from __future__ import annotations

import os
import signal

from lastgood.supervisor import signals


def test_a_job_under_nohup_outlives_its_terminal() -> None:
    """The end of the terminal ended the job all the same, as it ends one of torchrun."""
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.handled(ends) as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received.end is None and received.taken() == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with signals.handled(ends) as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received.end == signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)
