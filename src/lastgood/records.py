"""Frozen records: what is stored in a run, and what the rooms hand to each other. They have no behaviour.

The terms are those of docs/glossary.md: a *piece* is a rectangle of a named tensor, a *blob* an immutable named run of
bytes, a *manifest* holds one rank's pieces and values, a *seal* is a rank's promise that its manifest is durable, a
*commit* is the one small record that makes a *generation* exist, an *incarnation* is one opening of a run for writing.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that is stored. Unknown fields are refused, so that no field is dropped in silence.

    Records with `gc=False` exist once per tensor and are never part of a reference cycle, so Python's garbage
    collector need not track them.
    """


class GenerationId(Record, frozen=True, kw_only=True, order=True):
    """Names a generation: a step of an incarnation. Two incarnations may hold the same step."""

    step: int
    incarnation: str

    def __str__(self) -> str:
        return f"step {self.step} ({self.incarnation})"


class Extent(Record, frozen=True, kw_only=True, gc=False):
    """A range of bytes inside a blob; offset and length in bytes."""

    blob: str
    offset: int
    length: int


class Blob(Record, frozen=True, kw_only=True):
    """One immutable file: its length in bytes and the digest of each of its chunks. The last chunk may be shorter."""

    name: str
    length: int
    chunk_bytes: int
    chunks: list[str]


class Piece(Record, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A rectangle of a named tensor, in most cases the whole tensor: where its bytes are stored, and their digest."""

    name: str
    dtype: str
    shape: list[int]
    extent: Extent
    digest: str
    """content digest over dtype, shape and bytes, computed from the copy in host memory before it is written"""
    finite: bool = False
    """NaN or infinity in this tensor makes the generation unfit: it is a parameter, or the state of an optimizer"""
    offsets: list[int] = []
    """where this rectangle begins in its tensor; empty if it is the whole tensor"""
    whole: list[int] = []
    """shape of the whole tensor; empty if this rectangle is the whole tensor"""
    own: bool = False
    """only this rank holds these bytes: other ranks hold other bytes under the same name"""

    @property
    def key(self) -> str:
        """The name of this piece in its file. That of a part ends with the place where the part begins."""
        return f"{self.name}@{','.join(map(str, self.offsets))}" if self.offsets else self.name


class Manifest(Record, frozen=True, kw_only=True):
    """One rank's part of a generation."""

    format: int
    step: int
    incarnation: str
    rank: int
    digest: str
    """name of the algorithm of every digest in this record"""
    blobs: list[Blob]
    pieces: list[Piece]
    aliases: dict[str, str]
    """further name of a tensor -> the name under which it is stored (tied weights)"""
    values: dict[str, Any]
    """what is no tensor, as JSON with typed tags (format/values.py)"""


class Seal(Record, frozen=True, kw_only=True):
    """A rank's promise that its blobs and its manifest are durable."""

    rank: int
    manifest: str
    length: int
    digest: str


class World(Record, frozen=True, kw_only=True):
    """The number of ranks at the time of the save."""

    ranks: int


class Commit(Record, frozen=True, kw_only=True):
    """The record that makes a generation exist."""

    format: int
    run: str
    step: int
    incarnation: str
    order: int
    """number of the incarnation, counted from 1: the newest lineage is that of the highest order"""
    world: World
    continues: GenerationId | None
    """the generation that the incarnation continues; stored here too, so that its own record is only a hint"""
    parent: GenerationId | None
    """the generation before this one in its lineage"""
    seals: list[Seal]
    """one for each rank, in ascending order"""
    created: float
    """seconds since 1970, for people only: no decision depends on it"""
    milestone: bool = False
    metrics: dict[str, float] = {}

    @property
    def id(self) -> GenerationId:
        return GenerationId(step=self.step, incarnation=self.incarnation)


class RunHeader(Record, frozen=True, kw_only=True):
    """`lastgood.json`: marks a directory as a run, and holds the run's id."""

    format: int
    run: str


class Incarnation(Record, frozen=True, kw_only=True):
    """One opening of a run for writing; `parent` is the generation that it continues."""

    format: int
    order: int
    id: str
    parent: GenerationId | None


class Pointer(Record, frozen=True, kw_only=True):
    """`POINTER.json`: the newest verified generation of the lineage. A hint, never the truth."""

    format: int
    step: int
    incarnation: str
    root: str


class PlaceList(Record, frozen=True, kw_only=True):
    """`PLACES.json`: the paths and URLs of all places of the run, the nearest first. A hint for commands and people."""

    format: int
    places: list[str]


LAYERS = ("structure", "agreement", "contents", "digests", "finite")
"""The layers of the guard: the structure of each file is valid; names, shapes and dtypes are those of the manifest; the
digest of each tensor agrees; the digests of each chunk and record agree, up to the commit; no NaN and no infinity where
there must be none (engine/guard.py)."""


class Finding(Record, frozen=True, kw_only=True):
    """One thing that is wrong with a generation, and where it is."""

    kind: str
    """name of the error class that a reader would raise"""
    what: str
    layer: str = ""
    """the one of LAYERS that found it"""
    blob: str = ""
    offset: int = 0
    chunk: int = -1
    tensor: str = ""


def intact(findings: list[Finding]) -> bool:
    """Whether every byte is as committed: there is no finding, or only those of layers that judge what the state means:
    `finite` (NaN and infinity), and `training` (what training did after it, run/advice.py)."""
    return all(one.layer in ("finite", "training") for one in findings)


class Mark(Record, frozen=True, kw_only=True):
    """The result of reading a whole generation: `VERIFIED.json` (no finding), `DAMAGED.json` or `UNFIT.json`."""

    format: int
    root: str
    findings: list[Finding] = []


class Label(Record, frozen=True, kw_only=True):
    """`LABEL-1.json`, `LABEL-2.json`, ...: metrics and milestones that were added after the commit, for retention."""

    format: int
    root: str
    milestone: bool = False
    metrics: dict[str, float] = {}


class Parity(Record, frozen=True, kw_only=True):
    """The record of one parity file. It holds all that is needed to use the file when every other file is lost.

    Parity is redundancy and never the truth: rebuilt bytes count only if they agree with the digests of the manifest.
    """

    format: int
    root: str
    """root of the generation"""
    data: int
    """data cells in each row"""
    parity: int
    """parity cells in each row, which is also the number of parity files"""
    index: int
    """which of the parity files this is, from 0"""
    cell_bytes: int
    digest: str
    """name of the digest algorithm of the cells"""
    cells: list[str]
    """digests of the cells of the tensor files, in order"""
    sums: list[str]
    """digests of the cells of this parity file, row by row"""
    manifest_bytes: int
    """length of the copy of the manifest that follows the cells in the parity file"""
    commit: str
    """the commit record, byte for byte as it is stored"""

    def alike(self, other: Parity) -> bool:
        """Whether both records are about the same cells of the same files."""
        mine, theirs = ((one.data, one.parity, one.cell_bytes, one.digest, one.cells) for one in (self, other))
        return mine == theirs and self.manifest_bytes == other.manifest_bytes


class Cell(Record, frozen=True, kw_only=True, gc=False):
    """A data cell of a stripe: one chunk of a tensor file, with its digest."""

    blob: str
    offset: int
    length: int
    digest: str


class Stripe(Record, frozen=True, kw_only=True):
    """One stripe of parity among nodes. Shorter cells, and those that are None, are continued with zeros."""

    cells: list[Cell | None]
    length: int
    """of its parity cells, in whole pages"""
    sum: str = ""
    """digest of the parity cell in the file of this record"""


class StripeFile(Record, frozen=True, kw_only=True):
    """The record of one file of parity among nodes (format/stripe_layout.py). It names no node."""

    format: int
    root: str
    """root of the generation"""
    data: int
    parity: int
    index: int
    """which parity cells of its stripes the file holds, from 0"""
    digest: str
    """name of the digest algorithm"""
    stripes: list[Stripe]
    manifests: dict[str, int]
    """manifests of which the file has a copy behind its cells, in this order -> length"""


class Generation(Record, frozen=True, kw_only=True):
    """A committed generation as a reader finds it."""

    commit: Commit
    """its record; `milestone` and `metrics` include what labels have added"""
    root: str
    """digest of the commit record, and through it of every byte of the state"""
    verified: bool = False
    damaged: list[Finding] = []
    unfit: list[Finding] = []
    """the tensors that hold NaN or infinity, where every byte is as committed"""
    label_unread: bool = False
    """one of its labels cannot be read, and might make this generation a milestone"""
    bytes: int = 0
    """total length of its files on this tier"""

    def __repr__(self) -> str:
        """One line: `print(save.result())` shows it."""
        state = "good" if self.good else "not verified yet"
        if not self.restorable:
            state = "damaged" if self.damaged else "intact, and not good"
        return f"<Generation: {self.id}, {state}, {self.bytes:,} bytes>"

    @property
    def id(self) -> GenerationId:
        return self.commit.id

    @property
    def step(self) -> int:
        return self.commit.step

    @property
    def good(self) -> bool:
        """Whether the whole generation was read after its commit, and nothing was found."""
        return self.verified and not self.damaged and not self.unfit

    @property
    def restorable(self) -> bool:
        """Whether nothing is known against it, verified or not."""
        return not self.damaged and not self.unfit


def judged(generation: Generation, findings: list[Finding]) -> Generation:
    """The generation with the findings of a complete reading."""
    damaged, unfit = ([], findings) if intact(findings) else (findings, [])
    return msgspec.structs.replace(generation, verified=not findings, damaged=damaged, unfit=unfit)


def with_suspicion(generation: Generation, findings: list[Finding]) -> list[Finding]:
    """The findings of a complete reading, with what training has shown of an intact generation, as no reading does."""
    shown = [one for one in generation.unfit if one.layer == "training"] if intact(findings) else []
    return [*findings, *shown]


class Verdict(Record, frozen=True, kw_only=True):
    """The result of verifying a generation."""

    at: GenerationId
    layers: list[str]
    """the layers that were checked"""
    findings: list[Finding]

    @property
    def intact(self) -> bool:
        """Whether every byte is as committed; NaN and infinity do not count."""
        return intact(self.findings)

    @property
    def good(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def prepare() -> None:
    """Make the decoders of all types of this package that msgspec decodes, before threads use them.

    msgspec makes one at the first use of a type. Two threads that do that at the same time end the process by SIGSEGV
    (msgspec 0.22, in an agent whose first two requests came together).
    """
    todo: list[type[msgspec.Struct]] = [msgspec.Struct]
    while todo:
        found = [one for one in todo.pop().__subclasses__() if one.__module__.startswith(f"{__package__}.")]
        todo += found
        for one in found:
            msgspec.json.Decoder(one)
