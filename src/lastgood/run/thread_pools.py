"""Pools of threads of a run that is open for writing. Their threads are started before anything is touched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ..engine.inline_executor import Inline
from ..errors import Refused

Pool = TypeVar("Pool", bound=ThreadPoolExecutor)


class Workers(ThreadPoolExecutor):
    """A pool that still works when the interpreter is ending: then in the thread that submits."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            return Inline().submit(fn, *args, **kwargs)


def started(pool: Pool, count: int) -> Pool:
    """A pool whose threads all run: later, beside many others, none might be left. Raises Refused."""
    barrier = threading.Barrier(count)
    try:
        # guard: threads-started-ahead
        for job in [ThreadPoolExecutor.submit(pool, barrier.wait) for _ in range(count)]:
            job.result()
    except RuntimeError as error:
        barrier.abort()
        pool.shutdown()
        raise Refused(
            f"not all threads could be started: {error}",
            safe="Nothing was touched.",
            todo="Raise the limit of threads of this user or container, or take fewer writers.",
        ) from error
    return pool
