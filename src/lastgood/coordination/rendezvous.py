"""Rendezvous: the ranks of a job find each other through a key-value store that may hold keys of dead processes.

    no.   rank         key                         message
    ----  -----------  --------------------------  --------------------------------------------------------------
    1     every other  PLACE/joining/RANK          a random nonce of this process
    2     rank 0       PLACE/named/NONCE           the random name of this rendezvous, for each nonce that it finds
    3     every other  PLACE/received/NAME/RANK    the name of its node, which acknowledges that it has the name
    4     rank 0       PLACE/joined/NAME           the nodes of all ranks once all have acknowledged, else the error
    5     every other  -                           receives that, and deletes its own three keys

torchrun starts processes again beside the store that the ended ones have used. These had opened the run different
numbers of times, so no counter in the store is the same for all ranks; random names need no counter.

Invariants
  1. A rank that receives a name received it from a living rank 0, because nobody else knew its nonce.
  2. No rank returns before all ranks have the name.
  3. Rank 0 waits `timeout_seconds` for the other ranks. These wait COORDINATOR_TIMEOUTS times as long for the name, and
     again for the end of the rendezvous. A timeout is RankFailed, which names the missing rank, on every rank that
     has joined.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..errors import LastgoodError, RankFailed, TierDown, TimedOut
from ..limits import COORDINATOR_TIMEOUTS, POLLS_PER_TIMEOUT
from ..units import plural
from .rounds import COORDINATOR, MessageStore, decode_error, encode_error


class Joined(NamedTuple):
    """The result of a rendezvous, the same at all ranks."""

    name: str
    """was never used before"""
    nodes: tuple[str, ...]
    """the name of the node of each rank"""


def join(store: MessageStore, place: str, rank: int, size: int, timeout_seconds: float, node: str = "") -> Joined:
    """Wait for all `size` ranks that open `place`. `node`: the name of the node of this rank.

    Raises RankFailed where a rank does not join in time, TierDown where the store cannot be reached.
    """
    if rank != COORDINATOR:
        return _join_coordinator(store, place, rank, COORDINATOR_TIMEOUTS * timeout_seconds, node)
    name = secrets.token_hex(8)  # guard: unique-rendezvous-name
    try:
        nodes = [node, *_gather(store, place, name, range(1, size), timeout_seconds)]
    except LastgoodError as error:
        with suppress(TierDown):
            store.post(f"{place}/joined/{name}", encode_error(error))
        raise
    store.post(f"{place}/joined/{name}", {"nodes": nodes})
    return Joined(name, tuple(nodes))


def _gather(store: MessageStore, place: str, name: str, others: range, timeout_seconds: float) -> list[str]:
    """Give the name to all other ranks, at rank 0, and wait until all have acknowledged it. Returns their nodes."""
    joining = [f"{place}/joining/{rank}" for rank in others]
    received = [f"{place}/received/{name}/{rank}" for rank in others]
    until = time.monotonic() + timeout_seconds

    def answer(nonces: Iterable[str]) -> None:
        # Nobody reads the answers to nonces of dead processes.
        store.post_all({f"{place}/named/{nonce}": name for nonce in nonces})

    while True:
        left_seconds = max(until - time.monotonic(), 0.0)
        try:
            answer(store.receive(joining, left_seconds))
            # A nonce without acknowledgement may be that of a dead process, whose rank posts a new one when it joins:
            # after a short wait all nonces are read again.
            return store.receive(received, min(left_seconds, timeout_seconds / POLLS_PER_TIMEOUT))
        except TimedOut:
            if left_seconds:  # guard: late-rank-awaited
                continue
            # The ranks that have joined get the name, so that they receive the error that names the missing ones.
            # guard: absent-ranks-published
            answer(filter(None, map(store.read, joining)))
            missing = _missing(store, joining) or _missing(store, received)
            if not missing:
                return store.receive(received, timeout_seconds)
            more = f" (and {plural(len(missing) - 1, 'more rank')})" if len(missing) > 1 else ""
            raise _not_joined(f"rank {others[missing[0]]}{more}", timeout_seconds) from None


def _missing(store: MessageStore, keys: Sequence[str]) -> list[int]:
    return [at for at, key in enumerate(keys) if not store.has(key)]


def _join_coordinator(store: MessageStore, place: str, rank: int, timeout_seconds: float, node: str) -> Joined:
    nonce = secrets.token_hex(8)
    store.post(f"{place}/joining/{rank}", nonce)
    try:
        (name,) = store.receive([f"{place}/named/{nonce}"], timeout_seconds)
        received = f"{place}/received/{name}/{rank}"
        store.post(received, node)
        (end,) = store.receive([f"{place}/joined/{name}"], timeout_seconds)
    except TimedOut:
        raise _not_joined(f"rank {COORDINATOR}", timeout_seconds) from None
    # Each rank deletes its own keys, so that rank 0 does not have to delete those of all.
    store.delete([f"{place}/joining/{rank}", f"{place}/named/{nonce}", received])
    if "error" in end:
        raise decode_error(end)
    return Joined(str(name), tuple(end["nodes"]))


def _not_joined(missing: str, timeout_seconds: float) -> RankFailed:
    return RankFailed(
        f"{missing} has not opened the run within {timeout_seconds:.0f} s",
        safe="Nothing was touched.",
        todo="Open the run on every rank, not only on rank 0. Else find out why that process ended or hangs, or "
        "whether it has opened another directory.",
    )
