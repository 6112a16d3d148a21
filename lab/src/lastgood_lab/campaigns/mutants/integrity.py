"""Mutants of the safeguards that compare digests and validate the form of records."""

from __future__ import annotations

from .change import Instead, Never, Remove, Swap
from .record import Mutant, table
from .selection import core

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "digest",
        core("layout", "hostile", "flips"),
        ("the digest of a record is not checked", "record-digest-checked", Never()),
        (
            "a record may lack the end of its envelope",
            "record-envelope-form",
            Swap(' or not data.endswith(b"}\\n")', ""),
        ),
        (
            "an unknown digest algorithm is accepted in a record",
            "record-envelope-form",
            Swap(" or found[1].decode() not in ALGORITHMS", ""),
        ),
        (
            "a tensor's digest does not cover its dtype and shape",
            "digest-covers-dtype-and-shape",
            Instead('return b""'),
        ),
    ),
    *table(
        "digest",
        core("hostile", "flips"),
        ("a manifest is not compared with its seal", "manifest-matches-seal", Never()),
        ("a restore does not check the digests of chunks", "chunk-digest-on-read", Never()),
        ("verification does not check the digests of chunks", "chunk-digest-on-verify", Never()),
        ("the digest of a tensor is not checked on a read", "tensor-digest-on-read", Never()),
        ("the header of a tensor file is not checked on a read", "header-validated-on-read", Instead("return")),
        ("a restore does not check the contents of tensors", "restore-checks-contents", Remove()),
        (
            "a part of an unverified generation is read alone",
            "unverified-content-read-whole",
            Swap("unfit is not None or ", ""),
        ),
        (
            "of two readings the first leaves out tensors that are made anew",
            "new-tensors-verified-first",
            Swap("self._tensors.targets", "[*self._tensors.places, *self._tensors.takers]"),
        ),
        ("verification does not report tensors with other contents", "contents-checked-on-verify", Remove()),
        ("the digest is not checked when a single tensor is read", "single-tensor-digest", Remove()),
        ("a mark of another commit is accepted", "mark-belongs-to-commit", Instead("return found")),
        ("verification does not read the COMMIT again", "verify-rereads-commit", Remove()),
        ("records may be read from the page cache", "record-read-bypasses-cache", Swap(", fresh=True", "")),
        ("chunks may be read from the page cache", "chunk-read-bypasses-cache", Swap(", fresh=self._fresh", "")),
        ("the length of a manifest is not checked", "manifest-length-checked", Remove()),
        ("the length of a blob is not checked", "blob-length-checked", Remove()),
    ),
    *table(
        "digest",
        core("tiers", "hostile", "flips"),
        ("direct I/O may go into memory that is not aligned", "direct-io-needs-alignment", Swap("and", "or")),
        ("a file that ends early raises no error", "early-end-is-damage", Never()),
    ),
    *table(
        "record form",
        core("layout", "hostile", "flips"),
        ("a newer format version is not refused", "newer-format-refused", Never()),
        ("a commit in the folder of another generation is accepted", "commit-matches-folder", Never()),
        ("a commit of another run is accepted", "commit-matches-run", Never()),
        (
            "a commit may have another number of seals than ranks",
            "one-seal-per-rank",
            Swap("not 0 < commit.world.ranks == len(commit.seals) or ", ""),
        ),
        (
            "a seal may name any file as its manifest",
            "seal-names-rank-manifest",
            Swap("seal.manifest != manifest_name(seal.rank) or ", ""),
        ),
        ("a manifest of another generation or rank is accepted", "manifest-matches-folder", Remove()),
        ("a manifest may name any file as its blob", "blob-name-checked", Remove()),
        (
            "any positive chunk length is accepted",
            "chunk-bytes-in-range",
            Swap("PAGE_BYTES <=", "blob.chunk_bytes > 0 or PAGE_BYTES <="),
        ),
        ("a wrong count of chunks is accepted", "chunk-count-matches-length", Remove()),
        ("a manifest may list the same tensor twice", "tensor-name-unique", Remove()),
        ("an extent may differ in length from its tensor's shape", "extent-length-matches-shape", Remove()),
        ("an extent may lie in a file outside of the manifest", "extent-in-own-blob", Remove()),
        ("extents may overlap or leave holes", "no-hole-or-overlap", Remove()),
        ("a blob may be longer than its pieces", "blob-ends-with-last-piece", Remove()),
        ("an alias may name a tensor that does not exist", "alias-target-exists", Remove()),
    ),
    *table(
        "record form",
        core("hostile", "flips"),
        ("a commit is not validated", "commit-record-validated", Remove()),
        ("a manifest is not validated", "manifest-record-validated", Remove()),
        ("a record of any length is read", "record-length-limit", Never()),
        (
            "a symbolic link is accepted as the folder of a generation",
            "generation-folder-is-no-link",
            Swap(" if length is None", ""),
        ),
        (
            "an incarnation record in a file with another name is accepted",
            "incarnation-matches-its-name",
            Swap("in (None, named)", "or True"),
        ),
        (
            "a damaged incarnation record is not counted by its file name",
            "incarnation-matches-its-name",
            Swap("in (None, named)", "== named"),
        ),
        (
            "an incarnation record may be something other than a file",
            "incarnation-record-is-file",
            Swap(" or length is None or length < 0", ""),
        ),
    ),
    *table(
        "record form",
        core("tiers", "hostile", "flips"),
        ("file names may lead out of the run", "name-inside-run", Never()),
        ("a symbolic link is opened as a file", "open-refuses-symlinks", Swap(" | os.O_NOFOLLOW", "")),
    ),
)
