"""How the nodes of a job know each other: by the key of the job, or by certificates that the environment names.

    LASTGOOD_TLS_CERTIFICATE, _KEY, _AUTHORITY   PEM files: of this node, its private key, and who signs certificates
    LASTGOOD_TLS_NAMES      a,b: names of certificates that count; default: that of the node (LASTGOOD_NODE)
    LASTGOOD_TLS_ENCRYPT    1: the bytes of files are encrypted too, and not only what is said about them

The files are read when a connection is made, so a certificate that is renewed counts from then on. Opens none itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from ..errors import Refused
from ..records import Record
from ..wire.security import MutualTls, Security, SharedKey
from . import paths

PREFIX = "LASTGOOD_TLS_"
_FILES = ("CERTIFICATE", "KEY", "AUTHORITY")
VARIABLES = [f"{PREFIX}{name}" for name in _FILES]
"""those that every node has, or none"""


class Certificates(Record, frozen=True, kw_only=True):
    """As `MutualTls`. `names`: empty: a certificate has to have the name of its node."""

    certificate: str
    key: str
    authority: str
    encrypt: bool = False
    names: list[str] = msgspec.field(default_factory=list)


def own_certificates(environ: Mapping[str, str] = os.environ) -> Certificates | None:
    """The certificates that the environment of this process names; None: it names none.

    Raises Refused if it names some of the three files only, or has a variable of this kind that does not exist.
    """
    known = [*VARIABLES, f"{PREFIX}NAMES", f"{PREFIX}ENCRYPT"]
    found = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value}
    if unknown := sorted(found.keys() - set(known)):
        raise Refused(f"there is no variable {unknown[0]}", safe="Nothing was touched.", todo=f"{', '.join(known)}.")
    if not found:
        return None
    if missing := [one for one in known[:3] if one not in found]:
        raise Refused(
            f"{', '.join(sorted(found))} set, and {', '.join(missing)} not",
            safe="Nothing was touched.",
            todo="Set the three files on every node, or none of these variables.",
        )
    encrypt = found.get(known[4], "0")
    if encrypt not in ("0", "1"):
        raise Refused(f"{known[4]}={encrypt}", safe="Nothing was touched.", todo="Give 1, or leave it out.")
    names = [one.strip() for one in found.get(known[3], "").split(",") if one.strip()]
    certificate, key, authority = (paths.absolute(found[one], one) for one in known[:3])
    return Certificates(certificate=certificate, key=key, authority=authority, encrypt=encrypt == "1", names=names)


def security(key: str, certificates: Certificates | None) -> Security:
    """How connections of the job are secured. `key`: of the job, in hexadecimal. The files are not read here."""
    if certificates is None:  # guard: certificates-used-where-named
        return SharedKey(bytes.fromhex(key))
    return MutualTls(
        certificates.certificate,
        certificates.key,
        certificates.authority,
        encrypt=certificates.encrypt,
        names=frozenset(certificates.names),
    )
