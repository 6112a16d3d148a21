"""The torn-snapshot check: whether tensors changed, or were replaced, while they were copied. Decides nothing.

Measurements showed that no single sign is enough: version counters miss fused optimizers and `.data`, the identity of
the storage misses every change in place, samples miss changes of a few rows. So all three are compared before and after
the copy. The samples are also compared with the copied bytes, which shows a change that was undone before the copy
ended. One change remains unseen: that of a few elements between two samples, by code that does not count versions.
`torn_check="full"` (a digest of everything before the copy) sees it too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..format.layout import Image, Segment

SAMPLES = 16
"""elements of each tensor that are compared: the first, the last, and the others evenly between these"""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Reference(NamedTuple):
    """Where the state refers to a live tensor: `container[key] is tensor` as long as the tensor is not replaced."""

    container: Mapping[Any, Any]
    key: Any
    tensor: torch.Tensor


def watchable(tensor: torch.Tensor) -> bool:
    """Whether the tensor can be checked: its elements fill memory without gaps, and torch counts its versions."""
    return not tensor.is_inference() and (tensor.is_contiguous() or _dense(tensor))


def _dense(tensor: torch.Tensor) -> bool:
    strides = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in strides:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


class Watch:
    """Live tensors to be checked, by their stored names. It is valid until one of them is moved or replaced.

    The samples of all tensors of one device and element width are a group: they are gathered by one operation.
    """

    def __init__(self, references: Mapping[str, Reference]) -> None:
        self.references = references
        self._names = list(references)
        self._tensors = [one.tensor for one in references.values()]
        self._addresses = [one.data_ptr() for one in self._tensors]
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        owners: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        self._places: dict[str, tuple[int, int, int]] = {}  # name -> group, first sample in it, elements between two
        keys: dict[tuple[torch.device, torch.dtype], int] = {}
        counts: dict[tuple[torch.device, torch.dtype], int] = defaultdict(int)
        for index, one in enumerate(self._tensors):
            if not one.numel():
                continue
            width = one.element_size()
            kind = (one.device, _INTEGERS[width])
            count = one.numel() * width // _INTEGERS[width].itemsize
            step = max((count - 1) // (SAMPLES - 1), 1)
            size = min((count - 1) // step + 1, SAMPLES)
            offset = one.storage_offset() * width // _INTEGERS[width].itemsize
            storage = one.untyped_storage()
            empty = torch.empty(0, dtype=kind[1], device=one.device)
            groups[kind].append(empty.set_(storage, offset, (size,), (step,)))
            owners[kind] += [index] * size
            group = keys.setdefault(kind, len(keys))
            if one.is_contiguous():
                self._places[self._names[index]] = (group, counts[kind], step)
            counts[kind] += size
        self._views = list(groups.values())
        self._owners = [np.asarray(owners[kind]) for kind in groups]
        self._widths = [kind[1].itemsize for kind in groups]

    def observe(self) -> Observation:
        """Versions and samples of the tensors now. On a device the current stream gathers the samples."""
        with torch.no_grad():
            samples = [torch.cat(views) for views in self._views]
        return Observation(self, [one._version for one in self._tensors], samples)

    def replaced(self, versions: Sequence[int]) -> set[str]:
        """Names of the tensors that were replaced or moved, or whose version is not the one in `versions`."""
        found = set()
        for name, address, version, (container, key, tensor) in zip(
            self._names, self._addresses, versions, self.references.values(), strict=True
        ):
            # guard: bearer-moved-or-changed
            if container.get(key) is not tensor or tensor.data_ptr() != address or tensor._version != version:
                found.add(name)
        return found

    def differing(self, group: int, wrong: np.ndarray) -> set[str]:
        """Names of the tensors to which these samples of a group belong."""
        return {self._names[index] for index in np.unique(self._owners[group][wrong])}

    def in_chunks(
        self, image: Image, chunks: Sequence[list[Segment]], in_part: Collection[str] = ()
    ) -> list[list[ChunkSamples]]:
        """The samples in each chunk of an image, and their positions.

        `in_part`: names of tensors of which the image holds only a part; their samples are left out.
        """
        return [[*self._in_chunk(image, parts, in_part)] for parts in chunks]

    def _in_chunk(self, image: Image, parts: list[Segment], in_part: Collection[str]) -> Iterator[ChunkSamples]:
        found: dict[int, tuple[list[np.ndarray], list[np.ndarray]]] = defaultdict(lambda: ([], []))
        for part in parts:
            name = image.tensors[part.tensor][0].name if part.tensor >= 0 else ""
            if name not in self._places or name in in_part:
                continue
            group, first, step = self._places[name]
            width = self._widths[group]
            # Sample n is element n * step of the tensor. Those in this part are numbers `low` to `high` - 1. A part
            # begins and ends between two elements, so its first byte in the chunk is a position in elements.
            low, high = -(-part.start // (step * width)), -(-(part.start + part.length) // (step * width))
            numbers = np.arange(low, min(high, SAMPLES))
            if len(numbers):
                positions, samples = found[group]
                positions.append((part.at - part.start) // width + numbers * step)
                samples.append(first + numbers)
        for group, (positions, samples) in found.items():
            yield ChunkSamples(group, np.concatenate(positions), np.concatenate(samples))


class ChunkSamples(NamedTuple):
    """The samples of one group in a chunk: their positions in the chunk, in elements, and indices in the group."""

    group: int
    positions: np.ndarray
    samples: np.ndarray


class Observation:
    """The versions and samples of the tensors of a `Watch` at one time."""

    def __init__(self, watch: Watch, versions: list[int], samples: list[torch.Tensor]) -> None:
        self._watch, self.versions, self._samples = watch, versions, samples
        self._arrays: list[np.ndarray] | None = None

    @property
    def arrays(self) -> list[np.ndarray]:
        """The samples, group by group; on a device this waits for them."""
        if self._arrays is None:
            self._arrays = [one.cpu().numpy() for one in self._samples]
        return self._arrays

    def differs(self, later: Observation) -> set[str]:
        """Names of the tensors whose samples differ from the later ones."""
        found: set[str] = set()
        for group, (one, other) in enumerate(zip(self.arrays, later.arrays, strict=True)):
            wrong = np.flatnonzero(one != other)
            if len(wrong):
                found |= self._watch.differing(group, wrong)
        return found

    def differs_in(self, buffer: memoryview, chunk: Sequence[ChunkSamples]) -> set[str]:
        """Names of the tensors whose samples differ from the bytes that were copied into this chunk."""
        found: set[str] = set()
        for group, positions, samples in chunk:
            expected = self.arrays[group]
            copied = np.frombuffer(buffer, dtype=expected.dtype)[positions]
            wrong = np.flatnonzero(copied != expected[samples])
            if len(wrong):
                found |= self._watch.differing(group, samples[wrong])
        return found
