"""The images of the study, as arrays: those that ship with scikit-learn, or the files of CIFAR where a path is given.

digits    1,797 scans of digits of 8 x 8 pixels, 10 classes                                   for CIFAR-10
photos    patches of two photographs; the class is the field of a grid where a patch lies     for CIFAR-100
cifar10, cifar100    `data_batch_1` ..., or `train`, as their archives hold them
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

PATCHES, GRID = 2000, 7
"""of each photograph; GRID squared fields each, so 98 classes of two photographs"""


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
    np.savez(path, images=pixels, labels=np.asarray(labels, np.int64), classes=int(max(labels)) + 1)


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
    """The files with the training images of a dataset of CIFAR, in a folder of its name."""
    names = [f"data_batch_{at}" for at in range(1, 6)] if dataset == "cifar10" else ["train"]
    return [folder / dataset / name for name in names]


def _cifar(dataset: str, folder: Path) -> tuple[torch.Tensor, np.ndarray]:
    """The training images of CIFAR. Its files are pickles: only numpy arrays and plain values are taken from them."""
    batches = []
    for path in cifar_files(dataset, folder):
        with open(path, "rb") as file:
            batches.append(_Plain(file, encoding="bytes").load())
    labels = np.concatenate([one[b"labels" if dataset == "cifar10" else b"fine_labels"] for one in batches])
    pixels = np.concatenate([one[b"data"] for one in batches]).reshape(-1, 3, 32, 32)
    return torch.tensor(pixels, dtype=torch.float32) / 255, labels


class _Plain(pickle.Unpickler):
    """Refuses every class but those of which numpy makes arrays."""

    def find_class(self, module: str, name: str) -> object:
        if module.split(".")[0] != "numpy" or name not in ("_reconstruct", "ndarray", "dtype"):
            raise pickle.UnpicklingError(f"{module}.{name} in a file of CIFAR")
        return super().find_class(module, name)
