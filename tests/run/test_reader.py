"""Reading part of a run: one tensor, and nothing else of its generation."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import State, save
from lastgood.engine.inline_executor import Inline
from lastgood.errors import Damaged, NoSuchTensor
from lastgood.format import layout
from lastgood.io.files import PosixFiles
from lastgood.records import Finding, Mark
from lastgood.run.reader import RunReader
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk

STATE: State = {"weight": bytes(range(200)), "bias": b"four"}


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    save(RunWriter(Disk(PosixFiles(), str(tmp_path)), Inline()), 10, STATE, chunk_bytes=4096)
    (path,) = tmp_path.glob("gen/*/r00000.safetensors")
    return path


def test_a_flipped_byte_makes_one_tensor_unreadable_and_no_other(blob, tmp_path):
    reader, good = RunReader(Disk(PosixFiles(), str(tmp_path))), blob.read_bytes()
    extents = {piece.name: piece.extent for piece in reader.manifest(reader.generation()).pieces}
    for at in range(4096, len(good)):
        blob.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        for name, extent in extents.items():
            if extent.offset <= at < extent.offset + extent.length:
                with pytest.raises(Damaged, match=f"tensor {name} differs"):
                    reader.bytes_of(name)
            else:
                assert reader.bytes_of(name)[1] == STATE[name]


def test_reading_a_missing_tensor_is_refused_by_name(blob, tmp_path):
    with pytest.raises(NoSuchTensor, match="'gain'"):
        RunReader(Disk(PosixFiles(), str(tmp_path))).bytes_of("gain")


@pytest.mark.parametrize("name", [layout.VERIFIED, layout.DAMAGED])
def test_a_mark_of_another_commit_is_ignored(blob, tmp_path, name):
    reader = RunReader(Disk(PosixFiles(), str(tmp_path)))
    finding = [Finding(kind="SumMismatch", what="of another")] if name == layout.DAMAGED else []
    for root, believed in ((reader.generation().root, True), ("xxh3_128:" + "0" * 32, False)):
        (blob.parent / name).write_bytes(layout.encode(Mark(format=layout.FORMAT, root=root, findings=finding)))
        (found,) = reader.generations()
        assert (found.verified or bool(found.damaged)) is believed
