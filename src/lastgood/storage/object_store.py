"""Opens the client of an object store for a URL: deadlines, credentials, TLS, endpoint. Sends no request by itself.

obstore reads what each cloud's own tools read: the environment (AWS_*, GOOGLE_*, AZURE_*), web identity, the role of a
container or of the machine. For S3, boto3 supplies the credentials that the environment does not name: profiles of
`~/.aws`, single sign-on, and the role of the machine. It waits a second for that role, and obstore more than a minute.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import Refused
from ..extras import needed

if TYPE_CHECKING:
    from obstore.store import ObjectStore


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long requests may take, in seconds, and how often they are repeated."""

    connect_seconds: float = 10.0
    request_seconds: float = 60.0
    """of one request with its body; a part of an upload and a part of a read are at most a few MiB long"""
    retry_seconds: float = 90.0
    """after this time no request is repeated any more"""
    retries: int = 8
    stall_seconds: float = 600.0
    """how long a writer waits until an upload accepts its bytes"""


DEADLINES = Deadlines()
ENDPOINTS_OF_S3 = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_ENDPOINTS = (*ENDPOINTS_OF_S3, "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT")
_OWN_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
"""With one of these, obstore finds credentials by itself."""


def opened(url: str, deadlines: Deadlines) -> ObjectStore:
    """The client for the folder that `url` names. Raises NotInstalled without obstore; Refused for a wrong setting."""
    with needed("objects", f"a run at {url}"):
        import obstore.store
        from obstore.exceptions import BaseError

        options: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=deadlines.connect_seconds),
            "timeout": timedelta(seconds=deadlines.request_seconds),
            "allow_http": _allows_http(),
        }
        if certificates := _certificates():
            options["root_certificate"] = certificates
        settings: dict[str, Any] = {
            "client_options": options,
            "retry_config": {
                "max_retries": deadlines.retries,
                "retry_timeout": timedelta(seconds=deadlines.retry_seconds),
            },
        }
        if url.startswith("s3://"):
            if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3"):
                settings["endpoint"] = endpoint
            # TLS protects what is uploaded; its SHA-256 takes most of the processor's time for an upload.
            given = os.environ.get("AWS_UNSIGNED_PAYLOAD")
            settings["unsigned_payload"] = given.lower() in ("true", "1") if given else not _allows_http()
            if (provider := _other_credentials()) is not None:
                settings["credential_provider"] = provider
        try:
            return obstore.store.from_url(url, **settings)
        except (BaseError, ValueError) as error:
            raise Refused(
                f"the settings for {url} do not fit: {str(error).partition(chr(10))[0]}",
                safe="Nothing was touched.",
                todo="Check the URL and the environment of this cloud (AWS_*, GOOGLE_*, AZURE_*).",
            ) from error


def _allows_http() -> bool:
    """Whether an endpoint that the user names is http: that is a server of their own, on this machine or network."""
    return any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)


def _certificates() -> bytes | None:
    """The certificates of AWS_CA_BUNDLE, as Amazon's own tools read them; None if it is not set. Raises Refused."""
    path = os.environ.get("AWS_CA_BUNDLE")
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise Refused(
            f"AWS_CA_BUNDLE={path!r} cannot be read: {error.strerror}",
            safe="Nothing was touched.",
            todo="Give the file of the certificate authority, in PEM format.",
        ) from error


def _other_credentials() -> Any:
    """The credentials that boto3 finds; None where the environment names some. Raises Refused if there are none."""
    if any(os.environ.get(name) for name in _OWN_CREDENTIALS):
        return None
    with quiet_boto3():
        import boto3
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider

        try:
            session = boto3.Session()
            found = session.get_credentials()
        except BotoCoreError as error:
            profile = os.environ.get("AWS_PROFILE", "default")
            raise Refused(
                f"the profile {profile!r} cannot be used: {error}",
                safe="Nothing was touched.",
                todo="Check ~/.aws/config and ~/.aws/credentials.",
            ) from error
        if found is None:
            raise Refused(
                "no credentials for S3 are in the environment or in ~/.aws, and this machine has no role",
                safe="Nothing was touched.",
                todo="Give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket "
                "AWS_SKIP_SIGNATURE=true.",
            )
        return Boto3CredentialProvider(session)


@contextlib.contextmanager
def quiet_boto3() -> Iterator[None]:
    """For a block that uses boto3, which warns of Pythons that it will leave. Raises NotInstalled without boto3."""
    with needed("objects", "a run in S3"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"boto(3|core)\b")
        yield
