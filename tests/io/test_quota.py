"""The free space of a disk takes the quotas of the user and the group into account."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgood.io import files, quota
from lastgood.io.quota import GETQUOTA, GROUP, USER, Quota, ask_kernel

USER_ID, GROUP_ID, TEAM_ID = 1000, 2000, 3000


class Kernel:
    """Quotas by kind and id: (hard limit in blocks of 1,024 bytes, bytes used)."""

    def __init__(self, quotas: dict[tuple[int, int], tuple[int, int]]) -> None:
        self.quotas = quotas

    def __call__(self, fd: int, command: int, ident: int, answer: Quota) -> int:
        os.fstat(fd)  # raises if the file is not open
        assert command & ~0xFF == GETQUOTA
        found = self.quotas.get((command & 0xFF, ident))
        if found is None:
            return -1
        answer.hard_limit_blocks, answer.used_bytes = found
        return 0


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: USER_ID)
    monkeypatch.setattr(os, "getegid", lambda: GROUP_ID)


@pytest.mark.parametrize(
    ("quotas", "free"),
    [
        ({}, []),
        ({(USER, USER_ID): (0, 5)}, []),
        ({(USER, USER_ID): (10, 240)}, [10_000]),
        ({(USER, USER_ID): (10, 240), (GROUP, GROUP_ID): (1, 2000)}, [10_000, 0]),
        ({(USER, GROUP_ID): (1, 0), (GROUP, USER_ID): (1, 0)}, []),
    ],
)
def test_free_space_respects_user_and_group_quotas(
    tmp_path: Path, as_user: None, quotas: dict, free: list[int]
) -> None:
    """No quota, a quota without a limit, a limit, more used than allowed, and quotas of other ids."""
    assert quota.free_bytes(str(tmp_path), Kernel(quotas)) == free


def test_the_quota_of_the_group_of_a_setgid_folder_counts(tmp_path: Path, as_user: None) -> None:
    """A folder with the setgid bit passes its own group to new files, and on clusters that group has the quota."""
    os.chown(tmp_path, -1, TEAM_ID) if os.getuid() == 0 else pytest.skip("needs root to give a folder to a group")
    os.chmod(tmp_path, 0o2775)
    assert quota.free_bytes(str(tmp_path), Kernel({(GROUP, TEAM_ID): (1, 24), (GROUP, GROUP_ID): (9, 0)})) == [1000]


def test_root_has_no_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert quota.free_bytes(str(tmp_path), Kernel({(USER, 0): (1, 0)})) == []


def test_free_space_is_the_minimum_of_disk_and_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound far above the user's quota was compared with the whole disk, and nothing was reported."""
    assert files.free_bytes(str(tmp_path)) > 5000
    monkeypatch.setattr(quota, "free_bytes", lambda _: [7000, 5000])
    assert files.free_bytes(str(tmp_path)) == 5000


@pytest.fixture
def disk_with_quotas(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system that enforces quotas."""
    image, mount = tmp_path / "image", tmp_path / "mounted"
    image.write_bytes(b"")
    os.truncate(image, 64 << 20)
    mount.mkdir()
    make = ["mkfs.ext4", "-q", "-O", "quota", "-E", "quotatype=usrquota:grpquota", str(image)]
    attach = ["mount", "-o", "loop,usrquota,grpquota", str(image), str(mount)]
    try:
        for command in (make, attach):
            subprocess.run(command, check=True, capture_output=True)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"needs root, and a kernel with quotas for ext4 (CONFIG_QFMT_V2): {error}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_real_quota_is_read_from_the_kernel(disk_with_quotas: Path) -> None:
    limit = Quota(hard_limit_blocks=10_000, valid=1)
    fd = os.open(disk_with_quotas, os.O_RDONLY)
    assert ask_kernel(fd, 0x800008 << 8 | USER, USER_ID, limit) == 0
    os.close(fd)
    (disk_with_quotas / "own").mkdir()
    os.chown(disk_with_quotas / "own", USER_ID, GROUP_ID)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # root is exempt from quotas, and a process cannot become root again
        try:
            os.setgid(GROUP_ID)
            os.setuid(USER_ID)
            (disk_with_quotas / "own" / "file").write_bytes(bytes(1 << 20))
            os.sync()
            os.write(writing, json.dumps(quota.free_bytes(str(disk_with_quotas / "own"))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        (free_bytes,) = json.load(answer)
    assert 10_000 * 1024 - (2 << 20) < free_bytes < 10_000 * 1024 - (1 << 20)
