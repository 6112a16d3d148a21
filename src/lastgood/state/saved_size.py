"""How many bytes a captured state takes once it is saved: an upper estimate, before any save. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from ..limits import PAGE_BYTES
from .capture import Captured

ENTRY_BYTES = 320
"""what header and manifest hold of one tensor, without its name, which is in both"""
FILES = 2
"""of each rank, tensors and manifest: each ends within a block of the file system"""
RECORDS_BYTES = 3 * PAGE_BYTES
"""what each generation takes beside the files of its ranks: COMMIT, VERIFIED and the folder, a block each"""


def tensor_bytes(name: str, tensor: torch.Tensor) -> int:
    """The bytes of one tensor, as far as this process holds it, with its entries in header and manifest."""
    return tensor.numel() * tensor.element_size() + ENTRY_BYTES + 2 * len(name)


def beside_bytes(values: Mapping[str, Any]) -> int:
    """The bytes of the files of one rank beside its tensors. `values`: those of the state (`Captured.values`)."""
    return len(msgspec.json.encode(values)) + FILES * PAGE_BYTES


def saved_bytes(captured: Captured) -> int:
    """The bytes of the files of a process that saves all of this state."""
    return beside_bytes(captured.values) + sum(tensor_bytes(*item) for item in captured.tensors.items())
