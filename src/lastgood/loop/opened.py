"""A run that is open for reading. Imports torch only where a torch tensor is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Refused
from ..extras import needed
from ..run import access
from ..run.reader import RunReader

if TYPE_CHECKING:
    import torch


class Run(RunReader):
    """A run, for reading only; see `lastgood.open`."""

    def tensor(self, name: str, step: int | None = None) -> torch.Tensor:
        """One tensor by its stored name, from the newest undamaged generation or from `step`.

        Reads its bytes only and checks them against its digest. CPU tensor. Raises NoSuchStep, NoSuchTensor, Damaged;
        NotInstalled without torch.
        """
        with needed("torch", "Run.tensor"):
            from ..state.tensors import from_buffer

        tensor, data = self.bytes_of(name, step)
        return from_buffer(data, tensor.dtype, tensor.shape)

    def array(self, name: str, step: int | None = None) -> np.ndarray[Any, Any]:
        """The same tensor as a new NumPy array, without torch.

        Raises NoSuchStep, NoSuchTensor, Damaged; Refused for a dtype that NumPy does not have, such as bfloat16.
        """
        tensor, data = self.bytes_of(name, step)
        try:
            dtype = np.dtype(tensor.dtype)
        except TypeError as error:
            raise Refused(
                f"{name} is of dtype {tensor.dtype}, which NumPy does not have",
                safe="Nothing was touched.",
                todo="Take Run.tensor (it needs torch), or Run.bytes_of for the bytes.",
            ) from error
        return np.frombuffer(data, dtype).reshape(tensor.shape)


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run for reading; changes nothing, needs no lock and no torch. Raises NotARun, NotWritable."""
    return Run(access.for_reading(path))
