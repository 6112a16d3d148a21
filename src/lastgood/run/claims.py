"""Claims: which process may commit to a run in an object store, where no lock ends with its process.

A claim is a small object `claims/NNNNNN.json`, created if absent. The highest number is the claim that counts; its
number is also the order of the incarnation that its holder writes.

Invariants
  1. Two openings never hold the same number, so two incarnations in one object store never have the same order.
  2. A commit is acknowledged only if no higher claim existed after its record was created. The holder of a higher claim
     lists the run after it has made its claim. So it sees every acknowledged commit.
  3. A holder that was replaced deletes and replaces nothing from the moment at which it learns of the higher claim. It
     learns of it before each of these, and where a generation is not there any more that it knew of.
  4. The highest claim is never deleted.
A process that was replaced may leave the record of one commit that it has not acknowledged. It is a generation of an
older incarnation, which no later one continues.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from .. import reporting
from ..errors import (
    CommitUnknown,
    Damaged,
    LastgoodError,
    MissingBlob,
    NameTaken,
    NotWritable,
    Refused,
    RunLocked,
    RunReplaced,
    TierDown,
)
from ..format import catalog, layout
from ..limits import RECORD_LIMIT_BYTES
from ..ports import Tier, Upload
from ..records import Extent, Record

if TYPE_CHECKING:
    from ..storage.objects import Objects

FOLDER = "claims"
_NAME = re.compile(r"([0-9]{6,})\.json")
_ENDED = re.compile(r"([0-9]{6,})\.ended\.json")
_TRIES = 20
"""So many other processes may claim the run at the same moment as this one."""


class Claim(Record, frozen=True, kw_only=True):
    """One opening of a run for writing: which process made it, and when, in seconds since 1970. For people only."""

    format: int
    order: int
    host: str
    process: int
    opened: float


def under(objects: Objects, order: int) -> Objects | ClaimedTier:
    """A run that is changed only as long as the claim of this order is held; 0: that is not asked."""
    return ClaimedTier(objects, order) if order else objects  # guard: agent-changes-under-claim


class ClaimedTier:
    """`ports.Tier` of the process that holds the newest claim on a run. Raises RunReplaced once it does not.

    `objects`: the tier. `order`: the number of the claim.
    """

    newest_only: bool = False

    def __init__(self, objects: Objects, order: int) -> None:
        self._objects, self.order = objects, order
        self.place, self.reads_at_once = objects.place, objects.reads_at_once
        self.tree = objects.tree
        self._used = False
        """whether an incarnation has the order of the present claim"""
        self._replaced_by = 0
        """the higher claim that was found; 0 as long as there is none"""

    def next_order(self, least: int) -> int:
        """The order of a new incarnation, at least `least`, claimed for this process alone. Raises RunReplaced."""
        if self._used or self.order < least:
            self._require_held()
            wanted = max(least, self.order + 1)
            try:
                _create(self._objects, wanted)  # guard: incarnation-order-claimed
            except NameTaken:
                self._replaced_by = wanted
                raise self._replaced() from None
            self.order = wanted
        self._used = True
        return self.order

    def list(self, folder: str) -> Mapping[str, int | None]:
        return {name: length for name, (length, _) in self.versions(folder).items()}

    def versions(self, folder: str) -> Mapping[str, tuple[int | None, str]]:
        found = self._objects.versions(folder)
        if folder.startswith("gen/") and layout.COMMIT not in found:  # the new holder may have deleted the generation
            self._require_held()  # guard: replacement-noticed-at-deleted-generation
        return found

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        try:
            self._objects.read_into(extent, mv, fresh=fresh)
        except MissingBlob:
            self._require_held()
            raise

    def create(self, name: str, length: int) -> Upload:
        if self._replaced_by:
            raise self._replaced()
        return self._objects.create(name, length)

    def put_new(self, name: str, data: bytes) -> None:
        record = name.rpartition("/")[2]
        if record in catalog.RECORDS or layout.label_number(record) is not None:
            self._require_held()  # a mark beside a deleted generation would look like a lost one
        self._objects.put_new(name, data)
        if record == layout.COMMIT:
            try:
                self._require_held()  # guard: commit-acknowledged-only-while-claimed
            except RunReplaced:
                self._withdraw(name.rpartition("/")[0])
                raise
            except (TierDown, NotWritable) as error:  # guard: unconfirmed-claim-is-unknown-commit
                raise CommitUnknown(
                    f"{name} was created, and whether this process still holds the run could not be read: {error.what}",
                    safe="Nothing was deleted.",
                    todo="The next opening of the run decides whether it counts.",
                ) from error

    def point(self, name: str, data: bytes, to: str) -> None:
        self._require_held()
        self._objects.point(name, data, to)

    def replace(self, name: str, by: str) -> None:
        self._require_held()
        self._objects.replace(name, by)

    def delete(self, name: str) -> None:
        self._require_held()  # guard: replaced-writer-deletes-nothing
        self._objects.delete(name)

    def end(self) -> None:
        """Note that the holder has closed the run. It is a hint: if it cannot be written, nothing is lost."""
        with contextlib.suppress(LastgoodError):
            self._objects.put(f"{FOLDER}/{self.order:06d}.ended.json", _record(self.order))

    def _require_held(self) -> None:
        if not self._replaced_by:
            newest = max(_orders(self._objects.list(FOLDER)), default=0)
            self._replaced_by = newest if newest > self.order else 0
        if self._replaced_by:
            raise self._replaced()

    def _withdraw(self, folder: str) -> None:
        """Delete the COMMIT that this process has just created, if the new holder has removed all files of the save.

        The new holder found them without a COMMIT, and took them for those of a save that had ended. Where other files
        are left it may have found the COMMIT, and continue that generation; a removal that is under way ends with the
        COMMIT too (`commit.retire`).
        """
        with contextlib.suppress(LastgoodError):  # it then stays as damage; what is reported is the replacement
            if self._objects.list(folder).keys() <= {layout.COMMIT, layout.GOING}:
                self._objects.delete(f"{folder}/{layout.COMMIT}")  # guard: late-commit-withdrawn

    def _replaced(self) -> RunReplaced:
        return RunReplaced(
            f"{self.place} was opened for writing by another process since (claim {self._replaced_by})",
            safe="What this process has committed is kept; it commits and deletes nothing from now on.",
            todo="Stop this process, or the other one: only the one that opened the run last can save.",
        )


def common_order(tiers: Sequence[Tier], least: int) -> int:
    """The order of a new incarnation, at least `least`, claimed in each of these places in which runs are claimed.

    Raises RunReplaced, and what a request of a store raises.
    """
    claims = [one for tier in tiers if (one := getattr(tier, "next_order", None)) is not None]
    orders = [claim(least) for claim in claims]
    order: int = max([least, *orders])
    for claim, found in zip(claims, orders, strict=True):
        if found < order:
            claim(order)  # guard: one-order-in-all-places
    return order


@contextlib.contextmanager
def claimed(objects: Objects, take_over: bool, own_claims: int = 0) -> Iterator[ClaimedTier]:
    """Claim a run for writing; the claim ends with the block.

    `take_over`: whether a claim that has not ended is replaced. Otherwise RunLocked is raised, and nothing is changed.
    `own_claims` (default 0): claims up to this number are replaced in any case: their processes have ended.
    Raises Refused if the store ignores the condition of a creation, and what its requests raise.
    """
    for _ in range(_TRIES):
        listing = objects.list(FOLDER)
        newest = max(_orders(listing), default=0)
        left_open = newest > 0 and not _has_ended(listing, newest)
        if left_open:
            _note_open(objects, newest, take_over or newest <= own_claims)  # guard: newer-claim-not-taken-over
        orders = [newest, *(one.order for one in map(layout.parse_incarnation, objects.list("incarnations")) if one)]
        order = max(orders) + 1
        try:
            _create(objects, order)
        except NameTaken:
            continue
        break
    else:
        raise RunLocked(
            f"{objects.place}: other processes open this run for writing all the time",
            safe="Nothing was changed.",
            todo="Start one job only.",
        )
    _require_conditions(objects, order)
    for name in objects.list(FOLDER):
        # guard: newest-claim-kept
        if (number := _number(name)) is not None and number < newest:
            objects.discard(f"{FOLDER}/{name}")
    if left_open or not take_over:  # a training job does not wait for it where the last one has closed the run
        _remove_unfinished_uploads(objects)
    tier = ClaimedTier(objects, order)
    try:
        yield tier
    except Exception:
        with contextlib.suppress(LastgoodError):
            tier.end()  # guard: failed-opening-ends-its-claim
        raise
    tier.end()


def _remove_unfinished_uploads(objects: Objects) -> None:
    """Remove the uploads that earlier processes have left. What keeps this from succeeding is reported only."""
    try:
        objects.remove_unfinished_uploads()  # guard: unfinished-uploads-removed
    except (NotWritable, TierDown) as error:
        reporting.info(str(error))


def _create(objects: Objects, order: int) -> None:
    objects.put_new(f"{FOLDER}/{order:06d}.json", _record(order))


def _record(order: int) -> bytes:
    host, process = socket.gethostname(), os.getpid()
    return layout.encode(Claim(format=layout.FORMAT, order=order, host=host, process=process, opened=time.time()))


def _require_conditions(objects: Objects, order: int) -> None:
    """Create the claim once more with other bytes: a store that does not refuse this would replace commits too."""
    try:
        objects.put_new(f"{FOLDER}/{order:06d}.json", b"{}")  # guard: ignored-condition-refused
    except NameTaken:
        return
    raise Refused(
        f"{objects.place}: this object store replaces an object although it was asked to create it only if absent "
        "(If-None-Match)",
        safe="Nothing was saved.",
        todo="Update the server, or take another store: without this condition two jobs could overwrite each other's "
        "commits.",
    )


def _note_open(objects: Objects, order: int, take_over: bool) -> None:
    """Report that the process with this claim is replaced; or raise RunLocked."""
    holder = _holder(objects, order)
    if not take_over:
        raise RunLocked(
            f"{objects.place} is open for writing in {holder}, or that process ended without closing it",
            safe="Nothing was touched.",
            todo="End that process; if it has ended, repeat the command with --take-over. A process that is replaced "
            "cannot commit any more.",
        )
    reporting.info(
        f"{objects.place} was opened for writing by {holder} and was not closed. If that process still runs, it "
        "cannot commit from now on."
    )


def _holder(objects: Objects, order: int) -> str:
    name = f"{FOLDER}/{order:06d}.json"
    try:
        length = min(objects.length_of(name) or 0, RECORD_LIMIT_BYTES)
        buffer = bytearray(length)
        objects.read_into(Extent(blob=name, offset=0, length=length), memoryview(buffer))
        claim = layout.decode(bytes(buffer), Claim, name)
    except (Damaged, MissingBlob):
        return "another process"
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(claim.opened))
    return f"process {claim.process} on {claim.host} (since {at})"


def _has_ended(listing: Mapping[str, int | None], order: int) -> bool:
    return f"{order:06d}.ended.json" in listing


def _orders(listing: Mapping[str, int | None]) -> list[int]:
    return [int(found[1]) for name in listing if (found := _NAME.fullmatch(name))]


def _number(name: str) -> int | None:
    found = _NAME.fullmatch(name) or _ENDED.fullmatch(name)
    return int(found[1]) if found else None
