"""The folders that `lastgood run` is given for what it writes: made, and written to, before anything starts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..errors import NoSpace, Refused
from ..io.os_errors import USED_UP
from .arguments import Job


def require_writable(job: Job) -> None:
    """Make the folders of --records and --log-dir, and make a folder in each and remove it.

    Raises Refused where that cannot be, and NoSpace where it is full.
    """
    if job.records is not None:
        _require_writable("--records", job.records, "lastgood-")
    if job.log_dir is not None:
        _require_writable("--log-dir", job.log_dir, f"{job.run_id}_")  # as the folder of a supervisor


def _require_writable(option: str, folder: Path, prefix: str) -> None:
    """`prefix`: of the name of a folder in it, with folders before the name if it has slashes."""
    try:
        (folder / prefix).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=Path(prefix).name, dir=(folder / prefix).parent):
            pass
    except OSError as error:
        if error.errno in USED_UP:  # it may have room later
            raise NoSpace(
                f"no space left for {option} {folder}: {error.strerror}",
                safe="Nothing was started.",
                todo="Free space there, or give another folder.",
            ) from error
        raise Refused(
            f"{option} {folder} cannot be written: {error.strerror}",
            safe="Nothing was started.",
            todo="Give a folder that can be written, or that can be made.",
        ) from error
