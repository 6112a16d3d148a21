"""A run that is open for reading. Imports torch only where a torch tensor is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Refused
from ..extras import needed
from ..format.commit import Survey
from ..ports import Tier
from ..records import GenerationId
from ..run import access, read_places
from ..run.reader import RunReader

if TYPE_CHECKING:
    import torch


class Run(RunReader):
    """A run that is open for reading only. `lastgood.open(path)` returns one.

    What only the memory of this machine has is read from there, as `lastgood.load` does it.
    """

    def _survey(self) -> Survey:
        return read_places.found(self.tier).survey

    def _tier_of(self, at: GenerationId) -> Tier:
        return read_places.tier_of(self.tier, at)

    def tensor(self, name: str, step: int | None = None) -> torch.Tensor:
        """One tensor, as a new tensor on the CPU. Reads only its bytes and checks them against its digest.

        `name`: its stored name. `step`: the step of the generation; default None: the newest undamaged one. Raises
        NoSuchStep, NoSuchTensor, Damaged; NotInstalled without torch.

            weight = lastgood.open("runs/gpt").tensor("model.head.weight", step=4000)
        """
        with needed("torch", "Run.tensor"):
            from ..state.tensors import from_buffer

        tensor, data = self.bytes_of(name, step)
        return from_buffer(data, tensor.dtype, tensor.shape)

    def array(self, name: str, step: int | None = None) -> np.ndarray[Any, Any]:
        """One tensor, as `tensor` reads it, as a new NumPy array. Needs no torch.

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
    """Open the run at `path` for reading. Changes nothing, takes no lock and needs no torch.

    `path`: as for a Checkpointer. Raises Refused, NotARun, NotWritable, TierDown.

        steps = [one.step for one in lastgood.open("runs/gpt").generations()]
    """
    return Run(access.for_reading(path))
