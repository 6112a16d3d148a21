"""Opens the client of an object store for a URL: deadlines, credentials, TLS, endpoint. Sends no request by itself.

obstore reads what each cloud's own tools read: the environment (AWS_*, GOOGLE_*, AZURE_*), web identity, the role of a
container or of the machine. For profiles of `~/.aws`, which it does not read, boto3 supplies the credentials if it is
installed.
"""

from __future__ import annotations

import os
import warnings
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
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT")
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
            if (provider := _profile_credentials()) is not None:
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


def _profile_credentials() -> Any:
    """Credentials of a profile in `~/.aws`, through boto3; None where obstore's own ways suffice or boto3 is absent.

    Raises Refused if AWS_PROFILE names a profile and boto3 is not installed: other credentials must not be used then.
    """
    if any(os.environ.get(name) for name in _OWN_CREDENTIALS):
        return None
    profile, shared = os.environ.get("AWS_PROFILE"), os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    config = os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")
    if not profile and not any(os.path.exists(os.path.expanduser(one)) for one in (shared, config)):
        return None
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError as error:
        if not profile:
            return None
        raise Refused(
            f"AWS_PROFILE={profile!r} needs the package boto3, which reads profiles",
            safe="Nothing was touched.",
            todo="Install it (pip install boto3), or give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        ) from error
    with warnings.catch_warnings():  # boto3 announces through warnings which Pythons it will leave
        warnings.simplefilter("ignore")
        try:
            session = boto3.Session()
            if session.get_credentials() is None:
                return None
            return Boto3CredentialProvider(session)
        except Exception as error:
            raise Refused(
                f"the profile {profile or 'default'!r} cannot be used: {error}",
                safe="Nothing was touched.",
                todo="Check ~/.aws/config and ~/.aws/credentials.",
            ) from error
