"""Runs each job at once, in the thread that asks. Starts no thread, and keeps nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Inline(Executor):
    """An executor without workers: `submit` returns when the job is done."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
            future.set_exception(error)
        return future
