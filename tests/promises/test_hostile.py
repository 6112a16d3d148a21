"""Malicious files with correct digests, so that only validation can refuse them.

Each case runs in a process of its own with little memory, little time, and a record of every path that it opens. The
newest generation is refused by name, the older one is loaded, no large memory is reserved, no path outside of the
run is opened, and a writer that opens the run deletes no good generation.
"""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import State, save
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import Damaged, LastgoodError, ManifestInvalid, NotFinite, TierDown, UnknownFormat
from lastgood.format import layout
from lastgood.format.commit import read_manifests, survey
from lastgood.format.values import decode
from lastgood.io.checksum import digest
from lastgood.io.files import PosixFiles
from lastgood.policy.retention import Keep
from lastgood.records import Commit, GenerationId, Incarnation, Manifest, Pointer
from lastgood.run.candidates import Candidates
from lastgood.run.known import Environment
from lastgood.run.reader import RunReader
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood_lab.plain import read_rank

pytestmark = pytest.mark.slow

OLD: State = {"a": bytes(5000), "b": b"older" * 60, "c": b"old" * 100}
NEW: State = {"a": bytes(range(250)) * 20, "b": b"newer" * 60, "c": b"new" * 100}
FOLDER = "gen/000000000020-0a0a0a0a"
COMMIT, MANIFEST, BLOB = (f"{FOLDER}/{name}" for name in ("COMMIT.json", "r00000.manifest.json", "r00000.safetensors"))
SPARE_BYTES = 1 << 30
"""address space that a reader may take beyond what the process has: threads and their stacks, and what a claim of 2**40
bytes does not fit into"""
SECONDS = 60


class Hostile:
    """A run of two good generations, with methods to forge the newer one."""

    def __init__(self, root: Path) -> None:
        self.root, self.tier = root, Disk(PosixFiles(), str(root))
        ids = iter(["00000001", "0a0a0a0a"])
        writer = RunWriter(
            self.tier, Inline(), environment=Environment(new_id=lambda: next(ids), wall_seconds=lambda: 0.0)
        )
        writer.begin(None)
        for step, state in ((10, OLD), (20, NEW)):
            save(writer, step, state, chunk_bytes=4096, aliases={"tied": "a"})
            writer.verify(Arena(3 * 4096, 4096))

    def path(self, name: str) -> Path:
        return self.root / name

    def record(self, name: str, kind: type) -> dict[str, Any]:
        return msgspec.to_builtins(layout.decode(self.path(name).read_bytes(), kind, name))

    def put(self, name: str, body: bytes) -> bytes:
        """Write a record with forged content and a correct digest."""
        data = b'{"digest":"xxh3_128:%s","record":%s}\n' % (digest("xxh3_128", body).encode(), body)
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_bytes(data)
        return data

    def forge_manifest(self, change: Callable[[dict[str, Any]], object]) -> None:
        record = self.record(MANIFEST, Manifest)
        change(record)
        self.seal(msgspec.json.encode(record))

    def seal(self, body: bytes) -> None:
        """Write a manifest with this body, and a commit that seals it."""
        data = self.put(MANIFEST, body)
        self.forge_commit(lambda one: one["seals"][0].update(length=len(data), digest=digest("xxh3_128", data)))

    def forge_commit(self, change: Callable[[dict[str, Any]], object]) -> None:
        record = self.record(COMMIT, Commit)
        change(record)
        self.put(COMMIT, msgspec.json.encode(record))

    def sparse(self, name: str, length: int) -> None:
        self.path(name).unlink(missing_ok=True)
        with open(self.path(name), "xb") as file:
            file.truncate(length)


@pytest.fixture
def run(tmp_path) -> Hostile:
    (tmp_path / "run").mkdir()
    return Hostile(tmp_path / "run")


# ---- attempts to load ------------------------------------------------------------------------------------------


def restored(tier: Disk, step: int | None = None) -> tuple[int, State, dict[int, str]]:
    """The step, the state and the skipped generations of a restore, with an arena of 16 pages."""
    candidates = Candidates(survey(tier), step)
    for generation in candidates:
        try:
            (manifest,) = read_manifests(tier, generation)
            tensors = read_rank(tier, generation, manifest, Arena(65536, 4096), Inline())
            state = {piece.name: bytes(tensors[piece.name]) for piece in manifest.pieces}
            return generation.step, state, dict(candidates.found(generation).stepped_over)
        except (Damaged, NotFinite) as error:
            candidates.failed(error)
    return 0, {}, {}


def contained(root: Path, job: Callable[[], Any]) -> Any:
    """The result or the error of the job, from a forked process with bounded memory and time.

    Fails when the job opens, lists or changes any path outside of `root`.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        outside: list[str] = []
        inside = os.path.realpath(root)

        def record_outside_paths(event: str, args: tuple) -> None:
            if event == "open" or event.startswith("os."):
                # The target of a new symbolic link is only text; nothing is opened.
                for one in args[1:2] if event == "os.symlink" else args[:2]:
                    if isinstance(one, str | bytes) and (event != "open" or one is args[0]):
                        folder, name = os.path.split(os.path.abspath(os.fsdecode(one)))
                        full = os.path.join(os.path.realpath(folder), name)
                        if full != inside and not full.startswith(inside + os.sep):
                            outside.append(f"{event} {full}")

        try:
            restored(Disk(PosixFiles(), "/nonexistent"))  # import now what is imported on first use
            if sys.platform == "linux":
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                limit = pages * resource.getpagesize() + SPARE_BYTES
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            sys.addaudithook(record_outside_paths)
            try:
                result = job()
            except BaseException as error:
                # The error is sent as text; the objects it refers to stay in the child.
                result = Raised(type(error), str(error))
            signal.alarm(0)
            data = pickle.dumps((result, outside))
        except BaseException as error:
            data = pickle.dumps((Raised(type(error), str(error)), []))
        with os.fdopen(send, "wb") as pipe:
            pipe.write(data)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the process hung, or died"
    result, outside = pickle.loads(data)
    assert outside == [], "a path outside of the run was opened"
    return result


class Raised(tuple):
    """The kind of an error and its text."""

    def __new__(cls, *parts: Any) -> Raised:
        return super().__new__(cls, parts)

    def __getnewargs__(self) -> tuple:
        return tuple(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Raised) and tuple(self) == tuple(other)

    __hash__ = tuple.__hash__


def attempts(tier: Disk) -> dict[str, Any]:
    """The outcomes of every way to read the newest generation."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except LastgoodError as error:
            return Raised(type(error), str(error))

    reader = RunReader(tier)
    return {
        "restore": outcome(lambda: restored(tier)),
        "step": outcome(lambda: restored(tier, 20)),
        "piece": outcome(lambda: {name: bytes(reader.bytes_of(name, 20)[1]) for name in NEW}),
        "verify": outcome(lambda: reader.verify(20).findings),
        "write": outcome(lambda: written(tier)),
    }


def written(tier: Disk) -> tuple[int, State, dict[int, str]]:
    """What a restore finds after a writer has opened the run, verified everything and applied retention."""
    writer = RunWriter(tier, Inline(), keep=Keep(last=1))
    writer.begin(GenerationId(step=10, incarnation="0a0a0a0a"))
    writer.record_incarnation()  # as if it had saved, and the save had been deleted
    writer.verify(Arena(3 * 4096, 4096))
    writer.clean()
    return restored(tier)


def expect_refused(run: Hostile, reason: str) -> None:
    found = contained(run.root, lambda: attempts(run.tier))
    assert not isinstance(found, Raised), f"not a LastgoodError: {tuple(found)}"
    step, state, over = found["restore"]
    assert (step, state) == (10, OLD)
    assert reason in over[20]
    kind, text = found["step"]
    assert issubclass(kind, Damaged | TierDown) and reason in text
    assert isinstance(found["piece"], Raised) or found["piece"] == NEW
    assert found["verify"], "the verification found nothing"
    if found["verify"].__class__ is Raised:
        assert issubclass(found["verify"][0], TierDown)
    assert found["write"][:2] == (10, OLD)


def expect_unharmed(run: Hostile, step: int = 20) -> dict[int, str]:
    """Require that the malicious file is ignored, because nothing depends on it; returns the skipped generations."""
    found = contained(run.root, lambda: attempts(run.tier))
    assert not isinstance(found, Raised), f"not a LastgoodError: {tuple(found)}"
    at, state, over = found["restore"]
    assert (at, state) == (step, NEW if step == 20 else OLD)
    assert found["write"][:2] == (10, OLD)
    return over


def test_the_harness_accepts_a_good_run_and_detects_every_violation(run, tmp_path):
    found = contained(run.root, lambda: attempts(run.tier))
    assert found["restore"] == (20, NEW, {}) and found["step"][:2] == (20, NEW)
    assert found["piece"] == NEW and found["verify"] == []
    (tmp_path / "outside").write_bytes(b"")
    with pytest.raises(AssertionError, match="outside of the run was opened"):
        contained(run.root, lambda: (tmp_path / "outside").read_bytes())
    assert contained(run.root, lambda: len(bytearray(1 << 40)))[0] is MemoryError
    assert contained(run.root, lambda: Arena(1 << 40, 1 << 40))[0] is OSError


# ---- manifests -------------------------------------------------------------------------------------------------


def piece(index: int, **changes: Any) -> Callable[[dict[str, Any]], object]:
    def change(record: dict[str, Any]) -> None:
        one = record["pieces"][index]
        one["extent"].update({key: changes.pop(key) for key in ("blob", "offset", "length") if key in changes})
        one.update(changes)

    return change


def shift(index: int, by: int) -> Callable[[dict[str, Any]], object]:
    def change(record: dict[str, Any]) -> None:
        record["pieces"][index]["extent"]["offset"] += by

    return change


def blob(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["blobs"][0].update(changes)


def top(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update(changes)


def all_of(*changes: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda record: [change(record) for change in changes]


def renamed(name: str) -> Callable[[dict[str, Any]], object]:
    """Rename the blob, and let every piece in it refer to the new name."""
    return all_of(blob(name=name), *(piece(index, blob=name) for index in range(3)))


def claims(length: int, chunk_bytes: int = 256 << 20) -> Callable[[dict[str, Any]], object]:
    """Give the last tensor this length, with all counts adjusted to it."""

    def change(record: dict[str, Any]) -> None:
        one, last = record["blobs"][0], record["pieces"][-1]
        last["shape"], last["extent"]["length"] = [length], length
        one["length"], one["chunk_bytes"] = last["extent"]["offset"] + length, chunk_bytes
        one["chunks"] = ["0" * 32] * -(-one["length"] // chunk_bytes)

    return change


def no_pieces(length: int) -> Callable[[dict[str, Any]], object]:
    chunks = ["0" * 32] * -(-length // (256 << 20))
    return all_of(top(pieces=[], aliases={}), blob(length=length, chunk_bytes=256 << 20, chunks=chunks))


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "pieces overlap": (shift(1, -1), "overlaps"),
    "a hole between pieces": (shift(1, 1), "leaves a hole"),
    "pieces in another order": (lambda record: record["pieces"].reverse(), "offset"),
    "two pieces on one place": (piece(2, offset=9096), "overlaps"),
    "first piece inside the header": (shift(0, -1), "offset"),
    "first piece at the start of the file": (piece(0, offset=0), "offset"),
    "negative offset": (piece(0, offset=-4096), "offset"),
    "offset far past the end": (piece(0, offset=2**62), "offset"),
    "a header of 100 GB": (piece(0, offset=100 << 30), "offset"),
    "last piece past the end": (piece(2, shape=[10**6], length=10**6), "end elsewhere"),
    "last piece before the end": (piece(2, shape=[299], length=299), "end elsewhere"),
    "length is not that of the shape": (piece(1, length=299), "its shape says"),
    "negative length": (piece(2, shape=[-300], length=-300), "negative size"),
    "negative sizes whose product fits": (piece(2, shape=[-1, -300]), "negative size"),
    "a shape beyond 64 bits": (piece(2, shape=[2**40, 2**40], length=2**62), "its shape says"),
    "length beyond 64 bits": (piece(2, shape=[2**40, 2**40], length=2**80), "end elsewhere"),
    "a hundred thousand dimensions": (piece(2, shape=[2**62] * 100_000, length=300), "dimensions"),
    "a tensor of 2**40 bytes": (claims(2**40), "committed were"),
    "a file of 2**40 bytes and no tensor": (no_pieces(2**40), "end elsewhere"),
    "a file of 90 MB and no tensor": (no_pieces(90_000_000), "committed were"),
    "unknown dtype": (piece(0, dtype="object"), "unknown dtype"),
    "piece in a blob of nobody": (piece(2, blob="r00000.1.safetensors"), "not of this manifest"),
    "a name twice": (piece(1, name="a"), "listed twice"),
    "a name that is an alias too": (piece(1, name="tied"), "listed twice"),
    "alias of nothing": (top(aliases={"tied": "nothing"}), "alias of nothing"),
    "alias of itself": (top(aliases={"tied": "tied"}), "alias of nothing"),
    "aliases in a circle": (top(aliases={"x": "y", "y": "x"}), "alias of nothing"),
    "alias of an alias": (top(aliases={"x": "a", "y": "x"}), "alias of nothing"),
    "a chunk too few": (lambda record: record["blobs"][0]["chunks"].pop(), "wrong count of chunks"),
    "a chunk too many": (lambda record: record["blobs"][0]["chunks"].append("0" * 32), "wrong count of chunks"),
    "no chunks": (blob(chunks=[]), "wrong count of chunks"),
    "no length": (blob(length=0), "wrong count of chunks"),
    "negative blob": (blob(length=-1), "wrong count of chunks"),
    "a blob of 2**62": (blob(length=2**62), "wrong count of chunks"),
    "chunks of nothing": (blob(chunk_bytes=0), "chunks of 0"),
    "chunks of less than nothing": (blob(chunk_bytes=-4096), "chunks of -4,096"),
    "chunks off the page": (blob(chunk_bytes=4097), "chunks of 4,097"),
    "chunks of 2**62": (blob(chunk_bytes=2**62, chunks=["0" * 32]), "chunks of"),
    "chunks of 1 GiB": (blob(chunk_bytes=1 << 30, chunks=["0" * 32]), "chunks of"),
    "a digest cut short": (lambda record: record["blobs"][0]["chunks"].__setitem__(0, "00"), "malformed digest"),
    "a digest of a megabyte": (blob(chunks=["0" * 2**20] * 3), "malformed digest"),
    "an algorithm of nobody": (top(digest="md5"), "unknown digest"),
    "an algorithm that is an attribute": (top(digest="__class__"), "unknown digest"),
    "chunk digest of other bytes": (blob(chunks=["0" * 32] * 3), "differs from its digest"),
    "content digest of other bytes": (piece(1, digest="0" * 32), "memory changed it in between"),
    "blob above the run": (renamed("../../../outside"), "not the name of a blob"),
    "blob by an absolute name": (renamed("/etc/passwd"), "not the name of a blob"),
    "blob by a way round": (renamed("r00000.safetensors/../r00000.safetensors"), "not the name of a blob"),
    "blob in another generation": (renamed("../000000000010-0a0a0a0a/r00000.safetensors"), "not the name of a blob"),
    "blob without a name": (renamed(""), "not the name of a blob"),
    "blob that is the folder": (renamed("."), "not the name of a blob"),
    "blob with a nul": (renamed("r00000.safetensors\0"), "not the name of a blob"),
    "blob that is a record": (renamed("COMMIT.json"), "not the name of a blob"),
    "blob of another rank": (renamed("r00001.safetensors"), "not the name of a blob"),
    "the same blob twice": (lambda record: record["blobs"].append(record["blobs"][0]), "not the name of a blob"),
    "a blob that is not there": (
        lambda record: record["blobs"].append({**record["blobs"][0], "name": "r00000.1.safetensors"}),
        "is missing",
    ),
    "header of another name": (piece(1, name="d"), "header does not agree"),
    "header of another type": (piece(1, dtype="int8"), "header does not agree"),
    "header of another shape": (piece(1, shape=[3, 100]), "header does not agree"),
    "header of fewer tensors": (
        all_of(piece(1, shape=[600], length=600), lambda record: record["pieces"].pop()),
        "header does not agree",
    ),
    "of another step": (top(step=10), "belongs elsewhere"),
    "of another incarnation": (top(incarnation="0b0b0b0b"), "belongs elsewhere"),
    "of another rank": (top(rank=1), "belongs elsewhere"),
    "an unknown field": (top(more=1), "unknown field"),
    "a field of another type": (top(pieces={"a": 1}), "Expected `array`"),
    "a step that is no integer": (top(step=20.5), "Expected `int`"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_forged_manifest_is_refused_before_any_allocation_or_open(run, case):
    change, reason = MANIFESTS[case]
    run.forge_manifest(change)
    expect_refused(run, reason)


HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "a length of 2**63": lambda data: (2**63).to_bytes(8, "little") + data[8:],
    "a length of the whole file": lambda data: len(data).to_bytes(8, "little") + data[8:],
    "no length": lambda data: bytes(8) + data[8:],
    "overlapping offsets": lambda data: data.replace(b"[5000,5300]", b"[4999,5299]"),
    "offsets past the end": lambda data: data.replace(b"[5000,5300]", b"[5000,9900]"),
    "another shape": lambda data: data.replace(b'"shape":[5000]', b'"shape":[5001]'),
    "a name twice": lambda data: data.replace(b'"b":{', b'"a":{'),
    "more in the padding": lambda data: data[:4095] + b"x" + data[4096:],
    "not utf-8": lambda data: data.replace(b'"b":{', b'"\xff":{'),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_forged_tensor_file_header_is_refused_with_correct_digests(run, case):
    """Other programs read the tensor file too; they trust its header and have no digest to check it against."""
    good = run.path(BLOB).read_bytes()
    data = HEADERS[case](good)
    assert data != good and len(data) == len(good)
    run.path(BLOB).write_bytes(data)
    chunks = [digest("xxh3_128", data[start : start + 4096]) for start in range(0, len(data), 4096)]
    run.forge_manifest(blob(chunks=chunks))
    expect_refused(run, "header does not agree")


def nested(depth: int, opening: bytes, closing: bytes) -> Callable[[bytes], bytes]:
    return lambda body: body.replace(
        b'"values":{}', b'"values":{"x":' + opening * depth + b"1" + closing * depth + b"}"
    )


BODIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "lists 100,000 deep": (nested(100_000, b"[", b"]"), "recursion"),
    "objects 100,000 deep": (nested(100_000, b'{"x":', b"}"), "recursion"),
    "never closed": (lambda body: body[:-1], "truncated"),
    "cut in the middle": (lambda body: body[: len(body) // 2], "truncated"),
    "empty": (lambda body: b"", "truncated"),
    "two in one": (lambda body: body + body, "trailing"),
    "not utf-8": (lambda body: body.replace(b'"name":"a"', b'"name":"\xff\xfe"'), "utf-8"),
    "half of a pair": (lambda body: body.replace(b'"name":"a"', rb'"name":"\ud800"'), "malformed"),
    "a nul": (lambda body: body.replace(b'"step":20', b'"step":20\0'), "malformed"),
    "a number of a million digits": (lambda body: body.replace(b'"step":20', b'"step":2' + b"0" * 1_000_000), "range"),
    "a list": (lambda body: b"[" + body + b"]", "Expected `object`"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_manifest_that_is_malformed_json_is_refused(run, case):
    change, reason = BODIES[case]
    body = msgspec.json.encode(run.record(MANIFEST, Manifest))
    assert change(body) != body
    run.seal(change(body))
    found = contained(run.root, lambda: restored(run.tier))
    assert not isinstance(found, Raised), f"not a LastgoodError: {tuple(found)}"
    assert found[:2] == (10, OLD)
    assert reason.lower() in found[2][20].lower()


def test_values_of_many_megabytes_are_stored_and_loaded(run):
    run.forge_manifest(top(values={"x": ["y" * 1000] * 20_000}))
    assert contained(run.root, lambda: restored(run.tier))[:2] == (20, NEW)


@pytest.mark.parametrize(
    "key", ["../../../etc/passwd", "/etc/passwd", "Europe/../../../x", "tzdata.zoneinfo", "a\0b", ""]
)
def test_a_forged_time_zone_opens_no_file(run, key):
    found = contained(run.root, lambda: decode({"!ZoneInfo": [key]}))
    assert found[0] is ManifestInvalid


# ---- commits ---------------------------------------------------------------------------------------------------


def sealed(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["seals"][0].update(changes)


COMMITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "of another step": (top(step=21), "is the commit of"),
    "of a step below nothing": (top(step=-20), "is the commit of"),
    "of another incarnation": (top(incarnation="0b0b0b0b"), "is the commit of"),
    "of another run": (top(run="0c0c0c0c"), "belongs to run"),
    "a rank too many": (top(world={"ranks": 2}), "1 seals for 2 ranks"),
    "no ranks": (top(world={"ranks": 0}), "1 seals for 0 ranks"),
    "no ranks and no seals": (top(world={"ranks": 0}, seals=[]), "0 seals for 0 ranks"),
    "less than no ranks": (top(world={"ranks": -1}, seals=[]), "0 seals for -1 ranks"),
    "2**40 ranks": (top(world={"ranks": 2**40}), "1 seals for"),
    "2**62 ranks": (top(world={"ranks": 2**62}), "1 seals for"),
    "a rank sealed twice": (
        all_of(top(world={"ranks": 2}), lambda record: record["seals"].append(record["seals"][0])),
        "2 seals for 2 ranks",
    ),
    "manifest above the run": (sealed(manifest="../../../outside"), "as manifest of rank 0"),
    "manifest by an absolute name": (sealed(manifest="/etc/passwd"), "as manifest of rank 0"),
    "manifest of another rank": (sealed(manifest="r00001.manifest.json"), "as manifest of rank 0"),
    "the commit as its own manifest": (sealed(manifest="COMMIT.json"), "as manifest of rank 0"),
    "a seal of less than nothing": (sealed(length=-1), "as manifest of rank 0"),
    "a seal of 2**40": (sealed(length=2**40), "as manifest of rank 0"),
    "a seal of 2**62": (sealed(length=2**62), "as manifest of rank 0"),
    "a seal of a byte more": (
        lambda record: record["seals"][0].update(length=record["seals"][0]["length"] + 1),
        "bytes",
    ),
    "a seal with another digest": (sealed(digest="0" * 32), "differs from the manifest that was sealed"),
    "an unknown field": (top(more=1), "unknown field"),
    "metrics that are no numbers": (top(metrics={"loss": "low"}), "Expected `float`"),
    "a parent that is a text": (top(parent="10"), "Expected `object"),
}


@pytest.mark.parametrize("case", COMMITS)
def test_a_forged_commit_is_refused_before_any_allocation_or_open(run, case):
    change, reason = COMMITS[case]
    run.forge_commit(change)
    expect_refused(run, reason)


@pytest.mark.parametrize("length", [(64 << 20) + 1, 1 << 40])
def test_an_oversized_commit_is_refused_without_reading_it(run, length):
    run.sparse(COMMIT, length)
    expect_refused(run, "not a file of a record's length")


def test_a_manifest_length_is_bounded_whatever_its_seal_claims(run):
    """A sparse file can have any length, and a seal can agree with it."""
    run.sparse(MANIFEST, 1 << 40)
    run.forge_commit(sealed(length=1 << 40))
    expect_refused(run, "as manifest of rank 0")


@pytest.mark.parametrize("parent", [(20, "0a0a0a0a"), (30, "0a0a0a0a"), (-1, ""), (2**62, "../../outside")])
def test_a_commit_with_an_impossible_parent_still_loads(run, parent):
    at = {"step": parent[0], "incarnation": parent[1]}
    run.forge_commit(top(parent=at, continues=at))
    expect_unharmed(run)


# ---- newer versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [MANIFEST, COMMIT, "lastgood.json", "POINTER.json", f"{FOLDER}/VERIFIED.json"])
def test_a_record_of_a_newer_version_is_refused_and_not_skipped(run, name):
    """A restore that skipped such a generation would continue the training from an older state, although a newer
    good one exists."""
    if name == MANIFEST:
        run.forge_manifest(top(format=2))
    else:
        run.put(name, b'{"format":2,"what":["nobody","knows"]}')
    kind, text = contained(run.root, lambda: restored(run.tier))
    assert kind is UnknownFormat and "Install a newer lastgood" in text


# ---- names that are not regular files --------------------------------------------------------------------------


def link_out(path: Path) -> None:
    """Replace the file by a link to a file outside of the run with the same bytes."""
    path.rename(path.parents[3] / "outside")
    path.symlink_to(path.parents[3] / "outside")


def link_beside(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real").name)


def link_in_a_circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def link_to_endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def full_folder(path: Path) -> None:
    folder(path)
    (path / "x").write_bytes(b"x")


def device(path: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("needs root, to make a device")


THINGS = [link_out, link_beside, link_in_a_circle, link_to_endless, pipe, folder, full_folder, device]


@pytest.mark.parametrize("name", [BLOB, MANIFEST, COMMIT], ids=["blob", "manifest", "commit"])
@pytest.mark.parametrize("thing", THINGS)
def test_a_special_file_in_place_of_a_file_is_refused_without_blocking(run, name, thing):
    thing(run.path(name))
    expect_refused(run, Path(name).name)


@pytest.mark.parametrize(
    "name", ["POINTER.json", "lastgood.json", "incarnations/000001-0a0a0a0a.json", f"{FOLDER}/VERIFIED.json"]
)
@pytest.mark.parametrize("thing", THINGS)
def test_a_special_file_in_place_of_a_hint_does_no_harm(run, name, thing):
    if thing is link_out and "/" not in name:
        thing = link_to_endless
    path = run.path(name)
    if thing is link_out:
        path.rename(run.root.parent / "outside")
        path.symlink_to(run.root.parent / "outside")
    else:
        thing(path)
    found = contained(run.root, lambda: restored(run.tier))
    assert found == (20, NEW, {})
    found = contained(run.root, lambda: written(run.tier))
    if isinstance(found, Raised):  # a folder that is not empty cannot be removed, and neither can a device
        assert issubclass(found[0], LastgoodError) and thing in (full_folder, folder)
    else:
        assert found[:2] == (10, OLD)


def test_a_symlinked_generation_folder_is_ignored_and_its_target_unchanged(run):
    """A generation's folder without a COMMIT was once treated as a save to be cleared away: through the link, the
    next writer emptied the target folder."""
    theirs = run.root.parent / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_bytes(b"years of work")
    run.path("gen/000000000030-0a0a0a0a").symlink_to(theirs)
    run.path("gen/000000000040-0a0a0a0a").symlink_to("../../theirs")
    shutil.copytree(run.path(FOLDER), run.root.parent / "copy")
    run.path("gen/000000000050-0a0a0a0a").symlink_to(run.root.parent / "copy")
    expect_unharmed(run)
    assert (theirs / "thesis.txt").read_bytes() == b"years of work"


def test_a_folder_inside_an_unfinished_save_does_not_block_the_opening(run):
    unfinished = run.path("gen/000000000030-0a0a0a0a")
    (unfinished / "theirs").mkdir(parents=True)
    (unfinished / "theirs" / "thesis.txt").write_bytes(b"years of work")
    (unfinished / "r00000.safetensors").write_bytes(b"half")
    expect_unharmed(run)
    assert sorted(path.name for path in unfinished.rglob("*")) == ["theirs", "thesis.txt"]


def test_a_generation_moved_out_and_symlinked_is_not_read(run):
    run.path(FOLDER).rename(run.root.parent / "moved")
    run.path(FOLDER).symlink_to(run.root.parent / "moved")
    expect_unharmed(run, step=10)
    assert len(os.listdir(run.root.parent / "moved")) == 4


# ---- names -----------------------------------------------------------------------------------------------------

NAMES = [
    "000000000030-0a0a0a0a",
    "٠٠٠٠٠٠٠٠٠٠٢٠-0a0a0a0a",
    "000000000020-0A0A0A0A",
    "000000000020-0a0a0a0a\n",
    "000000000020-0a0a0a0a.json",
    "000001-0a0a0a0a.json",
    "000007-0b0b0b0b.json",
    "٠٠٠٠٠١-0a0a0a0a.json",
    "..000000000020-0a0a0a0a",
    "-rf",
    "$(touch x)",
    "x" * 255,
    os.fsdecode(b"\xff\xfe"),
    "COMMIT.json",
    "a.tmp",
    "COMMIT.json.tmp",
]


@pytest.mark.parametrize("where", ["", "gen", "incarnations", FOLDER])
@pytest.mark.parametrize("thing", ["file", "folder", "full folder", "pipe", "link"])
def test_foreign_names_in_the_folders_of_a_run_hide_no_generation(run, where, thing):
    """An empty folder named with digits of another script once made the writer delete the generation of that step,
    which it took for one that had never been finished."""
    for name in NAMES:
        path = run.path(where) / name
        if os.path.lexists(path) or (where, thing, name) == ("incarnations", "file", "000007-0b0b0b0b.json"):
            continue  # the only valid name here: a run that started over
        if thing == "file":
            path.write_bytes(b"x")
        elif thing == "pipe":
            os.mkfifo(path)
        elif thing == "link":
            path.symlink_to(run.root.parent)
        else:
            path.mkdir()
            if thing == "full folder":
                (path / "x").write_bytes(b"x")
                (path / "sub").mkdir()
    expect_unharmed(run)


def test_incarnation_records_under_a_wrong_name_are_ignored(run):
    for order, name in ((1, "000009-0b0b0b0b"), (9, "000009-0c0c0c0c"), (2**62, "000008-0d0d0d0d")):
        claim = Incarnation(format=1, order=order, id="0b0b0b0b", parent=None)
        run.put(f"incarnations/{name}.json", msgspec.json.encode(claim))
    assert contained(run.root, lambda: restored(run.tier)) == (20, NEW, {})


def test_a_cycle_of_incarnation_parents_terminates(run):
    for order, one, parent in ((1, "0a0a0a0a", "0c0c0c0c"), (2, "0b0b0b0b", "0a0a0a0a"), (3, "0c0c0c0c", "0b0b0b0b")):
        claim = Incarnation(format=1, order=order, id=one, parent=GenerationId(step=20, incarnation=parent))
        run.put(layout.incarnation_name(claim), msgspec.json.encode(claim))
    expect_unharmed(run)


def test_an_incarnation_with_an_impossible_parent_is_harmless(run):
    claim = Incarnation(format=1, order=2, id="0b0b0b0b", parent=GenerationId(step=-1, incarnation="../../outside"))
    run.put("incarnations/000002-0b0b0b0b.json", msgspec.json.encode(claim))
    assert contained(run.root, lambda: restored(run.tier)) == (20, NEW, {}), "its content contradicts its name"
    claim = Incarnation(format=1, order=3, id="0c0c0c0c", parent=GenerationId(step=99, incarnation="0d0d0d0d"))
    run.put(layout.incarnation_name(claim), msgspec.json.encode(claim))
    found = contained(run.root, lambda: restored(run.tier))
    assert found == (0, {}, {})
    assert contained(run.root, lambda: restored(run.tier, 20))[:2] == (20, NEW), (
        "its step can still be restored by number"
    )


def test_a_wrong_pointer_does_not_change_what_is_loaded(run):
    for step, incarnation in ((-1, "../../outside"), (2**62, "x" * 10**6), (20, "0b0b0b0b")):
        claim = Pointer(format=1, step=step, incarnation=incarnation, root="xxh3_128:0")
        run.put("POINTER.json", msgspec.json.encode(claim))
        assert contained(run.root, lambda: restored(run.tier)) == (20, NEW, {})
    expect_unharmed(run)


@pytest.mark.parametrize("name", ["POINTER.json", "lastgood.json", f"{FOLDER}/VERIFIED.json", f"{FOLDER}/DAMAGED.json"])
@pytest.mark.parametrize("length", [0, 64 << 20, 1 << 40])
def test_a_hint_of_any_length_does_no_harm(run, name, length):
    run.sparse(name, length)
    expect_unharmed(run)
