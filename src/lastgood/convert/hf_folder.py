"""Reads folders of Hugging Face for `lastgood import`: one `.safetensors`, or several shards and their index."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import cast

from ..errors import ManifestInvalid
from ..io import os_errors
from ..io.files import PosixFiles
from .exporting import HF_FILE, HF_INDEX
from .importing import Foreign, Read, safetensors


@contextlib.contextmanager
def opened(folder: str, prefix: str) -> Iterator[Foreign]:
    """The contents of all files of the folder. Raises ManifestInvalid if the index and the files disagree; OSError."""
    index = _index(folder)
    names = sorted(set(index.values())) if index else [HF_FILE]
    reads: dict[str, Read] = {}
    whole = Foreign(lambda name, start, mv: reads[name](name, start, mv))
    with contextlib.ExitStack() as files:
        for name in names:
            path = os.path.join(folder, name)
            with os_errors.translated(path):
                file = PosixFiles().open(os.path.realpath(path), "read")
            files.callback(file.close)
            part = safetensors(file, path, prefix)
            mine = {prefix + tensor for tensor, of in index.items() if of == name}
            if index and mine != part.names:
                odd = ", ".join(sorted(mine ^ part.names)[:3])
                raise ManifestInvalid(f"{path} and {HF_INDEX} disagree about {odd}", safe="Nothing was touched.")
            for one in part.tensors:
                whole.add(one.name, one.dtype, one.shape)
                reads[one.name] = part.read
        yield whole


def _index(folder: str) -> dict[str, str]:
    """Name of a tensor -> file that holds it; empty if the folder has no index. Raises ManifestInvalid."""
    path = os.path.join(folder, HF_INDEX)
    if not os.path.lexists(path):
        return {}
    try:
        with os_errors.translated(path), open(path, "rb") as file:
            found = json.load(file)["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestInvalid(f"{path} is no index of shards: {error}", safe="Nothing was touched.") from error
    plain = isinstance(found, dict) and all(isinstance(of, str) and of == os.path.basename(of) for of in found.values())
    if not plain or not found or not all(of.endswith(".safetensors") for of in found.values()):
        raise ManifestInvalid(f"{path} names something other than files beside it", safe="Nothing was touched.")
    return cast(dict[str, str], found)
