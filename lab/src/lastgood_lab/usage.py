"""Resources of benchmarks: a temporary directory for saves, and measurements of memory and disk space."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastgood.io import os_errors

if TYPE_CHECKING:
    pass


@contextmanager
def working_place(options: Any) -> Iterator[Path]:
    """Make a temporary directory for saves in `options.place` or `options.out`, and delete it at the end."""
    folder = options.place or options.out
    with os_errors.translated(str(folder)):
        place = Path(tempfile.mkdtemp(prefix="bench-", dir=folder))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def resident_bytes(others: Sequence[int] = ()) -> int:
    """Bytes of anonymous and shared memory that this process and the processes `others` occupy."""
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
            with suppress(FileNotFoundError):  # deleted after it was listed
                total += 512 * os.lstat(os.path.join(folder, name)).st_blocks
    return total
