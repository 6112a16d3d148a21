"""The layout: every byte of an image has one place, any safetensors reader opens it, and records round-trip."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from harness import load, save
from lastgood.engine.arena import Arena
from lastgood.engine.content_digest import Contents
from lastgood.engine.inline_executor import Inline
from lastgood.errors import ManifestInvalid, SumMismatch, UnknownFormat
from lastgood.format import layout, validation, values
from lastgood.format.commit import read_manifest, survey
from lastgood.format.layout import DTYPES, Tensor
from lastgood.io.checksum import ALGORITHMS, digest
from lastgood.io.files import PosixFiles
from lastgood.limits import PAGE_BYTES, STEP_LIMIT
from lastgood.policy.restore import lineage
from lastgood.records import (
    Blob,
    Commit,
    Extent,
    Finding,
    GenerationId,
    Incarnation,
    Manifest,
    Mark,
    Piece,
    Pointer,
    RunHeader,
    Seal,
    World,
)
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood_lab.plain import read_rank

NUMPY = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
]
CARRIED = sorted(name for name, (_, native) in DTYPES.items() if not native)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = text.filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def tensors_of(dtypes: list[str]) -> st.SearchStrategy[Tensor]:
    """Whole tensors as the pieces of an image."""
    whole = st.just(())
    return st.builds(Tensor, names, st.sampled_from(dtypes), shapes, st.booleans(), whole, whole, st.just(False))


tensor_lists = st.lists(tensors_of(sorted(DTYPES)), max_size=12, unique_by=lambda one: one.name)


def whole(tensors: list[Tensor]) -> layout.Image:
    (image,) = layout.images(tensors)
    return image


def content(tensor: Tensor) -> bytes:
    """Bytes that are valid for every type (a bool is 0 or 1) and differ between tensors."""
    seed = digest("xxh3_128", tensor.name.encode())
    return bytes(int(seed[i % 32], 16) & 1 for i in range(tensor.length))


def file_of(image: layout.Image) -> bytes:
    return image.header + b"".join(content(tensor) for tensor, _ in image.tensors)


def header_of(image: layout.Image) -> dict:
    assert int.from_bytes(image.header[:8], "little") == len(image.header) - 8
    return json.loads(image.header[8:])


def pieces_of(image: layout.Image) -> list[Piece]:
    return [
        Piece(
            name=one.name,
            dtype=one.dtype,
            shape=list(one.shape),
            extent=Extent(blob=image.blob, offset=offset, length=one.length),
            digest="",
        )
        for one, offset in image.tensors
    ]


# ---- images ----------------------------------------------------------------------------------------------------


@given(tensor_lists, st.integers(500, 5000) | st.sampled_from([4096, 8192, 1 << 20]))
def test_every_byte_of_an_image_is_covered_exactly_once(tensors, chunk_bytes):
    image = whole(tensors)
    data, covered = file_of(image), bytearray(image.length)
    chunks = list(layout.segments(image, chunk_bytes))
    assert len(chunks) == -(-image.length // chunk_bytes)
    built = bytearray(image.length)
    for index, parts in enumerate(chunks):
        for place, start, at, length in parts:
            low = index * chunk_bytes + at
            assert length >= 0 and at + length <= chunk_bytes
            covered[low : low + length] = bytes(one + 1 for one in covered[low : low + length])
            source = image.header if place < 0 else content(image.tensors[place][0])
            built[low : low + length] = source[start : start + length]
    assert covered == b"\x01" * image.length
    assert built == data


@given(tensor_lists, st.integers(1, 5000))
def test_tensors_are_emitted_in_order_and_an_empty_one_once(tensors, chunk_bytes):
    image = whole(tensors)
    ends: dict[int, int] = {}
    order = []
    for parts in layout.segments(image, chunk_bytes):
        for place, start, _, length in parts:
            assert start == ends.get(place, 0), "a byte was left out, or written twice"
            assert place not in ends or length > 0
            ends[place] = start + length
            order.append(place)
    assert order == sorted(order)
    assert ends.keys() == {-1, *range(len(image.tensors))}
    assert all(ends[place] == tensor.length for place, (tensor, _) in enumerate(image.tensors))


@given(tensor_lists, st.booleans(), st.integers(0, 3 * PAGE_BYTES), st.integers(1, 3))
def test_the_digests_match_all_images_including_empty_ones(tensors, without_elements, header_limit, pages):
    """A file without tensors, of a state or a rank that has none, raised ValueError when its pieces were listed."""
    if without_elements:
        tensors = [one._replace(shape=(0, *one.shape)) for one in tensors]
    found = []
    for image in layout.images(tensors, header_limit=header_limit):
        data, contents = file_of(image), Contents(image, "xxh3_128")
        for low in range(0, len(data), pages * PAGE_BYTES):
            contents.see(memoryview(data)[low : low + pages * PAGE_BYTES])
        found += contents.pieces()
    expected = {one.key: one for one in tensors}
    assert {one.key for one in found} == expected.keys() and len(found) == len(expected)
    for piece in found:
        one = expected[piece.key]
        hasher = layout.content_hasher("xxh3_128", one.dtype, one.shape)
        hasher.update(content(one))
        assert (piece.extent.length, piece.digest) == (one.length, hasher.hexdigest())


@given(tensor_lists)
def test_data_starts_on_a_page_and_each_tensor_is_aligned_to_its_element(tensors):
    image = whole(tensors)
    assert len(image.header) % PAGE_BYTES == 0
    end = len(image.header)
    for tensor, offset in image.tensors:
        assert offset == end
        assert offset % max(1, DTYPES[tensor.dtype][0] // 8) == 0
        end = offset + tensor.length
    assert end == image.length


@given(tensor_lists)
def test_any_safetensors_reader_opens_the_file(tmp_path_factory, tensors):
    image = whole(tensors)
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(file_of(image))
    entries = header_of(image)
    assert entries.pop("__metadata__") == {"format": "pt"}
    with safetensors.safe_open(path, framework="numpy") as opened:
        assert set(opened.keys()) == entries.keys() == {one.name for one in tensors}
        for tensor, _ in image.tensors:
            one = opened.get_slice(tensor.name)
            native = DTYPES[tensor.dtype][1]
            assert one.get_dtype() == (native or "U8")
            assert one.get_shape() == (list(tensor.shape) if native else [tensor.length])
    for tensor, offset in image.tensors:
        low, high = entries[tensor.name]["data_offsets"]
        assert (low, high) == (offset - len(image.header), offset - len(image.header) + tensor.length)


@given(st.lists(tensors_of(NUMPY), max_size=8, unique_by=lambda one: one.name))
def test_native_dtypes_round_trip_through_safetensors(tmp_path_factory, tensors):
    path = tmp_path_factory.getbasetemp() / "native.safetensors"
    path.write_bytes(file_of(whole(tensors)))
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == {one.name for one in tensors}
    for tensor in tensors:
        array = loaded[tensor.name]
        assert array.dtype == np.dtype(tensor.dtype) and array.shape == tensor.shape
        assert array.tobytes() == content(tensor)


@pytest.mark.parametrize("dtype", CARRIED)
def test_dtypes_that_safetensors_lacks_are_stored_as_flat_bytes(dtype):
    tensor = Tensor("x", dtype, (3, 2))
    image = whole([tensor])
    assert header_of(image)["x"] == {"dtype": "U8", "shape": [tensor.length], "data_offsets": [0, tensor.length]}
    assert safetensors.numpy.load(file_of(image))["x"].tobytes() == content(tensor)


@given(tensor_lists, st.integers(0, 4 * PAGE_BYTES))
def test_a_header_past_the_limit_is_split_over_several_files(tensors, limit):
    images = layout.images(tensors, rank=3, header_limit=limit)
    assert [image.blob for image in images] == [layout.blob_name(3, part) for part in range(len(images))]
    stored = [tensor for image in images for tensor, _ in image.tensors]
    assert sorted(stored) == sorted(tensors)
    for image in images:
        assert header_of(image).keys() - {"__metadata__"} == {tensor.name for tensor, _ in image.tensors}
        assert len(image.header) <= max(limit, PAGE_BYTES) or len(image.tensors) == 1


def test_many_small_names_fill_the_files_up_to_the_limit():
    limit = 10 * PAGE_BYTES
    images = layout.images([Tensor(f"layer.{i:05d}.weight", "float32", (1, 2, 3)) for i in range(2000)], 0, limit)
    assert 2 <= len(images) <= 20
    assert all(limit // 4 < len(image.header) <= limit for image in images[:-1])


def test_scalars_lie_side_by_side_before_what_is_long():
    """They lay among the long tensors, each in another chunk, and a rank that wanted them all read all these chunks."""
    shapes = {"a.exp_avg": (1024,), "a.step": (), "b.exp_avg": (1024,), "b.step": ()}
    (image,) = layout.images([Tensor(name, "float32", shape) for name, shape in shapes.items()])
    assert [one.name for one, _ in image.tensors] == ["a.step", "b.step", "a.exp_avg", "b.exp_avg"]


@given(tensor_lists, tensor_lists, st.data())
def test_the_header_that_a_reader_expects_equals_the_written_one(tensors, others, data):
    image = whole(tensors)
    pieces = pieces_of(image)
    blob = Blob(name=image.blob, length=image.length, chunk_bytes=4096, chunks=[])
    validation.validate_header(image.header, blob, pieces)
    at = data.draw(st.integers(0, len(image.header) - 1))
    changed = bytearray(image.header)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ManifestInvalid, match="header does not agree"):
        validation.validate_header(bytes(changed), blob, pieces)
    if whole(others).header != image.header:
        with pytest.raises(ManifestInvalid, match="header does not agree"):
            validation.validate_header(whole(others).header, blob, pieces)


@given(tensor_lists, st.integers(1, 4))
def test_the_extents_of_the_chunks_make_up_the_blob(tensors, pages):
    image, chunk_bytes = whole(tensors), pages * PAGE_BYTES
    blob = Blob(name=image.blob, length=image.length, chunk_bytes=chunk_bytes, chunks=[])
    covered = 0
    for chunk, _ in enumerate(layout.segments(image, chunk_bytes)):
        extent = layout.extent_of(blob, chunk)
        assert extent.offset == covered and 0 < extent.length <= chunk_bytes
        covered += extent.length
    assert covered == image.length


@given(st.sampled_from(sorted(DTYPES)), shapes)
def test_the_content_digest_distinguishes_dtype_shape_and_bytes(dtype, shape):
    one = layout.content_hasher("xxh3_128", dtype, shape)
    again = layout.content_hasher("xxh3_128", dtype, shape)
    taller = layout.content_hasher("xxh3_128", dtype, (*shape, 1))
    other = layout.content_hasher("xxh3_128", "uint8" if dtype != "uint8" else "int8", shape)
    for hasher in (one, again, taller, other):
        hasher.update(b"same bytes")
    assert one.hexdigest() == again.hexdigest()
    assert len({one.hexdigest(), taller.hexdigest(), other.hexdigest()}) == 3


def test_the_content_digest_equals_that_of_the_format_page():
    hasher = layout.content_hasher("sha256", "float32", (3, 4))
    hasher.update(bytes(48))
    assert hasher.hexdigest() == digest("sha256", b"float32[3, 4]\n" + bytes(48))


# ---- records ---------------------------------------------------------------------------------------------------

steps = st.integers(0, STEP_LIMIT - 1)
idents = st.integers(0, 2**32 - 1).map(lambda n: f"{n:08x}")
ids = st.builds(GenerationId, step=steps, incarnation=idents)
sizes = st.integers(0, 2**63 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
findings = st.builds(Finding, kind=text, what=text, blob=text, offset=sizes, chunk=st.integers(-1, 9), tensor=text)
records = st.one_of(
    st.builds(RunHeader, format=st.just(1), run=idents),
    st.builds(Pointer, format=st.just(1), step=steps, incarnation=idents, root=text),
    st.builds(Incarnation, format=st.just(1), order=st.integers(1, 999_999), id=idents, parent=st.none() | ids),
    st.builds(Mark, format=st.just(1), root=text, findings=st.lists(findings, max_size=3)),
    st.builds(
        Commit,
        format=st.just(1),
        run=idents,
        step=steps,
        incarnation=idents,
        order=sizes,
        world=st.builds(World, ranks=st.integers(1, 9)),
        parent=st.none() | ids,
        continues=st.none() | ids,
        seals=st.lists(st.builds(Seal, rank=st.integers(0, 9), manifest=text, length=sizes, digest=text), max_size=3),
        created=st.floats(allow_nan=False, allow_infinity=False),
        milestone=st.booleans(),
        metrics=st.dictionaries(text, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    ),
    st.builds(
        Manifest,
        format=st.just(1),
        step=steps,
        incarnation=idents,
        rank=st.integers(0, 99_999),
        digest=st.sampled_from(sorted(ALGORITHMS)),
        blobs=st.lists(st.builds(Blob, name=text, length=sizes, chunk_bytes=sizes, chunks=st.lists(text)), max_size=2),
        pieces=st.lists(
            st.builds(
                Piece,
                name=text,
                dtype=st.sampled_from(sorted(DTYPES)),
                shape=st.lists(sizes, max_size=3),
                extent=st.builds(Extent, blob=text, offset=sizes, length=sizes),
                digest=text,
            ),
            max_size=2,
        ),
        aliases=st.dictionaries(text, text, max_size=2),
        values=st.dictionaries(text, json_values, max_size=3),
    ),
)


@given(records, st.sampled_from(sorted(ALGORITHMS)))
def test_every_record_round_trips_unchanged(record, algorithm):
    data = layout.encode(record, algorithm)
    assert layout.decode(data, type(record), "here") == record
    assert layout.encode(record, algorithm) == data, "equal records must be encoded as equal bytes"
    envelope = json.loads(data)  # any JSON reader decodes the same
    assert envelope["digest"] == layout.root_of(data) and envelope["record"]["format"] == 1


@given(records, st.data())
def test_an_altered_record_is_never_accepted(record, data):
    good = layout.encode(record)
    at = data.draw(st.integers(0, len(good) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "append"]))
    bad = {
        "flip": good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :],
        "cut": good[:at],
        "insert": good[:at] + data.draw(st.binary(min_size=1, max_size=4)) + good[at:],
        "append": good + data.draw(st.binary(min_size=1, max_size=4)),
    }[kind]
    with pytest.raises((SumMismatch, ManifestInvalid)):
        layout.decode(bad, type(record), "here")


def sealed(body: bytes) -> bytes:
    """An envelope with a correct digest around any body."""
    return b'{"digest":"xxh3_128:%s","record":%s}\n' % (digest("xxh3_128", body).encode(), body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"format":1}',
        b'{"format":"1","run":"0a0a0a0a"}',
        b'{"format":1,"run":7}',
        b'{"format":1,"run":"0a0a0a0a","more":0}',
        b'{"format":1,"run":"0a0a0a0a"} {}',
        b'{"format":1,"run":"\xff\xfe"}',
        b'{"format":1.5,"run":"0a0a0a0a"}',
        b'{"format":1,"run":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":' + b'{"x":' * 100_000 + b"1" + b"}" * 100_000 + b',"format":1}',
        b'{"format":1' + b"0" * 5000 + b"}",
    ],
    ids=range(14),
)
def test_a_malformed_record_is_refused_although_its_digest_matches(body):
    with pytest.raises(ManifestInvalid):
        layout.decode(sealed(body), RunHeader, "here")


def test_a_newer_format_is_refused_by_name_with_any_content():
    with pytest.raises(UnknownFormat, match="has format 2; this version reads up to 1"):
        layout.decode(sealed(b'{"format":2,"something":["new"]}'), RunHeader, "here")


# ---- names -----------------------------------------------------------------------------------------------------


@given(ids, st.integers(1, 999_999), st.none() | ids)
def test_file_names_parse_back_to_what_they_name(at, order, parent):
    assert layout.parse_folder(layout.folder(at).removeprefix("gen/")) == at
    one = Incarnation(format=layout.FORMAT, order=order, id=at.incarnation, parent=parent)
    assert layout.parse_incarnation(layout.incarnation_name(one).removeprefix("incarnations/")) == one


@given(st.lists(ids, min_size=2, max_size=2))
def test_folder_names_sort_like_their_steps(pair):
    first, second = sorted(pair)
    assert layout.folder(first) <= layout.folder(second)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "1-9f3ac21b",
        "000000000001-9f3ac21",
        "000000000001-9F3AC21B",
        "000000000001-9f3ac21b\n",
        "000000000001-9f3ac21b.tmp",
        "000000000001-9f3ac21b/..",
        "-00000000001-9f3ac21b",
        "٠٠٠٠٠٠٠٠٠٠٠١-9f3ac21b",
        "0000000000011-9f3ac21b",
    ],
)
def test_other_spellings_are_not_parsed_as_generations(name):
    """The digits of other scripts were once parsed as well: an empty folder with such a name made the next writer
    delete the real generation, which it took for an unfinished save."""
    assert layout.parse_folder(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "000001-9f3ac21b.json.tmp",
        "1-9f3ac21b.json",
        "٠٠٠٠٠١-9f3ac21b.json",
        "000001-9f3ac21b-after-000000000001.json",
        "000001-9f3ac21b-after-1-9f3ac21b.json",
        "x",
    ],
)
def test_other_spellings_are_not_parsed_as_incarnations(name):
    assert layout.parse_incarnation(name) is None


# ---- old formats: a run that version 1 wrote can be opened for ever --------------------------------------------

V1 = Path(__file__).parents[1] / "golden" / "v1"
V1_ROOTS = {
    (10, "9f3ac21b"): "xxh3_128:f2437deab9d98a584c797886c29e3be0",
    (20, "9f3ac21b"): "xxh3_128:909f7a47c1cdc68b1cf6dedcce36d0a5",
    (20, "0d15ea5e"): "xxh3_128:708f4e6c299ad9a18842704634db1163",
    (30, "0d15ea5e"): "xxh3_128:2608b680ab235186a7b78852bb822d5e",
}


def v1_tensors(step: int) -> dict[str, tuple[str, list[int], str]]:
    """The content of the run as literals, independent of the code that wrote it: dtype, shape, and bytes in hex."""
    last = f"{step:02x}"
    ramp = "".join(f"{n:02x}" for n in range(250))
    return {
        "model.weight": ("float32", [2, 3], "000102030405060708090a0b0c0d0e0f10111213141516" + last),
        "model.bias": ("bfloat16", [3], "803f004040" + last),
        "model.half": ("float16", [2], "003c00" + last),
        "model.scale": ("float8_e4m3fn", [2], "38" + last),
        "model.wave": ("complex64", [1], "0000803f000000" + last),
        "model.wide wave": ("complex128", [1], "000000000000f03f00000000000000" + last),
        "model.packed": ("float4_e2m1fn_x2", [3], "1234" + last),
        "optimizer.step": ("float64", [], "00000000000000" + last),
        "optimizer.größe": ("int64", [1], "00000000000000" + last),
        "optimizer.seen": ("bool", [4], "01000101"),
        "sampler.order": ("int32", [100], ramp + "00" * 149 + last),
        "rng.torch": ("uint8", [5000], ramp * 19 + "00" * 249 + last),
        "nothing": ("float32", [0, 4], ""),
    }


def v1_values(step: int) -> dict:
    return {
        "epoch": 3,
        "lr": 0.1,
        "loss": float("inf"),
        "big": 1180591620717411303424,
        "betas": (0.9, 0.999),
        "note": "naïve ✓",
        "raw": b"\x00\xff",
        "none": None,
        "flags": [True, False],
        "by number": {1: "one", 2: "two"},
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "set": {7},
        "step": step,
    }


@pytest.fixture
def v1(tmp_path) -> Disk:
    """A copy of the run, so that a test cannot change the original."""
    shutil.copytree(V1, tmp_path / "v1", symlinks=True)
    return Disk(PosixFiles(), str(tmp_path / "v1"))


def test_the_golden_run_of_version_1_is_surveyed_unchanged(v1):
    found = survey(v1)
    assert found.run == "5a3b0001" and not found.broken and not found.incomplete and not found.going
    assert {(at.step, at.incarnation): one.root for at, one in found.generations.items()} == V1_ROOTS
    by_step = {(at.step, at.incarnation): one for at, one in found.generations.items()}
    assert [at for at, one in by_step.items() if one.verified] == [(10, "9f3ac21b"), (20, "0d15ea5e"), (20, "9f3ac21b")]
    assert [at for at, one in by_step.items() if one.commit.milestone] == [(10, "9f3ac21b")]
    assert by_step[20, "9f3ac21b"].commit.metrics == {"loss": 1.25}
    assert by_step[20, "0d15ea5e"].commit.parent == GenerationId(step=10, incarnation="9f3ac21b")
    assert (found.pointer.step, found.pointer.root) == (20, V1_ROOTS[20, "0d15ea5e"])
    chain = [(at.step, at.incarnation) for at in lineage(found).chain]
    assert chain == [(30, "0d15ea5e"), (20, "0d15ea5e"), (10, "9f3ac21b")]


def test_every_byte_of_the_golden_run_of_version_1_loads(v1):
    found, _ = load(v1)
    assert found.generation.step == 30 and found.stepped_over == []
    for at, generation in survey(v1).generations.items():
        manifest = read_manifest(v1, generation)
        arena = Arena(5 * manifest.blobs[0].chunk_bytes, manifest.blobs[0].chunk_bytes)
        found = read_rank(v1, generation, manifest, arena, Inline())
        loaded = {piece.name: (piece.dtype, piece.shape, bytes(found[piece.name]).hex()) for piece in manifest.pieces}
        assert loaded == v1_tensors(at.step)
        assert manifest.aliases == {"model.tied": "model.weight"}
        assert values.decode(manifest.values) == {"run": v1_values(at.step)}
        assert type(values.decode(manifest.values)["run"]["ordered"]) is OrderedDict


def test_the_tensor_files_of_version_1_open_without_this_package():
    paths = list(V1.glob("gen/*/r00000.safetensors"))
    assert len(paths) == 4
    for path in paths:
        step = int(path.parent.name[:12])
        with safetensors.safe_open(path, framework="numpy") as opened_file:
            assert set(opened_file.keys()) == v1_tensors(step).keys()
            assert opened_file.get_tensor("rng.torch").tobytes().hex() == v1_tensors(step)["rng.torch"][2]
            assert opened_file.get_tensor("model.weight").shape == (2, 3)


def test_the_golden_run_of_version_1_can_be_continued(v1):
    writer = RunWriter(v1, Inline())
    writer.begin(writer.lineage()[0].id)
    save(writer, 40, {"weight": b"after"})
    found, state = load(v1)
    assert found.generation.step == 40 and state == {"weight": b"after"}
    assert load(v1, 30)[1]["model.bias"].hex() == "803f0040401e"


PARTS = {
    "before the tensor": ([-1, 0], [2, 3], [4, 3]),
    "beyond the tensor": ([3, 0], [2, 3], [4, 3]),
    "all of it": ([0, 0], [4, 3], [4, 3]),
    "of no element": ([0, 0], [0, 3], [4, 3]),
    "of another number of dimensions": ([0], [2, 3], [4, 3]),
    "of a tensor of another number of dimensions": ([0, 0], [2, 3], [4]),
    "of nothing": ([0, 0], [2, 3], []),
    "that does not say where": ([], [2, 3], [4, 3]),
}


@pytest.mark.parametrize("case", PARTS.values(), ids=PARTS.keys())
def test_a_part_lies_within_its_tensor_and_is_smaller(case):
    offsets, shape, of = case
    at = GenerationId(step=1, incarnation="0a0a0a0a")
    good = layout.Tensor("w", "uint8", (2, 3), offsets=(1, 0), whole=(4, 3))
    (image,) = layout.images([good], rank=1)
    blob = Blob(name=image.blob, length=image.length, chunk_bytes=4096, chunks=["0" * 32] * -(-image.length // 4096))

    def sealed(offsets: list[int], shape: list[int], of: list[int]) -> Manifest:
        extent = Extent(blob=image.blob, offset=image.tensors[0][1], length=math.prod(shape))
        piece = Piece(name="w", dtype="uint8", shape=shape, extent=extent, digest="", offsets=offsets, whole=of)
        return Manifest(
            format=1,
            step=1,
            incarnation="0a0a0a0a",
            rank=1,
            digest="xxh3_128",
            blobs=[blob],
            pieces=[piece],
            aliases={},
            values={},
        )

    validation.validate_manifest(sealed([1, 0], [2, 3], [4, 3]), at, 1, ranks=2)
    with pytest.raises(ManifestInvalid):
        validation.validate_manifest(sealed([1, 0], [2, 3], [4, 3]), at, 1)
    with pytest.raises(ManifestInvalid, match="is no part"):
        validation.validate_manifest(sealed(offsets, shape, of), at, 1, ranks=2)


def test_decoders_of_all_types_are_made_before_threads_use_them():
    """Two threads of a new agent read their first manifests at the same time: msgspec ended the process by SIGSEGV."""
    many = (
        "import threading; from lastgood import records; from lastgood.run import access; import msgspec\n"
        "from lastgood.format import layout\n"
        "records.prepare()\n"
        "def read():\n"
        "    start.wait()\n"
        "    for kind in [*records.Record.__subclasses__(), layout._Version, layout.Entry]:\n"
        "        try: msgspec.json.decode(b'{}', type=kind)\n"
        "        except msgspec.ValidationError: pass\n"
        "start = threading.Barrier(8); all = [threading.Thread(target=read) for _ in range(8)]\n"
        "[one.start() for one in all]; [one.join() for one in all]\n"
    )
    subprocess.run([sys.executable, "-c", many], check=True)
