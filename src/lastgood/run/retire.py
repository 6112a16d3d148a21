"""Deletes generations: those that retention does not keep, and older ones when the disk is full.

policy/retention.py decides which. A deletion that fails is reported once, skipped and tried again later; the other
deletions and the saves go on. A deletion has two phases (`commit.retire`): COMMIT is removed first, then the rest. A
generation without its COMMIT does not exist any more, and what remains of its folder is deleted later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

from .. import reporting
from ..errors import LastgoodError
from ..format import commit, layout
from ..limits import DELETED_AT_ONCE
from ..policy.retention import Keep, surplus, under_pressure, unlabelled, wanted
from ..ports import Stop, Tier, never
from ..records import Commit, Generation, GenerationId
from . import disk_space, paths
from .known import KnownRun
from .marks import Marks

RETRY_CLEANINGS = 16
"""A failed deletion is tried again after so many calls of `Retirement.clean`."""
MANY_DELETIONS = 10
"""So many deletions at a time take long enough that they are announced to the user first."""
DISK_FULL = "the disk is full"
"""The detail of the event `deleted` for a generation that was deleted to make room for a save."""

Decide = Callable[[Keep, list[Generation], list[Generation]], list[GenerationId]]
"""Chooses what to delete, from the retention options, the lineage (newest first) and the other generations."""


class Deletions:
    """Deletes generations and files of one run, and remembers which generations could not be deleted.

    Known causes of failure: an immutable file (`chattr +i`), files of another user, a file that an NFS client has open.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._cleanings = 0
        self._retry_at: dict[GenerationId, int] = {}

    def next_cleaning(self) -> None:
        """Count one call of `Retirement.clean`: failed deletions are tried again after RETRY_CLEANINGS of them."""
        self._cleanings += 1

    def postponed(self, at: GenerationId) -> bool:
        """Whether a deletion of `at` has failed and is not yet to be tried again."""
        return self._retry_at.get(at, 0) > self._cleanings

    def delete(self, at: GenerationId) -> bool:
        """Delete a generation in two phases. Returns whether all of it was deleted; the first failure is reported."""
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
        """Whether `at`, whose deletion failed, still has its COMMIT. True if the folder cannot be listed."""
        try:
            return layout.COMMIT in self._tier.list(layout.folder(at))
        except LastgoodError:
            return True

    def remove(self, name: str) -> bool:
        """Delete one file that is not needed any more. Returns whether it was deleted; a failure is reported."""
        try:
            self._tier.delete(name)
        except LastgoodError as error:
            reporting.warning(f"{name} could not be deleted: {error.what}. The next opening of the run tries again.")
            return False
        return True


class Retirement:
    """Deletes the generations of one run that its retention does not keep."""

    def __init__(self, known: KnownRun, marks: Marks, deletions: Deletions, keep: Keep, workers: Executor) -> None:
        self._known, self._marks, self._deletions, self._keep = known, marks, deletions, keep
        self._workers = workers
        self._was_full = self._many_reported = False

    def surplus(self) -> list[GenerationId]:
        """The generations to delete now, oldest first: unfinished deletions, then those that retention does not keep.

        Empty if the tier deletes old generations by itself.
        """
        return self._deletable(surplus)

    def clean(self, stop: Stop = never, most: int | None = None) -> None:
        """Delete what retention does not keep, oldest first, but never the generation that the pointer names.

        `most` (None: no bound): the largest number of deletions. `stop` is polled before each one. DELETED_AT_ONCE
        deletions run at the same time. Failures are reported as in `Deletions.delete`, and raise nothing.
        """
        self._marks.point()  # guard: point-before-clean
        self._deletions.next_cleaning()
        running = deque[Future[bool]]()
        with self._known.lock:
            retired = {at: self._commit_of(at) for at in self.surplus()[:most]}
        if len(retired) >= MANY_DELETIONS and not self._many_reported:
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
        """Delete one generation because the disk is full: the oldest one that newer verified ones make unnecessary.

        Retention is applied as if with `last=1`: the newest verified and the newest committed generation stay, and
        those that `every`, a milestone or `best` selects. Returns whether one was deleted. Nothing is deleted if all
        candidates together would not make room for `needed_bytes`.
        """
        place = self._known.tier.place
        with self._known.lock:
            retired = {at: self._commit_of(at) for at in self._deletable(under_pressure)}
        if not disk_space.may_fit(place, needed_bytes, sum(self._bytes_of(at) for at in retired)):
            return False
        for at, decided in retired.items():
            if self._delete(at, decided, DISK_FULL):
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
        """What `decide` and earlier, unfinished deletions name, without the pointed and the postponed generations."""
        known = self._known
        if known.tier.newest_only:
            return []
        with known.lock:
            chain = known.lineage()
            if paths.in_memory(known.tier.place):  # guard: memory-keeps-no-milestones
                chain = [unlabelled(one) for one in chain]
            of_lineage = {one.id for one in chain}
            abandoned = [one for at, one in known.survey.generations.items() if at not in of_lineage]
            going = sorted({*known.survey.going, *self._lost(chain)})
            retired = [*going, *(at for at in decide(self._keep, chain, abandoned) if at not in going)]
            named = known.survey.pointer
            pointed = GenerationId(step=named.step, incarnation=named.incarnation) if named else None
            compared = known.compared(chain)
            free = [at for at in retired if at not in known.held and at != compared]  # guard: compared-one-kept
            # guard: pointed-generation-kept
            return [at for at in free if at != pointed and not self._deletions.postponed(at)]

    def _lost(self, chain: list[Generation]) -> list[GenerationId]:
        """Generations that lack the files of a lost node, once `last` newer ones are verified. `chain`: the lineage."""
        known, last = self._known, self._keep.last
        good = sorted(one.id for one in chain if one.good)
        lost = [one for at in known.lost if (one := known.survey.generations.get(at)) is not None and one.damaged]
        return [  # guard: lost-generation-deleted
            one.id
            for one in lost
            if len(good) >= last
            and one.id < good[-last]
            and not wanted(self._keep, one.step, one.commit.milestone, one.commit.metrics)
        ]

    def _bytes_of(self, at: GenerationId) -> int:
        one = self._known.survey.generations.get(at)
        return one.bytes if one else 0

    def _commit_of(self, at: GenerationId) -> Commit | None:
        """The commit of a generation when its deletion is decided; None if it is not committed."""
        one = self._known.survey.generations.get(at)
        return one.commit if one else None

    def _delete(self, at: GenerationId, decided: Commit | None, detail: str = "") -> bool:
        """Delete a generation and emit the event. Returns whether all of it was deleted.

        `decided`: its commit at the time of the decision. If a milestone or metrics were added since, it stays, and the
        next call decides anew. As soon as its COMMIT is removed, it is no generation any more.
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
                known.lost.discard(at)
                (known.survey.going.discard if deleted else known.survey.going.add)(at)
        finally:
            with known.lock:
                known.deleting.discard(at)
        if one is not None:
            known.emit("deleted", at, detail=detail)
        return deleted
