"""torch.distributed.checkpoint's save and load in one process, with lastgood as the storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

import lastgood


def save(state: dict[str, Any], root: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=lastgood.dcp.Writer(root), no_dist=True, **options)


def load(state: dict[str, Any], root: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=lastgood.dcp.Reader(root), no_dist=True, **options)
