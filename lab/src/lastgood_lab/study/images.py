"""The images of the study, as arrays: those that ship with scikit-learn, or the files of CIFAR where a path is given.

digits    1,797 scans of digits of 8 x 8 pixels, 10 classes                                   for CIFAR-10
photos    patches of two photographs; the class is the field of a grid where a patch lies     for CIFAR-100
cifar10, cifar100    `data_batch_1` ..., or `train`, as the archives of the Python version hold them
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from lastgood.errors import Refused

PATCHES, GRID = 2000, 7
"""of each photograph; GRID squared fields each, so 98 classes of two photographs"""


class Cifar(NamedTuple):
    """A dataset of CIFAR. `archive`: its file, which unpacks to the folder `unpacks_to`. `labels`: their key."""

    archive: str
    unpacks_to: str
    labels: bytes
    classes: int


CIFAR = {
    "cifar10": Cifar("cifar-10-python.tar.gz", "cifar-10-batches-py", b"labels", 10),
    "cifar100": Cifar("cifar-100-python.tar.gz", "cifar-100-python", b"fine_labels", 100),
}


def write(dataset: str, side: int, path: Path, cifar: Path | None = None) -> None:
    """Write images (uint8 [n, 3, side, side]), labels (int64 [n]) and the number of classes to `path`.

    `cifar`: the folder with the folders of CIFAR. Raises OSError.
    """
    if dataset == "digits":
        from sklearn.datasets import load_digits

        scans, labels = load_digits(return_X_y=True)
        images = torch.tensor(scans / 16, dtype=torch.float32).view(-1, 1, 8, 8).expand(-1, 3, 8, 8)
    elif dataset == "photos":
        images, labels = _patches(side)
    else:
        assert cifar is not None, "the command asks for the folder"
        images, labels = _cifar(dataset, cifar)
    sized = F.interpolate(images, (side, side), mode="bilinear", align_corners=False)
    pixels = (255 * sized).round().to(torch.uint8).numpy()
    draft = path.with_suffix(".tmp")
    with open(draft, "wb") as file:
        np.savez(file, images=pixels, labels=np.asarray(labels, np.int64), classes=int(max(labels)) + 1)
    draft.rename(path)


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What `write` has written."""
    with np.load(path) as found:
        return torch.from_numpy(found["images"]), torch.from_numpy(found["labels"]), int(found["classes"])


def _patches(side: int) -> tuple[torch.Tensor, np.ndarray]:
    """Patches of two photographs, at places that a fixed seed draws."""
    from sklearn.datasets import load_sample_images

    chance, images, labels = np.random.default_rng(0), [], []
    for at, photo in enumerate(load_sample_images().images):
        high, wide = photo.shape[0] - side, photo.shape[1] - side
        for y, x in zip(chance.integers(0, high, PATCHES), chance.integers(0, wide, PATCHES), strict=True):
            images.append(photo[y : y + side, x : x + side])
            labels.append((at * GRID + y * GRID // high) * GRID + x * GRID // wide)
    return torch.tensor(np.stack(images), dtype=torch.float32).permute(0, 3, 1, 2) / 255, np.array(labels)


def cifar_files(dataset: str, folder: Path) -> list[Path]:
    """The files with the training images of a dataset of CIFAR: in a folder of its name, or as its archive unpacks."""
    names = [f"data_batch_{at}" for at in range(1, 6)] if dataset == "cifar10" else ["train"]
    unpacked = folder / CIFAR[dataset].unpacks_to
    return [(unpacked if unpacked.is_dir() else folder / dataset) / name for name in names]


def require_cifar(dataset: str, folder: Path) -> None:
    """Raise Refused unless all files of a dataset of CIFAR are there and can be read."""
    for path in cifar_files(dataset, folder):
        try:
            pixels, labels = _batch(dataset, path)
            wrong = _wrong(dataset, pixels, labels)
        except FileNotFoundError:
            wrong = "there is no such file"
        except Exception as error:  # noqa: BLE001 - bytes that are no pickle may raise any exception
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            todo = f"Unpack {CIFAR[dataset].archive} (the Python version) there."
            raise Refused(f"--cifar: {path}: {wrong}", safe="Nothing was run.", todo=todo)


def digest(dataset: str, cifar: Path | None) -> str:
    """Of the files of a dataset of CIFAR; empty for images that ship with scikit-learn."""
    if dataset not in CIFAR or cifar is None:
        return ""
    found = hashlib.sha256()
    for path in cifar_files(dataset, cifar):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _wrong(dataset: str, pixels: np.ndarray, labels: Sequence[int]) -> str:
    """What is wrong with a file of CIFAR; empty if nothing is."""
    classes = CIFAR[dataset].classes
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3 * 32 * 32:
        return f"its images are {pixels.dtype} {list(pixels.shape)}, and not uint8 [n, 3072]"
    if len(labels) != len(pixels):
        return f"it has {len(pixels)} images and {len(labels)} labels"
    if not all(0 <= one < classes for one in labels):
        return f"it has labels that are not from 0 to {classes - 1}"
    return ""


def _cifar(dataset: str, folder: Path) -> tuple[torch.Tensor, np.ndarray]:
    """The training images of CIFAR, whose files were examined."""
    batches = [_batch(dataset, path) for path in cifar_files(dataset, folder)]
    pixels = np.concatenate([one for one, _ in batches]).reshape(-1, 3, 32, 32)
    return torch.tensor(pixels, dtype=torch.float32) / 255, np.concatenate([labels for _, labels in batches])


def _batch(dataset: str, path: Path) -> tuple[np.ndarray, Sequence[int]]:
    """Pixels and labels of a file. It is a pickle: only numpy arrays and plain values are taken from it."""
    with open(path, "rb") as file:
        found = _Plain(file, encoding="bytes").load()
    return np.asarray(found[b"data"]), found[CIFAR[dataset].labels]


class _Plain(pickle.Unpickler):
    """Refuses every class but those of which numpy makes arrays."""

    def find_class(self, module: str, name: str) -> object:
        if module.split(".")[0] != "numpy" or name not in ("_reconstruct", "ndarray", "dtype"):
            raise pickle.UnpicklingError(f"{module}.{name} in a file of CIFAR")
        return super().find_class(module, name)
