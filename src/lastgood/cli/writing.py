"""Opens a run for the commands that change it, and says what does their work while a job has it open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..errors import RunLocked
from ..ports import Tier
from ..run import access


@contextmanager
def for_command(run: str, take_over: bool, meanwhile: str) -> Iterator[Tier]:
    """Open a run for writing. `take_over`: as for `access.for_writing`.

    `meanwhile`: what a user can do while a job has the run open, which RunLocked then says first. Raises as
    `access.for_writing`.
    """
    with ExitStack() as opened:
        try:
            tier = opened.enter_context(access.for_writing(run, "atomic_dirsync", take_over=take_over))
        except RunLocked as error:
            raise RunLocked(error.what, safe=error.safe, todo=f"{meanwhile} Otherwise: {error.todo}") from error
        yield tier
