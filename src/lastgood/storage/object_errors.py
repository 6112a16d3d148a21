"""Errors of object stores -> the errors of this package: what each answer means, what is safe, what to do.

obstore tells few kinds of errors apart, so most of them are recognised by the code in the store's answer, which is part
of its text. The first row with a sign in the text counts. A text in no row becomes TierDown, which may be retried.
Reads and writes nothing.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import LastgoodError, MissingBlob, NoSpace, NotARun, NotWritable, TierDown

_COMMITTED = "Every committed generation is untouched."
_TEXT_LIMIT = 300
"""Characters of the store's own text that a message repeats."""


class Row(NamedTuple):
    """What a group of answers means."""

    signs: tuple[str, ...]
    """texts of which one is in the error's text"""
    error: type[LastgoodError]
    what: str
    """the beginning of the message; the place and the store's own words follow"""
    todo: str


ROWS = (
    Row(
        ("RequestTimeTooSkewed", "RequestExpired", "Request has expired"),
        TierDown,
        "the clock of this machine differs too much from that of the object store, which refuses its requests:",
        "Set the clock (chronyc tracking, timedatectl); saves go on as soon as it is right.",
    ),
    Row(
        ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist"),
        NotARun,
        "there is no such bucket:",
        "Check the spelling, the region and the endpoint, or make the bucket. It is not made here.",
    ),
    Row(
        ("QuotaExceeded", "StorageFull", "507 Insufficient Storage", "InsufficientStorage", "InsufficientQuota"),
        NoSpace,
        "the quota of the bucket or of its account is used up:",
        "Raise the quota, or keep fewer generations (retention=Keep(...)).",
    ),
    Row(
        (
            *("SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidToken", "ExpiredToken", "AuthenticationFailed"),
            *("401 Unauthorized", "InvalidSecurity", "token request", "169.254.169.254", "metadata.google.internal"),
        ),
        NotWritable,
        "the object store does not accept the credentials, or there are none:",
        "Give credentials as the tools of this cloud take them: for S3 the environment (AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), a profile (AWS_PROFILE, with boto3 installed), or the role of the "
        "machine.",
    ),
    Row(
        ("AccessDenied", "403 Forbidden", "AccountProblem", "AuthorizationFailure", "AuthorizationPermissionMismatch"),
        NotWritable,
        "the object store does not permit it:",
        "Check that these credentials may list, read, write and delete in this bucket, under this prefix.",
    ),
    Row(
        (
            *("PermanentRedirect", "AuthorizationHeaderMalformed", "301 Moved", "IllegalLocationConstraint"),
            "incorrectly configured region",  # obstore's own text
        ),
        NotARun,
        "the bucket is in another region:",
        "Set AWS_REGION to the region of the bucket.",
    ),
    Row(
        ("URL scheme is not allowed", "only supports https"),
        NotARun,
        "the endpoint is http, which is not encrypted, and this client was told to use https only:",
        "Give an https endpoint, or set AWS_ALLOW_HTTP=true for a server of your own.",
    ),
)
_DOWN = Row(
    (),
    TierDown,
    "the object store cannot be reached, or failed:",
    "Check the network, the endpoint (AWS_ENDPOINT_URL) and the state of the region. Saves of an open run go on as "
    "soon as it answers.",
)
_NEVER_SENT = ("tcp connect error", "Connection refused", "dns error", "error trying to connect", "Connect(")
"""A request with one of these in its error did not reach the store."""


_FAILED = re.compile(r"Error performing ((?!list)\w+ \S+) in [^ ,]+(?:, after (\d+) retries)?[^-]*- (.*)", re.S)
"""a request that received no answer, as the client reports it"""


def translated(error: BaseException, place: str, blob: str = "") -> LastgoodError:
    """The error for a failed request on the name `blob` of the run at `place`."""
    if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
        return MissingBlob(f"missing: {_at(place, blob)}", blob=blob)
    text = str(error)
    row = next((row for row in ROWS if any(sign in text for sign in row.signs)), None)
    if row is None and isinstance(error, PermissionError):
        row = next(row for row in ROWS if "AccessDenied" in row.signs)
    row = row or _DOWN
    return row.error(f"{row.what} {_at(place, blob)}: {_shortened(text)}", safe=_COMMITTED, todo=row.todo)


def was_never_sent(error: BaseException) -> bool:
    """Whether a request certainly had no effect, because no connection to the store was made."""
    return any(sign in str(error) for sign in _NEVER_SENT)


def is_past_the_end(error: BaseException) -> bool:
    """Whether a ranged read began at or after the end of the object."""
    return "416 Range Not Satisfiable" in str(error) or "InvalidRange" in str(error)


def _at(place: str, blob: str) -> str:
    return f"{place}/{blob}" if blob else place


def _shortened(text: str) -> str:
    """The store's own words, without the client's debug output: the code and message of its answer, if there is one."""
    text = text.partition("\n\nDebug source")[0]
    answer = re.search(r"<Code>([^<]*)</Code>\s*(?:<Message>([^<]*)</Message>)?", text)
    status = re.search(r"status code: (\d{3}[^:<]*)", text)
    parts = [status[1].strip()] if status else []
    parts += [": ".join(part for part in answer.groups() if part)] if answer else []
    if not parts and (failed := _FAILED.search(text)):
        request, retries, why = failed.groups()
        parts = [f"{request}: {' '.join(why.split())}" + (f" ({retries} retries)" if retries else "")]
    short = ", ".join(parts) if parts else " ".join(text.split())
    return short if len(short) <= _TEXT_LIMIT else f"{short[:_TEXT_LIMIT]}..."
