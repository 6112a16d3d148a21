"""Resources that benchmarks use and measure: a directory to save into, memory, and space on the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


@contextmanager
def working_place(options: Any) -> Iterator[Path]:
    """A temporary directory to save into; it is deleted afterwards."""
    place = Path(tempfile.mkdtemp(prefix="bench-", dir=options.place or options.out))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def resident_bytes(others: Sequence[int] = ()) -> int:
    """Memory of this process, and of others, that is not a copy of a file: anonymous and shared."""
    total = 0
    for process in ("self", *others):
        with open(f"/proc/{process}/status") as status:
            for line in status:
                if line.startswith(("RssAnon", "RssShmem")):
                    total += 1024 * int(line.split()[1])
    return total


def stored_bytes(place: Path) -> int:
    """Bytes that the files below a directory occupy on the disk."""
    total = 0
    for folder, _, files in os.walk(place):
        for name in files:
            with suppress(FileNotFoundError):  # deleted since it was listed
                total += 512 * os.lstat(os.path.join(folder, name)).st_blocks
    return total
