"""A tier in an object store: what the contract of all tiers (test_tiers.py) leaves open. The S3 server is real."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore

from harness import reports
from lastgood.errors import (
    CommitUnknown,
    LastgoodError,
    MissingBlob,
    NameTaken,
    NoSpace,
    NotARun,
    NotWritable,
    Refused,
    TierDown,
)
from lastgood.records import Extent
from lastgood.run import access, claims
from lastgood.storage import object_store, object_upload, objects, unfinished_uploads
from lastgood.storage.object_errors import translated
from lastgood.storage.objects import Objects
from lastgood_lab.object_faults import KINDS, Fault, FaultyProxy, Request
from lastgood_lab.object_server import KEY, SECRET, ObjectServer

pytestmark = pytest.mark.slow

QUICK = object_store.Deadlines(connect_seconds=2, request_seconds=3, retry_seconds=4, retries=1, stall_seconds=5)
FOLDER = "gen/000000000001-0a0b0c0d"
BLOB, RECORD = f"{FOLDER}/r00000.safetensors", f"{FOLDER}/COMMIT.json"


@pytest.fixture
def tier(bucket: str, proxy: FaultyProxy) -> Objects:
    """The tier behind the proxy, with short deadlines and without pauses."""
    return Objects(object_store.opened(bucket, QUICK), bucket, QUICK, pause=lambda seconds: None)


@pytest.fixture
def direct(bucket: str, object_server: ObjectServer, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """The same folder, past the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_server.endpoint)
    return Objects(object_store.opened(bucket, QUICK), bucket, QUICK)


def content(tier: Objects, name: str) -> bytes:
    length = tier.length_of(name)
    assert length is not None
    into = memoryview(bytearray(length))
    tier.read_into(Extent(blob=name, offset=0, length=length), into)
    return bytes(into)


def upload(tier: Objects, name: str, data: bytes, chunk: int = 4 << 20) -> None:
    blob = tier.create(name, len(data))
    try:
        with ThreadPoolExecutor(3) as writers:
            jobs = [
                writers.submit(blob.write_at, memoryview(bytearray(data[at : at + chunk])), at)
                for at in range(0, len(data), chunk)
            ]
        for job in jobs:
            job.result()
        blob.finish()
    except BaseException:
        blob.abort()
        raise


def pattern(length: int) -> bytes:
    return (bytes(range(251)) * (length // 251 + 1))[:length]


# ---- a creation whose reply is lost --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_creation_that_fails_once_or_twice_is_completed(tier, direct, proxy, kind, times):
    """The client reports an error where the reply is lost, although the object is there; and "exists already" for an
    object that its own repeated request has created."""
    proxy.inject(Fault(kind, lambda request: request.method == "PUT", times))
    tier.put_new(RECORD, b"commit")
    assert content(direct, RECORD) == b"commit"


@pytest.mark.parametrize("kind", ["lose_reply", "cut_before", "cut_during", "500", "503"])
def test_a_creation_with_an_unknown_outcome_deletes_nothing(tier, direct, proxy, kind):
    proxy.inject(Fault(kind))
    with pytest.raises(CommitUnknown, match=r"may or may not exist.*Nothing was deleted"):
        tier.put_new(RECORD, b"commit")
    there = direct.length_of(RECORD) is not None
    assert there == (kind == "lose_reply")
    proxy.inject(None)
    tier.put_new(RECORD, b"commit")
    assert content(direct, RECORD) == b"commit"


def test_a_store_that_was_never_reached_leaves_no_doubt(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    tier = Objects(object_store.opened(bucket, QUICK), bucket, QUICK, pause=lambda seconds: None)
    with pytest.raises(TierDown, match="cannot be reached"):
        tier.put_new(RECORD, b"commit")


def test_another_process_that_created_the_name_between_two_attempts_wins(tier, direct, proxy):
    requests = []

    def create_first(request: Request) -> None:
        if request.method == "PUT" and not requests:
            requests.append(request)
            direct.put_new(RECORD, b"theirs")

    proxy.before = create_first
    with pytest.raises(NameTaken, match="other bytes"):
        tier.put_new(RECORD, b"ours")
    assert content(direct, RECORD) == b"theirs"


# ---- uploads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [(8 << 20) + 1, 20 << 20])
@pytest.mark.parametrize("chunk", [1 << 20, (3 << 20) + 4096, 16 << 20])
def test_a_long_blob_is_uploaded_in_parts_whatever_its_chunks(tier, direct, proxy, length, chunk):
    data = pattern(length)
    upload(tier, BLOB, data, chunk)
    parts = [one for one in proxy.requests if "partNumber" in one.target]
    assert sum(one.sent for one in parts) >= length and len(parts) == -(-length // object_upload.PART_BYTES)
    assert content(direct, BLOB) == data


def test_a_part_is_large_enough_for_the_limit_of_parts() -> None:
    for length in (1, 80 << 30, 1 << 40, 5 << 40):
        part = object_upload.part_bytes(length)
        assert part % (1 << 20) == 0 and -(-length // part) <= object_upload.PARTS_LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_an_upload_that_fails_once_is_completed_or_invisible(tier, direct, proxy, kind):
    data = pattern(20 << 20)
    proxy.inject(Fault(kind, lambda request: request.method in ("PUT", "POST") and request.number >= 2, 1))
    try:
        upload(tier, BLOB, data)
    except (TierDown, NameTaken):
        assert direct.length_of(BLOB) is None
    else:
        assert content(direct, BLOB) == data


@pytest.mark.parametrize("kind", ["cut_before", "cut_during", "500", "lose_reply"])
@pytest.mark.parametrize("what", ["uploads", "partNumber", "POST"])
def test_an_upload_to_a_failing_store_ends_and_leaves_no_object(tier, direct, proxy, kind, what):
    proxy.inject(Fault(kind, lambda request: what in f"{request.method} {request.target}"))
    before = set(threading.enumerate())
    with pytest.raises(LastgoodError):
        upload(tier, BLOB, pattern(20 << 20))
    assert direct.length_of(BLOB) is None
    assert not [one.name for one in threading.enumerate() if one not in before and "lastgood" in one.name]


def test_an_aborted_upload_leaves_nothing_and_ends_its_thread(tier, direct):
    blob = tier.create(BLOB, 20 << 20)
    blob.write_at(memoryview(bytearray(4 << 20)), 0)
    blob.abort()
    blob.abort()
    assert direct.length_of(BLOB) is None
    assert not [one for one in threading.enumerate() if one.name == "lastgood-upload"]


def test_a_writer_whose_turn_never_comes_gets_an_error(bucket):
    deadlines = replace(QUICK, stall_seconds=0.1)
    blob = Objects(object_store.opened(bucket, deadlines), bucket, deadlines).create(BLOB, 20 << 20)
    with pytest.raises(TierDown, match="accepted nothing"):
        blob.write_at(memoryview(bytearray(4096)), 8192)
    blob.abort()


# ---- reads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cut_reply", "500", "503", "cut_before"])
def test_a_read_that_fails_once_is_repeated(tier, direct, proxy, kind):
    data = pattern(5 << 20)
    upload(direct, BLOB, data)
    proxy.inject(Fault(kind, times=1))
    assert content(tier, BLOB) == data


def test_a_long_read_is_sent_as_several_requests_and_reads_nothing_else(tier, direct, proxy):
    upload(direct, BLOB, pattern(20 << 20))
    proxy.clear()
    into = memoryview(bytearray(15 << 20))
    tier.read_into(Extent(blob=BLOB, offset=3 << 20, length=15 << 20), into)
    assert into == pattern(20 << 20)[3 << 20 : 18 << 20]
    assert sum(one.received for one in proxy.requests) == 15 << 20 and len(proxy.requests) == 2


def test_a_read_of_no_bytes_is_no_error(tier, direct):
    """A pool of no threads was made for the requests of an empty tensor."""
    upload(direct, BLOB, b"bytes")
    tier.read_into(Extent(blob=BLOB, offset=5, length=0), memoryview(bytearray()))


def test_a_store_that_is_down_is_no_damage(tier, direct, proxy):
    upload(direct, BLOB, b"bytes")
    with proxy.down(), pytest.raises(TierDown, match="cannot be reached, or failed"):
        tier.read_into(Extent(blob=BLOB, offset=0, length=5), memoryview(bytearray(5)))


# ---- replacing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1 << 30, 1], ids=["copied by the store", "longer than stores copy"])
def test_a_rebuilt_blob_replaces_the_old_one(tier, monkeypatch, limit):
    monkeypatch.setattr(objects, "COPY_LIMIT_BYTES", limit)
    data = pattern(9 << 20)
    upload(tier, BLOB, b"old")
    upload(tier, f"{BLOB}.tmp", data)
    tier.replace(BLOB, f"{BLOB}.tmp")
    assert content(tier, BLOB) == data and list(tier.list(FOLDER)) == ["r00000.safetensors"]
    with pytest.raises(MissingBlob):
        tier.replace(BLOB, f"{BLOB}.tmp")


def test_a_replacement_that_fails_keeps_the_old_blob_and_the_new_one(tier, direct, proxy):
    upload(direct, BLOB, b"old")
    upload(direct, f"{BLOB}.tmp", b"new")
    proxy.inject(Fault("500", lambda request: request.method == "PUT"))
    with pytest.raises(TierDown):
        tier.replace(BLOB, f"{BLOB}.tmp")
    assert content(direct, BLOB) == b"old" and content(direct, f"{BLOB}.tmp") == b"new"


# ---- what stores answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "todo"),
    [
        ("403 Forbidden: <Error><Code>RequestTimeTooSkewed</Code></Error>", TierDown, "Set the clock"),
        ("404 Not Found: <Error><Code>NoSuchBucket</Code></Error>", NotARun, "make the bucket"),
        ("403 Forbidden: <Error><Code>QuotaExceeded</Code></Error>", NoSpace, "keep fewer generations"),
        ("507 Insufficient Storage", NoSpace, "keep fewer generations"),
        ("403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code></Error>", NotWritable, "AWS_ACCESS_KEY_ID"),
        ("403 Forbidden: <Error><Code>ExpiredToken</Code></Error>", NotWritable, "AWS_PROFILE"),
        ("403 Forbidden: <Error><Code>AccessDenied</Code></Error>", NotWritable, "may list, read, write and delete"),
        ("301 Moved: <Error><Code>PermanentRedirect</Code></Error>", NotARun, "Set AWS_REGION"),
        (
            "Received redirect without LOCATION, this normally indicates an incorrectly configured region",
            NotARun,
            "AWS_REG",
        ),
        ("something new", TierDown, "as soon as it answers"),
    ],
)
def test_each_answer_of_a_store_has_an_error_with_a_remedy(text: str, error: type[LastgoodError], todo: str) -> None:
    found = translated(obstore.exceptions.GenericError(f"status code: {text}\n\nDebug source:\nsecret"), "s3://b/run")
    assert type(found) is error and todo in found.todo
    assert "s3://b/run" in found.what and "secret" not in found.what


@pytest.mark.parametrize(
    ("name", "what"),
    [("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"), ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId")],
)
def test_wrong_credentials_are_refused_before_anything_is_touched(bucket, monkeypatch, name, what):
    monkeypatch.setenv(name, "wrong")
    with pytest.raises(NotWritable, match=rf"credentials.*{what}"), access.for_writing(bucket, MODE):
        pass


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("skewed", TierDown, "the clock of this machine.*Set the clock"),
        ("quota", NoSpace, "quota.*is used up.*keep fewer generations"),
        ("region", NotARun, "in another region.*Set AWS_REGION"),
        ("503", TierDown, "cannot be reached, or failed.*SlowDown.*Check the network"),
        ("cut_before", TierDown, r"GET http://127.*retries\).*Check the network, the endpoint"),
    ],
)
def test_what_a_store_refuses_is_an_error_at_the_opening(bucket, direct, proxy, monkeypatch, kind, error, match):
    monkeypatch.setattr(object_store, "DEADLINES", QUICK)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    proxy.inject(Fault(kind, lambda request: kind != "quota" or request.method == "PUT"))
    with pytest.raises(error, match=f"(?s){match}"), access.for_writing(bucket, MODE):
        pass
    assert not direct.list("")


def test_a_bucket_that_is_not_there_is_refused_by_name(bucket):
    with pytest.raises(NotARun, match="no such bucket: s3://nowhere/run"), access.for_writing("s3://nowhere/run", MODE):
        pass


def test_an_http_endpoint_needs_no_further_setting(bucket, monkeypatch):
    assert object_store._allows_http()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:9")
    assert not object_store._allows_http()


@pytest.mark.parametrize(
    ("endpoint", "given", "unsigned"),
    [
        ("https://127.0.0.1:9", "", True),
        ("http://127.0.0.1:9", "", False),
        ("http://127.0.0.1:9", "true", True),
        ("https://127.0.0.1:9", "false", False),
    ],
)
def test_a_payload_is_signed_only_where_the_connection_is_not_encrypted(bucket, monkeypatch, endpoint, given, unsigned):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", given) if given else None
    found = object_store.opened(bucket, QUICK).config.get("unsigned_payload")
    assert (str(found).lower() == "true") == unsigned


@pytest.fixture
def without_keys(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without keys; returns the file in which profiles are looked for."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path / "credentials"


def test_the_credentials_of_a_profile_are_used(bucket, without_keys, monkeypatch):
    without_keys.write_text(f"[team]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_PROFILE", "team")
    with access.for_writing(bucket, MODE) as tier:
        tier.put_new(RECORD, b"commit")
        assert content(access._objects(bucket), RECORD) == b"commit"


@pytest.mark.parametrize(("profile", "what"), [("team", "'team' cannot be used"), ("", "no credentials for S3 are in")])
def test_missing_credentials_are_refused_without_a_wait(bucket, without_keys, monkeypatch, profile, what):
    """The client asked the metadata service of the machine for its role, again and again for more than a minute."""
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(Refused, match=what):
        access.for_reading(bucket)


def test_a_bundle_of_certificates_that_cannot_be_read_is_refused(bucket, monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere/ca.pem")
    with pytest.raises(Refused, match="AWS_CA_BUNDLE"):
        access.for_reading(bucket)


# ---- claims ----------------------------------------------------------------------------------------------------

MODE = "atomic_dirsync"


def test_a_store_that_ignores_conditions_is_refused_at_opening(bucket, direct, proxy, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    proxy.inject(Fault("unconditional", lambda request: request.method == "PUT"))
    with pytest.raises(Refused, match=r"If-None-Match.*Nothing was saved"), access.for_writing(bucket, MODE):
        pass
    assert {*direct.list("")} <= {"claims"}


def test_the_last_of_two_openings_may_commit_and_the_first_may_not(bucket):
    with access.for_writing(bucket, MODE) as first, access.for_writing(bucket, MODE) as second:
        second.put_new(RECORD, b"second")
        for call in (
            lambda: first.put_new(f"{FOLDER}x/COMMIT.json", b"first"),
            lambda: first.delete(RECORD),
            lambda: first.point("POINTER.json", b"", FOLDER),
            lambda: first.create(BLOB, 5),
        ):
            with pytest.raises(claims.RunReplaced, match="opened for writing by another process"):
                call()
        assert second.list(FOLDER) == {"COMMIT.json": 6} and not second.list(f"{FOLDER}x")


def test_a_commit_is_not_acknowledged_if_the_run_was_claimed_meanwhile(bucket):
    objects = Objects(object_store.opened(bucket, QUICK), bucket, QUICK)
    with claims.claimed(objects, take_over=True) as first:
        first.put_new(f"{FOLDER}/r00000.manifest.json", b"manifest")
        put_new, later = objects.put_new, []

        def put_and_claim(name: str, data: bytes) -> None:
            put_new(name, data)
            later.append(access.for_writing(bucket, MODE).__enter__())

        objects.put_new = put_and_claim
        with pytest.raises(claims.RunReplaced):
            first.put_new(RECORD, b"commit")
        assert later[0].list(FOLDER)["COMMIT.json"] == 6, "the one who replaced it sees the record"


def test_a_replaced_process_whose_store_fails_reports_the_replacement(bucket):
    """It looks whether its COMMIT is to be withdrawn. The error is that of the replacement also where this fails."""
    objects = Objects(object_store.opened(bucket, QUICK), bucket, QUICK)
    with claims.claimed(objects, take_over=True) as first:
        put_new, found = objects.put_new, objects.list

        def put_and_claim(name: str, data: bytes) -> None:
            put_new(name, data)
            access.for_writing(bucket, MODE).__enter__()

        def failing(folder: str) -> object:
            if folder == FOLDER:
                raise TierDown("the store is down")
            return found(folder)

        objects.put_new, objects.list = put_and_claim, failing
        with pytest.raises(claims.RunReplaced):
            first.put_new(RECORD, b"commit")


def test_each_incarnation_in_a_bucket_has_an_order_of_its_own(bucket):
    with access.for_writing(bucket, MODE) as first:
        assert [first.next_order(1), first.next_order(2), first.next_order(9)] == [1, 2, 9]
    with access.for_writing(bucket, MODE) as second:
        assert second.next_order(3) == 10
        with access.for_writing(bucket, MODE) as third:
            with pytest.raises(claims.RunReplaced):
                second.next_order(11)
            assert third.next_order(3) == 11


def test_an_opening_that_fails_ends_its_claim(bucket):
    """After a training job whose places held different runs, commands demanded --take-over."""
    with pytest.raises(Refused), access.for_writing(bucket, MODE):
        raise Refused("the places hold different runs")
    with access.for_writing(bucket, MODE, take_over=False):
        """The failed opening was closed."""


def test_a_command_takes_a_run_over_only_on_request(bucket):
    with access.for_writing(bucket, MODE):
        with pytest.raises(claims.RunLocked, match=r"open for writing in process.*--take-over"):
            access.for_writing(bucket, MODE, take_over=False).__enter__()
        with access.for_writing(bucket, MODE, take_over=True):
            pass
    with access.for_writing(bucket, MODE, take_over=False):
        """The last opening was closed."""


def begin_upload(bucket: str) -> None:
    """Begin a multipart upload under the run, as a process that is killed in the middle of one has."""
    client, name = unfinished_uploads._client(QUICK), bucket.removeprefix("s3://tests/")
    begun = client.create_multipart_upload(Bucket="tests", Key=f"{name}/{BLOB}")
    part = {"Bucket": "tests", "Key": f"{name}/{BLOB}", "UploadId": begun["UploadId"], "PartNumber": 1}
    client.upload_part(**part, Body=pattern(5 << 20))


def unfinished(bucket: str) -> list[str]:
    found = unfinished_uploads._client(QUICK).list_multipart_uploads(Bucket="tests")
    return [one["Key"] for one in found.get("Uploads", ()) if one["Key"].startswith(bucket.removeprefix("s3://tests/"))]


def test_unfinished_uploads_of_a_killed_process_are_removed(bucket):
    held = contextlib.ExitStack()
    held.enter_context(access.for_writing(bucket, MODE))
    begin_upload(bucket)
    begin_upload(f"{bucket}-of-another-run")
    assert len(unfinished(bucket)) == 2
    with reports(), access.for_writing(bucket, MODE):
        assert [BLOB in one for one in unfinished(bucket)] == [True]
    assert "-of-another-run" in unfinished(bucket)[0]
    held.close()


def test_uploads_that_cannot_be_removed_do_not_stop_an_opening(bucket, monkeypatch):
    held = contextlib.ExitStack()
    held.enter_context(access.for_writing(bucket, MODE))
    monkeypatch.setattr(unfinished_uploads, "ENDPOINTS_OF_S3", ("AWS_ENDPOINT_OF_NOTHING",))
    monkeypatch.setenv("AWS_ENDPOINT_OF_NOTHING", "http://127.0.0.1:9")
    with reports() as found, access.for_writing(bucket, MODE):
        pass
    assert any("unfinished uploads were not removed" in one and "lifecycle rule" in one for one in map(str, found))
    held.close()


def test_a_store_that_does_not_list_uploads_in_time_is_down(bucket, proxy, monkeypatch):
    """An opening ended with an AttributeError: an error without an answer has None in place of one."""
    monkeypatch.setattr(unfinished_uploads, "DEADLINE_SECONDS", 0.2)
    proxy.inject(Fault("hang", lambda request: "uploads" in request.target))
    with pytest.raises(TierDown, match="unfinished uploads were not removed"):
        unfinished_uploads.remove(bucket, QUICK)


@pytest.mark.parametrize("kind", ["cut_before", "503"])
def test_uploads_that_cannot_be_listed_do_not_stop_an_opening(bucket, proxy, kind):
    """Where no reply came, the client's error has the response None, and the opening ended with AttributeError."""
    held = contextlib.ExitStack()
    held.enter_context(access.for_writing(bucket, MODE))
    proxy.inject(Fault(kind, lambda request: "uploads" in request.target))
    with reports() as found, access.for_writing(bucket, MODE):
        pass
    assert any("unfinished uploads were not removed" in one for one in map(str, found))
    held.close()


def test_claims_do_not_pile_up(bucket):
    for _ in range(5):
        with access.for_writing(bucket, MODE) as tier:
            listing = tier.list("claims")
    assert sorted(listing) == ["000004.ended.json", "000004.json", "000005.json"]


def test_of_many_openings_at_once_exactly_one_can_commit(bucket):
    ready, opened = threading.Barrier(6), []

    def open_and_commit(number: int) -> bool:
        ready.wait()
        context = access.for_writing(bucket, MODE)
        tier = context.__enter__()
        opened.append(context)
        ready.wait()
        try:
            tier.put_new(f"{FOLDER}{number}/COMMIT.json", b"commit")
        except claims.RunReplaced:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(open_and_commit, range(6)))
    assert sum(won) == 1


def test_the_tier_works_over_any_store_of_the_library() -> None:
    """Google's and Azure's stores have no server here; what the tier calls is the same for every store."""
    tier: Callable[..., object] = Objects(MemoryStore(), "memory")
    tier.put_new(RECORD, b"commit")
    with pytest.raises(NameTaken):
        tier.put_new(RECORD, b"other")
    upload(tier, BLOB, pattern(9 << 20))
    assert content(tier, BLOB) == pattern(9 << 20) and set(tier.list(FOLDER)) == {"COMMIT.json", "r00000.safetensors"}
    tier.delete(RECORD)
    tier.delete(RECORD)
    with pytest.raises(MissingBlob):
        tier.read_into(Extent(blob=RECORD, offset=0, length=1), memoryview(bytearray(1)))
