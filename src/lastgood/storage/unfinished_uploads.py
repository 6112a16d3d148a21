"""Removes the multipart uploads to S3 that ended processes have left unfinished. Touches no object.

obstore can neither list nor abort the uploads of other processes, so boto3 does. Azure removes unfinished uploads by
itself after a week; for Google Cloud Storage, a lifecycle rule of the bucket does (docs/places.md).
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from ..errors import NotWritable, TierDown
from .object_store import ENDPOINTS_OF_S3, Deadlines, quiet_boto3

DEADLINE_SECONDS = 10.0
"""The longest wait for one reply: the run does not depend on it."""


def remove(url: str, deadlines: Deadlines) -> int:
    """Abort every unfinished upload to the folder `url`; returns their number. Does nothing outside of S3.

    The caller holds the newest claim on the run, so no other process may write there. Raises NotWritable if this user
    may not list or abort uploads, TierDown for any other failure.
    """
    if not url.startswith("s3://"):
        return 0
    parts = urlsplit(url)
    with quiet_boto3():
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            client, removed = _client(deadlines), 0
            pages = client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=parts.netloc, Prefix=f"{parts.path.strip('/')}/".lstrip("/")):
                for one in page.get("Uploads", ()):
                    client.abort_multipart_upload(Bucket=parts.netloc, Key=one["Key"], UploadId=one["UploadId"])
                    removed += 1
            return removed
        except (BotoCoreError, ClientError) as error:
            response: dict[str, Any] = getattr(error, "response", None) or {}  # None where no reply came
            denied = response.get("Error", {}).get("Code") in {"AccessDenied", "403", "MethodNotAllowed"}
            raise (NotWritable if denied else TierDown)(
                f"{url}: unfinished uploads were not removed: {error}",
                safe="The run is not affected: nobody reads them, and they cost space.",
                todo="Allow s3:ListBucketMultipartUploads and s3:AbortMultipartUpload, or give the bucket a lifecycle "
                "rule that removes unfinished uploads.",
            ) from error


def _client(deadlines: Deadlines) -> Any:
    """A client of S3 with the settings that obstore reads from the environment."""
    import boto3
    from botocore.config import Config

    endpoint = next((found for name in ENDPOINTS_OF_S3 if (found := os.environ.get(name))), None)
    session = boto3.Session()
    seconds = min(DEADLINE_SECONDS, deadlines.request_seconds)
    return session.client(
        "s3",
        endpoint_url=endpoint,
        region_name=os.environ.get("AWS_REGION") or session.region_name or "us-east-1",
        config=Config(
            connect_timeout=min(seconds, deadlines.connect_seconds),
            read_timeout=seconds,
            retries={"total_max_attempts": 2},
            s3={"addressing_style": "path"} if endpoint else {},
        ),
    )
