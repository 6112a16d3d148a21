"""Safeguards that compare digests and validate the form of what is read."""

from __future__ import annotations

from .change import Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import core

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "digest",
        core("layout", "hostile", "flips"),
        ("digest of a record", "record-digest-checked", Never()),
        ("form of a record's envelope", "record-envelope-form", Swap(' or not data.endswith(b"}\\n")', "")),
        ("digest algorithm of a record", "record-envelope-form", Swap(" or found[1].decode() not in ALGORITHMS", "")),
        ("dtype and shape in a tensor's digest", "digest-covers-dtype-and-shape", Instead('return b""')),
    ),
    *table(
        "digest",
        core("hostile", "flips"),
        ("manifest compared with its seal", "manifest-matches-seal", Never()),
        ("chunk read by a restore", "chunk-digest-on-read", Never()),
        ("chunk read by a verification", "chunk-digest-on-verify", Never()),
        ("content of a tensor on a read", "tensor-digest-on-read", Never()),
        ("header of a tensor file", "header-validated-on-read", Instead("return")),
        ("content check of a restore", "restore-checks-contents", Remove()),
        ("content check of a verification", "contents-checked-on-verify", Remove()),
        ("content of a single tensor", "single-tensor-digest", Remove()),
        ("mark belongs to the commit", "mark-belongs-to-commit", Instead("return found")),
        ("COMMIT read again by a verification", "verify-rereads-commit", Remove()),
        ("records read past the page cache", "record-read-bypasses-cache", Swap(", fresh=True", "")),
        ("chunks read past the page cache", "chunk-read-bypasses-cache", Swap(", fresh=self._fresh", "")),
        ("length of a manifest", "manifest-length-checked", Remove()),
        ("length of a blob", "blob-length-checked", Remove()),
    ),
    *table(
        "digest",
        core("tiers", "hostile", "flips"),
        ("direct I/O into aligned memory only", "direct-io-needs-alignment", Swap("and", "or")),
        ("error for a file that ends early", "early-end-is-damage", Never()),
    ),
    *table(
        "record form",
        core("layout", "hostile", "flips"),
        ("refusal of a newer format version", "newer-format-refused", Never()),
        ("commit belongs to its folder", "commit-matches-folder", Never()),
        ("commit belongs to its run", "commit-matches-run", Never()),
        (
            "one seal for each rank",
            "one-seal-per-rank",
            Swap("not 0 < commit.world.ranks == len(commit.seals) or ", ""),
        ),
        (
            "manifest name of a seal",
            "seal-names-rank-manifest",
            Swap("seal.manifest != manifest_name(seal.rank) or ", ""),
        ),
        ("manifest belongs to its folder", "manifest-matches-folder", Remove()),
        ("name of a blob", "blob-name-checked", Remove()),
        ("chunk length", "chunk-bytes-in-range", Swap("PAGE_BYTES <=", "blob.chunk_bytes > 0 or PAGE_BYTES <=")),
        ("count of chunks", "chunk-count-matches-length", Remove()),
        ("unique names of tensors", "tensor-name-unique", Remove()),
        ("length agrees with the shape", "extent-length-matches-shape", Remove()),
        ("extent lies in a blob of the manifest", "extent-in-own-blob", Remove()),
        ("no hole and no overlap between extents", "no-hole-or-overlap", Remove()),
        ("pieces end with the blob", "blob-ends-with-last-piece", Remove()),
        ("alias has an existing target", "alias-target-exists", Remove()),
    ),
    *table(
        "record form",
        core("hostile", "flips"),
        ("commit is validated", "commit-record-validated", Remove()),
        ("manifest is validated", "manifest-record-validated", Remove()),
        ("record's length", "record-length-limit", Never()),
        (
            "symbolic link refused as a generation folder",
            "generation-folder-is-no-link",
            Swap(" or length is not None", ""),
        ),
        (
            "incarnation record in the file of its name",
            "incarnation-matches-its-name",
            Swap("in (None, named)", "or True"),
        ),
        (
            "damaged incarnation record counted by its file name",
            "incarnation-matches-its-name",
            Swap("in (None, named)", "== named"),
        ),
        (
            "incarnation record that is not a file",
            "incarnation-record-is-file",
            Swap(" or length is None or length < 0", ""),
        ),
    ),
    *table(
        "record form",
        core("tiers", "hostile", "flips"),
        ("file names that stay inside the run", "name-inside-run", Never()),
        ("symbolic link refused as a file", "open-refuses-symlinks", Swap(" | os.O_NOFOLLOW", "")),
    ),
)
