"""Safeguards that compare digests and validate the form of what is read."""

from __future__ import annotations

from .change import Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import core

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "digest",
        core("layout", "hostile", "flips"),
        ("record's own", "record-digest-checked", Never()),
        ("record's envelope", "record-envelope-form", Swap(' or not data.endswith(b"}\\n")', "")),
        ("record's algorithm", "record-envelope-form", Swap(" or found[1].decode() not in ALGORITHMS", "")),
        ("content covers dtype and shape", "digest-covers-dtype-and-shape", Instead('return b""')),
    ),
    *table(
        "digest",
        core("hostile", "flips"),
        ("manifest against its seal", "manifest-matches-seal", Never()),
        ("chunk", "chunk-digest-on-read", Never()),
        ("chunk of a verification", "chunk-digest-on-verify", Never()),
        ("content of a tensor", "tensor-digest-on-read", Never()),
        ("header of a tensor file", "header-validated-on-read", Instead("return")),
        ("content check of a restore", "restore-checks-contents", Remove()),
        ("content check of a verification", "contents-checked-on-verify", Remove()),
        ("one tensor", "single-tensor-digest", Remove()),
        ("mark is of this commit", "mark-belongs-to-commit", Instead("return found")),
        ("verification reads COMMIT anew", "verify-rereads-commit", Remove()),
        ("records are read past the cache", "record-read-bypasses-cache", Swap(", fresh=True", "")),
        ("chunks are read past the cache", "chunk-read-bypasses-cache", Swap(", fresh=self._fresh", "")),
        ("length of a manifest", "manifest-length-checked", Remove()),
        ("length of a blob", "blob-length-checked", Remove()),
    ),
    *table(
        "digest",
        core("tiers", "hostile", "flips"),
        ("direct I/O into aligned memory only", "direct-io-needs-alignment", Swap("and", "or")),
        ("file that ends early", "early-end-is-damage", Never()),
    ),
    *table(
        "form",
        core("layout", "hostile", "flips"),
        ("newer version", "newer-format-refused", Never()),
        ("commit of this folder", "commit-matches-folder", Never()),
        ("commit of this run", "commit-matches-run", Never()),
        ("a seal for every rank", "one-seal-per-rank", Swap("not 0 < commit.world.ranks == len(commit.seals) or ", "")),
        (
            "manifest name of a seal",
            "seal-names-rank-manifest",
            Swap("seal.manifest != manifest_name(seal.rank) or ", ""),
        ),
        ("manifest of this place", "manifest-matches-folder", Remove()),
        ("name of a blob", "blob-name-checked", Remove()),
        ("chunk length", "chunk-bytes-in-range", Swap("PAGE_BYTES <=", "blob.chunk_bytes > 0 or PAGE_BYTES <=")),
        ("count of chunks", "chunk-count-matches-length", Remove()),
        ("name stands once", "tensor-name-unique", Remove()),
        ("length by the shape", "extent-length-matches-shape", Remove()),
        ("blob of the manifest", "extent-in-own-blob", Remove()),
        ("no hole, no overlap", "no-hole-or-overlap", Remove()),
        ("pieces end with the blob", "blob-ends-with-last-piece", Remove()),
        ("alias of something", "alias-target-exists", Remove()),
    ),
    *table(
        "form",
        core("hostile", "flips"),
        ("commit is validated", "commit-record-validated", Remove()),
        ("manifest is validated", "manifest-record-validated", Remove()),
        ("record's length", "record-length-limit", Never()),
        ("link in the way of a folder", "generation-folder-is-no-link", Swap(" or length is not None", "")),
        ("incarnation in its own file", "incarnation-matches-its-name", Swap("in (None, named)", "or True")),
        (
            "damaged incarnation counts by its name",
            "incarnation-matches-its-name",
            Swap("in (None, named)", "== named"),
        ),
        ("incarnation that is no file", "incarnation-record-is-file", Swap(" or length is None or length < 0", "")),
    ),
    *table(
        "form",
        core("tiers", "hostile", "flips"),
        ("name inside the run", "name-inside-run", Never()),
        ("link in the way of a file", "open-refuses-symlinks", Swap(" | os.O_NOFOLLOW", "")),
    ),
)
