"""Torch-free saves and loads for tests, and the Debian packages that some of them need."""

import os
import shutil
import subprocess

from lastgood.lab.plain import State, filled, load, save

__all__ = ["State", "filled", "install", "load", "save"]


def install(package: str) -> None:
    """Where root may. A test that still lacks it is skipped, and says so."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "-qq", "--no-install-recommends"]
        subprocess.run([*command, package], stdout=subprocess.DEVNULL, check=False)
