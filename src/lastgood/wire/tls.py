"""What a failed TLS handshake means: errors with a remedy. And the names in a certificate."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import FrameInvalid, LastgoodError, PeerDown, PeerRefused
from .frames import REPEAT, SAFE


class Row(NamedTuple):
    """What a group of answers of OpenSSL means."""

    codes: frozenset[int]
    """results of the verification here, as OpenSSL numbers them"""
    alerts: frozenset[str]
    """what the other side said before it closed the connection"""
    reason: str
    todo: str


ROWS = (
    Row(
        frozenset({9}),
        frozenset(),
        "certificate not valid yet",
        "Compare the clocks of the two nodes, and that of the machine which signed the certificate "
        "(timedatectl, chronyc tracking). The connection is made again once they agree.",
    ),
    Row(
        frozenset({10}),
        frozenset({"SSLV3_ALERT_CERTIFICATE_EXPIRED", "SSL/TLS_ALERT_CERTIFICATE_EXPIRED"}),
        "certificate expired",
        "Renew the certificate, and compare the clocks of the two nodes.",
    ),
    Row(
        frozenset({2, 7, 18, 19, 20, 21}),
        frozenset({"TLSV1_ALERT_UNKNOWN_CA", "TLSV1_ALERT_DECRYPT_ERROR"}),
        "unknown authority",
        "Give all nodes of the run certificates of the same authority, and its certificate.",
    ),
    Row(
        frozenset(),
        frozenset({"SSLV3_ALERT_BAD_CERTIFICATE", "SSL/TLS_ALERT_BAD_CERTIFICATE"}),
        "bad certificate",
        "The other node reports why. This certificate is not valid yet by its clock, for example: compare the clocks "
        "of the two nodes, and look at the certificate: openssl x509 -noout -text -in FILE.",
    ),
    Row(
        frozenset(),
        frozenset({"TLSV13_ALERT_CERTIFICATE_REQUIRED", "PEER_DID_NOT_RETURN_A_CERTIFICATE"}),
        "no certificate",
        "Give the other node a certificate of the run's authority.",
    ),
    Row(
        frozenset(),
        frozenset(
            {
                "WRONG_VERSION_NUMBER",
                "HTTP_REQUEST",
                "RECORD_LAYER_FAILURE",
                "UNSUPPORTED_PROTOCOL",
                "NO_PROTOCOLS_AVAILABLE",
            }
            | {"TLSV1_ALERT_PROTOCOL_VERSION", "UNEXPECTED_MESSAGE"}
        ),
        "mode",
        "Use certificates on both nodes, or on none; TLS 1.3 is needed.",
    ),
)
OTHER = ("certificate", "Look at the certificates of both nodes: openssl x509 -noout -text -in FILE.")


def certificate_error(name: str, error: OSError) -> LastgoodError:
    """The error of a TLS handshake with the peer `name`, or of the first bytes after it, as one of the tree."""
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return PeerDown(
            f"the connection to {name} ended: {error.strerror or error}",
            todo="See whether a node of this run listens there, in the same mode, and is not out of connections.",
        )
    code = error.verify_code if isinstance(error, ssl.SSLCertVerificationError) else 0
    found = [row for row in ROWS if code in row.codes or error.reason in row.alerts]
    reason, todo = (found[0].reason, found[0].todo) if found else OTHER
    by_other = "ALERT" in (error.reason or "")
    where = "by the other side" if by_other else "here"
    if code or (by_other and found and found[0].codes):
        where += f", because of the certificate of {'this' if by_other else 'that'} node"
    detail = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
    return PeerRefused(
        f"TLS with {name} was refused {where}: {reason} ({detail})",
        safe="No request was sent or answered.",
        todo=todo,
        reason=reason,
    )


def stream_error(name: str, error: ssl.SSLError) -> LastgoodError:
    """The error of reading or writing later on: a client learns only there that its certificate was refused."""
    if any(error.reason in row.alerts for row in ROWS) or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return certificate_error(name, error)
    return FrameInvalid(
        f"bytes from {name} were changed on their way: {error.reason}",
        safe=SAFE,
        todo=REPEAT,
        reason="tls",
    )


def names_of(certificate: Mapping[str, Any]) -> frozenset[str]:
    """The alternative names in a verified certificate; its common names, if it has none."""
    alternative = {value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")}
    common = {value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"}
    return frozenset(alternative or common)
