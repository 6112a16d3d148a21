"""An executor that runs each job in the calling thread. It starts no thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Inline(Executor):
    """An executor without workers: `submit` returns after the job has ended, also if the job raised."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - `Future.result` raises it
            future.set_exception(error)
        return future
