"""Deletion of generations: what retention does not keep, and what a full disk needs. Decides by policy/retention.py.

A deletion that fails is reported once, skipped, and tried again later; it stops nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

from .. import reporting
from ..errors import LastgoodError
from ..format import commit, layout
from ..policy.retention import Keep, surplus, under_pressure
from ..ports import Tier
from ..records import Commit, Generation, GenerationId
from . import disk_space
from .known import KnownRun
from .marks import Marks

RETRY_CLEANINGS = 16
"""calls of `Retirement.clean` after which a generation that could not be deleted is tried again"""
MANY = 10
"""deletions that take long enough to be reported before they begin"""
DELETED_AT_ONCE = 3
"""generations deleted side by side"""
FULL = "the disk is full"
"""detail of the event of a generation that was deleted to make room for a save"""

Decide = Callable[[Keep, list[Generation], list[Generation]], list[GenerationId]]
"""what may be deleted: of what is kept, the lineage (newest first) and the generations outside of it"""


class Deletions:
    """Deletes generations and files of one run, and remembers which generations could not be deleted.

    Causes that were seen: an immutable file (`chattr +i`), files of another user, a file that an NFS client has open.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._cleanings = 0
        self._retry_at: dict[GenerationId, int] = {}

    def next_cleaning(self) -> None:
        """Count one call of `Retirement.clean`."""
        self._cleanings += 1

    def postponed(self, at: GenerationId) -> bool:
        """Whether deleting `at` failed, and it is too early to try again."""
        return self._retry_at.get(at, 0) > self._cleanings

    def delete(self, at: GenerationId) -> bool:
        """Delete a generation in two phases. Returns whether all of it is gone; where not, why is reported once."""
        try:
            commit.retire(self._tier, at)
        except LastgoodError as error:
            if at not in self._retry_at:
                reporting.warning(
                    f"{at} could not be deleted: {error.what}. It is skipped and tried again later; the others are "
                    "deleted as ever. Check the owner and the attributes (lsattr) of its files."
                )
            self._retry_at[at] = self._cleanings + RETRY_CLEANINGS
            return False
        self._retry_at.pop(at, None)
        return True

    def committed(self, at: GenerationId) -> bool:
        """Whether `at`, which could not be deleted, is a generation still. True where that cannot be found out."""
        try:
            return layout.COMMIT in self._tier.list(layout.folder(at))
        except LastgoodError:
            return True

    def remove(self, name: str) -> bool:
        """Delete one file that nothing needs. Returns whether it is gone; where not, why is reported."""
        try:
            self._tier.delete(name)
        except LastgoodError as error:
            reporting.warning(f"{name} could not be deleted: {error.what}. The next opening of the run tries again.")
            return False
        return True


class Retirement:
    """Deletes what one run does not keep."""

    def __init__(self, known: KnownRun, marks: Marks, deletions: Deletions, keep: Keep, workers: Executor) -> None:
        self._known, self._marks, self._deletions, self._keep = known, marks, deletions, keep
        self._workers = workers
        self._was_full = self._many_reported = False

    def surplus(self) -> list[GenerationId]:
        """What is to be deleted now, oldest first: what retention does not keep, and the rest of earlier deletions.

        Nothing where the tier deletes by itself.
        """
        return self._deletable(surplus)

    def clean(self, stop: Callable[[], bool] = lambda: False, most: int | None = None) -> None:
        """Delete what retention does not keep, oldest first, each in two phases; never what the pointer still names.

        At most `most` generations, and none after `stop()`; some at a time, so that they share the waits for the disk.
        What cannot be deleted is skipped and tried again later.
        """
        self._marks.point()  # guard: point-before-clean
        self._deletions.next_cleaning()
        running = deque[Future[bool]]()
        with self._known.lock:
            retired = {at: self._commit_of(at) for at in self.surplus()[:most]}
        if len(retired) >= MANY and not self._many_reported:
            self._many_reported = True
            place = self._known.tier.place
            reporting.info(f"{place}: deleting {len(retired)} generations that retention does not keep")
        for at, decided in retired.items():
            if stop():
                break
            if len(running) == DELETED_AT_ONCE:
                running.popleft().result()
            running.append(self._workers.submit(self._delete, at, decided))
        for one in running:
            one.result()

    def relieve(self, needed_bytes: int = 0) -> bool:
        """The disk is full: delete the oldest generation that newer verified ones make needless, whatever `last` says.

        Returns whether one was deleted: none where all of them together would not make room for `needed_bytes`. Pinned
        generations, the newest verified and the newest committed one stay.
        """
        place = self._known.tier.place
        with self._known.lock:
            retired = {at: self._commit_of(at) for at in self._deletable(under_pressure)}
        if not disk_space.may_fit(place, needed_bytes, sum(self._bytes_of(at) for at in retired)):
            return False
        for at, decided in retired.items():
            if self._delete(at, decided, FULL):
                if not self._was_full:
                    reporting.warning(
                        f"the disk of {place} is full: {at} was deleted to make room for the next save, and "
                        "older ones will be, down to the newest verified one. Free space on this disk, or keep fewer "
                        "generations (retention=Keep(last=...))."
                    )
                self._was_full = True
                return True
        return False

    def _deletable(self, decide: Decide) -> list[GenerationId]:
        known = self._known
        if known.tier.newest_only:
            return []
        with known.lock:
            chain = known.lineage()
            of_lineage = {one.id for one in chain}
            abandoned = [one for at, one in known.survey.generations.items() if at not in of_lineage]
            retired = [*sorted(known.survey.going), *decide(self._keep, chain, abandoned)]
            named = known.survey.pointer
            pointed = GenerationId(step=named.step, incarnation=named.incarnation) if named else None
            # guard: pointed-generation-kept
            return [at for at in retired if at != pointed and not self._deletions.postponed(at)]

    def _bytes_of(self, at: GenerationId) -> int:
        one = self._known.survey.generations.get(at)
        return one.bytes if one else 0

    def _commit_of(self, at: GenerationId) -> Commit | None:
        """The commit on which a decision to delete rests; None for what is not committed."""
        one = self._known.survey.generations.get(at)
        return one.commit if one else None

    def _delete(self, at: GenerationId, decided: Commit | None, detail: str = "") -> bool:
        """Whether it is deleted. From the moment that its COMMIT is removed it is no generation any more, but litter.

        `decided`: its commit when it was decided on. With a milestone or metrics that were added since, it stays until
        the next decision.
        """
        known = self._known
        with known.lock:
            if at in known.labelling or self._commit_of(at) != decided:  # guard: labelled-generation-not-deleted
                return False
            known.deleting.add(at)
        try:
            deleted = self._deletions.delete(at)  # guard: deleted-before-forgotten
            if not deleted and self._deletions.committed(at):  # guard: uncommitted-counts-as-deleted
                return False
            with known.lock:
                one = known.survey.generations.pop(at, None)
                (known.survey.going.discard if deleted else known.survey.going.add)(at)
        finally:
            known.deleting.discard(at)
        if one is not None:
            known.emit("deleted", at, detail=detail)
        return deleted
