"""Packages that only a part of lastgood needs, installed by an extra: `pip install 'lastgood[torch]'`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .errors import NotInstalled

PACKAGES = {
    "torch": ("torch",),
    "cli": ("typer", "rich", "yaml"),
    "objects": ("obstore", "boto3", "botocore"),
    "transformers": ("transformers", "accelerate"),
    "lightning": ("torchmetrics", "lightning", "pytorch_lightning"),
    "accelerate": ("accelerate",),
    "nixl": ("nixl_cu12",),
}
"""extra -> the packages of it that lastgood imports"""


@contextlib.contextmanager
def needed(extra: str, what: str) -> Iterator[None]:
    """Raises NotInstalled if an import in the body of the `with` statement misses a package of this extra.

    `what` names the part of lastgood that the user asked for, such as "lastgood.Checkpointer".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES[extra]:
            raise
        raise NotInstalled(what, error.name, f"pip install 'lastgood[{extra}]'") from error
