"""The thread pools of a run that is open for writing. All are started before anything but its lock is touched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, thread
from typing import Any, TypeVar

from ..engine.inline_executor import Inline
from ..errors import Refused

Pool = TypeVar("Pool", bound=ThreadPoolExecutor)


EXIT_POLL_SECONDS = 0.5
"""How often a thread that waits without a limit looks whether the interpreter is ending."""


def interpreter_is_ending() -> bool:
    """Whether the main thread has ended. Python then waits for all other threads, which must end by themselves."""
    return not threading.main_thread().is_alive()


def pools_are_ending() -> bool:
    """Whether Python waits for the threads of pools, as it does before the main thread ends for the others.

    There is no public name for it. Where Python has another one, a thread of a pool does its work to the end.
    """
    return getattr(thread, "_shutdown", False)


class Workers(ThreadPoolExecutor):
    """A thread pool that goes on working while the interpreter ends: each job then runs in the thread that submits it.

    concurrent.futures refuses new jobs once the interpreter begins to end, and a last save may still be under way.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            return Inline().submit(fn, *args, **kwargs)


def started(pool: Pool, count: int) -> Pool:
    """Start all `count` threads of `pool` now and return the pool.

    An executor starts its threads with its first jobs, and the limit of threads might be reached by then. Raises
    Refused if not all of them can be started.
    """
    barrier = threading.Barrier(count)
    try:
        # Not `pool.submit`, which may run the job in this thread (`Workers.submit`).
        # guard: threads-started-ahead
        for job in [ThreadPoolExecutor.submit(pool, barrier.wait) for _ in range(count)]:
            job.result()
    except RuntimeError as error:
        barrier.abort()
        pool.shutdown()
        raise Refused(
            f"not all threads could be started: {error}",
            safe="Nothing of the run was changed.",
            todo="Raise the limit of threads of this user or container, or use fewer writers.",
        ) from error
    return pool
