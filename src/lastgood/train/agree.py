"""Agreeing: the store of a torch process group, as the ranks of a run use it. Calls no collective."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..errors import TierDown, TimedOut
from ..run.ranks import PATIENCE_SECONDS, Ranks


class GroupStore:
    """`ports.Store` over a client of torch's."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, data: bytes) -> None:
        try:
            self._store.set(key, data)
        except RuntimeError as error:
            raise _down(error) from error

    def get(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        names = list(keys)
        try:
            self._store.wait(names, datetime.timedelta(seconds=seconds))
            at_once = self._store.has_extended_api()  # else it is a file, and each key a question of its own
            return [bytes(one) for one in (self._store.multi_get(names) if at_once else map(self._store.get, names))]
        except dist.DistStoreError as error:
            raise TimedOut(f"something was not posted: {', '.join(names[:3])}, ...") from error
        except RuntimeError as error:
            raise _down(error) from error

    def has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise _down(error) from error

    def delete(self, key: str) -> None:
        try:
            self._store.delete_key(key)
        except RuntimeError as error:
            raise _down(error) from error


def _down(error: RuntimeError) -> TierDown:
    return TierDown(f"the store of the process group is gone: {error}", safe="Every committed generation is untouched.")


def ranks_of(path: str | os.PathLike[str], patience_seconds: float = PATIENCE_SECONDS) -> Ranks | None:
    """This process among those of its group; None in a world of one. All ranks open their runs in the same order."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    store: Any = dist.distributed_c10d._get_default_store()  # the one that the group itself met through
    rank, run = dist.get_rank(), hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:12]
    opening = store.add(f"lastgood/{run}/opened/{rank}", 1)
    return Ranks(
        rank, dist.get_world_size(), lambda: GroupStore(store.clone()), f"lastgood/{run}/{opening}", patience_seconds
    )
