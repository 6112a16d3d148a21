"""The nouns, frozen. They hold what is stored or handed between rooms; they never do anything.

Words as in docs/format.md: a *piece* is a rectangle of a named tensor, a *blob* an immutable named run of bytes,
a *manifest* one rank's pieces and values, a *seal* a rank's promise that its manifest is durable, a *commit* the one
small record that makes a *generation* exist, an *incarnation* one opening of a run for writing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .events import Event as Event  # lab/timeline.py still imports it from here


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that is stored: unknown fields are refused, so a field is never dropped in silence.

    `gc=False` below: there are as many as tensors, they are part of no cycle, and the collector need not see them.
    """


class GenerationId(Record, frozen=True, kw_only=True, order=True):
    """A step in an incarnation. Two incarnations may hold the same step."""

    step: int
    incarnation: str

    def __str__(self) -> str:
        return f"step {self.step} ({self.incarnation})"


class Extent(Record, frozen=True, kw_only=True, gc=False):
    """A run of bytes inside a blob."""

    blob: str
    offset: int
    length: int


class Blob(Record, frozen=True, kw_only=True):
    """One immutable file: its length and the digest of each of its chunks (the last one may be short)."""

    name: str
    length: int
    chunk_bytes: int
    chunks: list[str]


class Piece(Record, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A rectangle of a named tensor, mostly all of it: where its bytes rest and what they digest to."""

    name: str
    dtype: str
    shape: list[int]
    extent: Extent
    digest: str
    """content digest over dtype, shape and bytes, taken while staging"""
    finite: bool = False
    """a state in which it holds NaN or infinity is not good: a parameter, or the state of an optimizer"""
    offsets: list[int] = []
    """of this rectangle, where it is a part of the tensor"""
    whole: list[int] = []
    """shape of the tensor, where this is a part of it"""
    own: bool = False
    """this rank's own: other ranks hold something else under the same name"""

    @property
    def key(self) -> str:
        """Its name in its file: a part says where it begins."""
        return f"{self.name}@{','.join(map(str, self.offsets))}" if self.offsets else self.name


class Manifest(Record, frozen=True, kw_only=True):
    """One rank's share of a generation."""

    format: int
    step: int
    incarnation: str
    rank: int
    digest: str
    """name of the digest algorithm of every digest below"""
    blobs: list[Blob]
    pieces: list[Piece]
    aliases: dict[str, str]
    """further name of a tensor -> the name under which it is stored"""
    values: dict[str, Any]
    """non-tensor state, JSON with typed tags (format/values.py)"""


class Seal(Record, frozen=True, kw_only=True):
    """A rank's promise that its blobs and its manifest are durable."""

    rank: int
    manifest: str
    length: int
    digest: str


class World(Record, frozen=True, kw_only=True):
    """Ranks at the time of the save."""

    ranks: int


class Commit(Record, frozen=True, kw_only=True):
    """The record that makes a generation exist."""

    format: int
    run: str
    step: int
    incarnation: str
    order: int
    """of the incarnation: the newest lineage is that of the highest order"""
    world: World
    continues: GenerationId | None
    """what the incarnation continues; repeated here so that its own record is only a hint"""
    parent: GenerationId | None
    """the generation before this one in its lineage"""
    seals: list[Seal]
    created: float
    """seconds since 1970, for people; nothing is decided by it"""
    milestone: bool = False
    metrics: dict[str, float] = {}

    @property
    def id(self) -> GenerationId:
        return GenerationId(step=self.step, incarnation=self.incarnation)


class RunHeader(Record, frozen=True, kw_only=True):
    """`lastgood.json`: says that a directory is a run, and which."""

    format: int
    run: str


class Incarnation(Record, frozen=True, kw_only=True):
    """One opening of a run for writing, and the generation that it continues."""

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


LAYERS = ("structure", "agreement", "contents", "digests", "finite")
"""of the guard: it opens, and its structure validates; names, shapes and dtypes are those of the manifest; the digest
of each tensor; the digests of each chunk and record, up to the commit; no NaN or infinity where there must be none"""


class Finding(Record, frozen=True, kw_only=True):
    """One thing that is wrong with a generation, and where."""

    kind: str
    """name of the error class that it would raise"""
    what: str
    layer: str = ""
    """of LAYERS, that found it"""
    blob: str = ""
    offset: int = 0
    chunk: int = -1
    tensor: str = ""


def intact(findings: list[Finding]) -> bool:
    """Whether every byte is what was committed: nothing was found, or only what is not finite."""
    return all(one.layer == "finite" for one in findings)


class Mark(Record, frozen=True, kw_only=True):
    """What a reading of a generation found: `VERIFIED.json` nothing, `DAMAGED.json` and `UNFIT.json` the evidence."""

    format: int
    root: str
    findings: list[Finding] = []


class Label(Record, frozen=True, kw_only=True):
    """`LABEL-1.json`, `LABEL-2.json`, ...: what was added to a generation after its commit, for retention."""

    format: int
    root: str
    milestone: bool = False
    metrics: dict[str, float] = {}


class Parity(Record, frozen=True, kw_only=True):
    """Of one parity file: what its cells stand in for, and whatever is needed to use them when all else is gone.

    Redundancy, never the truth: what comes of it is held against the digests of the manifest.
    """

    format: int
    root: str
    """of the generation"""
    data: int
    parity: int
    index: int
    """which of the `parity` files this is"""
    cell_bytes: int
    digest: str
    """name of the digest algorithm of the cells"""
    cells: list[str]
    """digests of the cells of the tensor files, in order"""
    sums: list[str]
    """digests of the cells of this parity file"""
    manifest_bytes: int
    """of the copy of the manifest that follows the cells"""
    commit: str
    """the commit record, as it is stored"""

    def alike(self, other: Parity) -> bool:
        """Whether both are of the same cells of the same files."""
        mine, theirs = ((one.data, one.parity, one.cell_bytes, one.digest, one.cells) for one in (self, other))
        return mine == theirs and self.manifest_bytes == other.manifest_bytes


class Generation(Record, frozen=True, kw_only=True):
    """A committed generation as a reader finds it."""

    commit: Commit
    """its record; `milestone` and `metrics` with what labels have added"""
    root: str
    """digest of the commit record: names the whole state"""
    verified: bool = False
    damaged: list[Finding] = []
    unfit: list[Finding] = []
    """intact, and not good: what is not finite in it"""
    label_unread: bool = False
    """a label lies beside it that cannot be read: it may be what makes this generation a milestone"""
    bytes: int = 0
    """what its files hold on this tier"""

    @property
    def id(self) -> GenerationId:
        return self.commit.id

    @property
    def step(self) -> int:
        return self.commit.step

    @property
    def good(self) -> bool:
        """Whether it was read after its commit, and nothing was found."""
        return self.verified and not self.damaged and not self.unfit

    @property
    def restorable(self) -> bool:
        """Whether nothing is known against it, verified or not."""
        return not self.damaged and not self.unfit


def judged(generation: Generation, findings: list[Finding]) -> Generation:
    """A generation after a complete reading."""
    damaged, unfit = ([], findings) if intact(findings) else (findings, [])
    return msgspec.structs.replace(generation, verified=not findings, damaged=damaged, unfit=unfit)


class Verdict(Record, frozen=True, kw_only=True):
    """What the guard says of a generation."""

    at: GenerationId
    layers: list[str]
    """that looked"""
    findings: list[Finding]

    @property
    def intact(self) -> bool:
        """Whether every byte is what was committed."""
        return intact(self.findings)

    @property
    def good(self) -> bool:
        return not self.findings
