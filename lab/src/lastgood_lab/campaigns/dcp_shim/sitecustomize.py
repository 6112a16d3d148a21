"""Loaded by every Python process of the campaign dcp_torch_tests.py, also by those that torch's tests spawn.

Lets torch's tests that are written for accelerators run on CPU under gloo, and forks their ranks where torch spawns
them, which would import torch again for each rank of each test. With DCP_STORAGE=lastgood, FileSystemWriter and
FileSystemReader of torch.distributed.checkpoint are lastgood's writer and reader.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor._ops import binary_cmp
from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils, hf_storage  # noqa: F401
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal import common_distributed, common_fsdp
from torch.testing._internal.distributed._tensor import common_dtensor

import lastgood

_init_process_group = torch.distributed.init_process_group


def _on_gloo(backend: str | None = None, *arguments: Any, **options: Any) -> None:
    """Tests of accelerators name one backend for it and one for the CPU: here both are gloo."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *arguments, **options)


_fsdp_init = FullyShardedDataParallel.__init__


def _on_cpu(self: Any, *arguments: Any, **options: Any) -> None:
    """FSDP1 takes a CPU only where it is named."""
    _fsdp_init(self, *arguments, **({"device_id": torch.device("cpu")} | options))


def _all_agree(result: bool, group: Any) -> bool:
    """What each rank found of its own shards, without an accelerator."""
    agreeing = torch.tensor([int(result)])
    torch.distributed.all_reduce(agreeing, group=group)
    return agreeing.item() == torch.distributed.get_world_size(group)


def _wherever(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test


class _OfFolder:
    """The arguments that torch's two take. A `checkpoint_id` is the folder of a run, and a save its next step."""

    def __init__(self, path: Any, *_: Any, **__: Any) -> None:
        super().__init__(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset()
        self.path = os.path.abspath(checkpoint_id or self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)


class FileSystemWriter(_OfFolder, lastgood.dcp.Writer):
    """torch's writer by its name and arguments."""


class FileSystemReader(_OfFolder, lastgood.dcp.Reader):
    """torch's reader by its name and arguments."""


def _forked(test: common_distributed.MultiProcessTestCase) -> None:
    test._start_processes(torch.multiprocessing.get_context("fork").Process)


FullyShardedDataParallel.__init__ = _on_cpu
binary_cmp._communicate_result = _all_agree
torch.distributed.init_process_group = _on_gloo
common_fsdp.FSDPTest._run = common_fsdp.FSDPTestMixin.__dict__["_run"]  # the same, without a count of accelerators
common_distributed.MultiProcessTestCase._spawn_processes = _forked
for module in (common_distributed, common_dtensor):
    for name in ("skip_if_lt_x_gpu", "requires_accelerator_dist_backend"):
        if hasattr(module, name):
            setattr(module, name, _wherever)
if os.environ["DCP_STORAGE"] == "lastgood":
    for module in (dcp, filesystem, format_utils, _storage_utils):
        for kind in (FileSystemWriter, FileSystemReader):
            if hasattr(module, kind.__name__):
                setattr(module, kind.__name__, kind)
