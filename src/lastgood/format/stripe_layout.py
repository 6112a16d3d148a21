"""Files of parity among nodes: their names, where a cell lies, and whether a record can be true. Pure.

    gen/.../sPLAN-SET.parity-INDEX         the parity cells of this index, stripe by stripe, then copies of manifests
    gen/.../sPLAN-SET.parity-INDEX.json    its record (records.StripeFile), written last: without it the file is nothing

PLAN is a digest of which parts share parity on which nodes. After a change of the nodes it is another one, so that
files of two plans never have the same name.
"""

from __future__ import annotations

import re
from itertools import accumulate

from ..errors import ManifestInvalid
from ..io.checksum import HEX_LENGTH
from ..limits import CHUNK_LIMIT_BYTES, MANIFEST_LIMIT_BYTES, PAGE_BYTES
from ..records import Stripe, StripeFile
from .parity_layout import is_code

NAME = r"s[0-9a-f]{8}-\d{5,}\.parity-\d{1,3}(\.json)?"
"""a regular expression: the name of a file of parity, or of its record"""
_NAME = re.compile(NAME)
_BLOB = re.compile(r"r\d{5,}(\.\d+)?\.safetensors")
_MANIFEST = re.compile(r"r\d{5,}\.manifest\.json")


def file_name(plan: str, number: int, index: int) -> str:
    """The name of a file of parity. `plan`: 8 hexadecimal digits. `number`: of the set of stripes."""
    return f"s{plan}-{number:05d}.parity-{index}"


def record_name(name: str) -> str:
    """The name of the record of a file of parity."""
    return f"{name}.json"


def is_stripe_file(name: str) -> bool:
    """Whether a file in a generation's folder is a file of parity among nodes, or the record of one."""
    return _NAME.fullmatch(name) is not None


def is_record(name: str) -> bool:
    """Whether a file is the record of a file of parity among nodes."""
    return is_stripe_file(name) and name.endswith(".json")


def set_of(name: str) -> str:
    """The part of the name that all files of a set of stripes share."""
    return name.partition(".")[0]


def cell_offsets(record: StripeFile) -> list[int]:
    """Where each parity cell lies in the file; behind the last one, where the copies of manifests begin."""
    return list(accumulate((stripe.length for stripe in record.stripes), initial=0))


def manifest_offset(record: StripeFile, name: str) -> int:
    """Where the copy of a manifest lies in the file."""
    names = list(record.manifests)
    return cell_offsets(record)[-1] + sum(record.manifests[one] for one in names[: names.index(name)])


def validate(record: StripeFile, name: str) -> None:
    """Check a record by itself, before memory is reserved or anything is read because of it. Raises ManifestInvalid."""
    if (  # guard: stripe-record-plausible
        not is_code(record.data, record.parity)
        or not 0 <= record.index < record.parity
        or not name.endswith(f".parity-{record.index}.json")
        or record.digest not in HEX_LENGTH
        or not all(_is_possible(stripe, record) for stripe in record.stripes)
        or not all(
            _MANIFEST.fullmatch(one) and 0 <= length <= MANIFEST_LIMIT_BYTES for one, length in record.manifests.items()
        )
    ):
        raise ManifestInvalid(f"{name} is not a record of parity among nodes", blob=name)


def _is_possible(stripe: Stripe, record: StripeFile) -> bool:
    digests = [stripe.sum, *(one.digest for one in stripe.cells if one is not None)]
    return (
        len(stripe.cells) == record.data
        and 0 < stripe.length <= CHUNK_LIMIT_BYTES
        and stripe.length % PAGE_BYTES == 0
        and all(len(one) == HEX_LENGTH[record.digest] for one in digests)
        and all(
            one is None or (_BLOB.fullmatch(one.blob) and one.offset >= 0 and 0 < one.length <= stripe.length)
            for one in stripe.cells
        )
    )
