"""A rank of `lastgood bench restart`: `-m lastgood_lab.restart_rank FOLDER CONTENDER FAULT`, under any launcher.

It notes when it begins and when it has imported the training (restart_job.py), which it then runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lastgood_lab import restart_notes


def main() -> None:
    folder = Path(sys.argv[1])
    restart_notes.write(folder, "began")
    from lastgood_lab import restart_job

    restart_notes.write(folder, "imported")
    restart_job.train(folder, sys.argv[2], sys.argv[3])


if __name__ == "__main__":
    main()
