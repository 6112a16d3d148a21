"""Deletion of generations. A deletion that fails is reported once, skipped, and tried again later; it stops nothing."""

from __future__ import annotations

from .. import reporting
from ..errors import LastgoodError
from ..format import commit, layout
from ..ports import Tier
from ..records import GenerationId

RETRY_CLEANINGS = 16
"""calls of `RunWriter.clean` after which a generation that could not be deleted is tried again"""


class Deletions:
    """Deletes generations and files of one run, and remembers which generations could not be deleted.

    Causes that were seen: an immutable file (`chattr +i`), files of another user, a file that an NFS client has open.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._cleanings = 0
        self._retry_at: dict[GenerationId, int] = {}

    def next_cleaning(self) -> None:
        """Count one call of `RunWriter.clean`."""
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
