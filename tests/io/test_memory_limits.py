"""How much memory a process may still take, by trees that look like /proc and /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.io.memory_limits import MARGIN_BYTES, MARGIN_LEAST_BYTES, available_bytes, lacking_bytes

GIB = 1 << 30
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


def written(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def meminfo(total: int, available: int) -> str:
    return f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\nHugePages_Total: 0\n"


def group(folder: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


def test_the_machine_leaves_a_margin_of_what_is_available(tmp_path: Path) -> None:
    assert available_bytes(written(tmp_path, {"proc/meminfo": meminfo(64 * GIB, 40 * GIB)})) == 40 * GIB - MARGIN_BYTES


def test_the_margin_of_a_small_machine_is_a_share_of_it(tmp_path: Path) -> None:
    assert available_bytes(written(tmp_path, {"proc/meminfo": meminfo(4 * GIB, 2 * GIB)})) == 2 * GIB - GIB // 4


@pytest.mark.parametrize("path", ["/", "/job/step"])
def test_the_limit_of_a_parent_group_holds_for_its_children(tmp_path: Path, path: str) -> None:
    """In a container the group is shown as `/`; under Slurm the limit is that of the job, above the step."""
    files = {"proc/meminfo": meminfo(64 * GIB, 60 * GIB), "proc/self/cgroup": f"0::{path}\n"}
    files |= group(V2 if path == "/" else f"{V2}/job", str(16 * GIB), 10 * GIB, cached=3 * GIB)
    files |= group(f"{V2}/job/step", "max", 10 * GIB)
    assert available_bytes(written(tmp_path, files)) == 16 * GIB - 7 * GIB - MARGIN_BYTES


def test_a_limit_of_the_first_version_of_groups_is_read(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": meminfo(64 * GIB, 60 * GIB),
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/pod\n",
        f"{V1}/pod/memory.limit_in_bytes": f"{8 * GIB}\n",
        f"{V1}/pod/memory.usage_in_bytes": f"{6 * GIB}\n",
        f"{V1}/pod/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
        f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert available_bytes(written(tmp_path, files)) == 8 * GIB - 5 * GIB - GIB // 2


def test_a_group_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", **group(V2, str(2 * GIB), 2 * GIB)}
    assert available_bytes(written(tmp_path, files)) == 0


def test_the_limit_above_which_a_group_is_slowed_down_counts(tmp_path: Path) -> None:
    """Kubernetes sets it below the limit at which it kills (MemoryQoS). Files in a tmpfs cannot be reclaimed there."""
    files = {"proc/self/cgroup": "0::/\n", **group(V2, str(64 * GIB), 14 * GIB), f"{V2}/memory.high": f"{16 * GIB}\n"}
    assert available_bytes(written(tmp_path, files)) == 16 * GIB - 14 * GIB - MARGIN_BYTES


def test_without_any_of_these_files_nothing_is_known(tmp_path: Path) -> None:
    assert available_bytes(str(tmp_path)) is None


def test_a_small_group_leaves_room_for_the_agent_and_the_buffers(tmp_path: Path) -> None:
    """A sixteenth of 560 MiB was left, and the training process was killed."""
    files = {"proc/self/cgroup": "0::/\n", **group(V2, str(GIB // 2), GIB // 8)}
    assert available_bytes(written(tmp_path, files)) == GIB // 2 - GIB // 8 - MARGIN_LEAST_BYTES


def test_pages_that_wait_for_a_disk_are_not_free(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", **group(V2, str(16 * GIB), 10 * GIB, cached=3 * GIB)}
    files[f"{V2}/memory.stat"] += f"file_dirty {GIB}\nfile_writeback {GIB}\n"
    assert available_bytes(written(tmp_path, files)) == 16 * GIB - 9 * GIB - MARGIN_BYTES


def test_what_new_files_leave_is_not_short(tmp_path: Path) -> None:
    """A save that just fits would be written to memory and moved to the disk, each time."""
    root = written(tmp_path, {"proc/meminfo": meminfo(64 * GIB, MARGIN_BYTES)})
    assert available_bytes(root) == lacking_bytes(root) == 0


@pytest.mark.parametrize(("left", "lacking"), [(MARGIN_BYTES * 3 // 4, 0), (MARGIN_BYTES // 2, MARGIN_BYTES // 2)])
def test_memory_is_short_once_a_quarter_of_the_margin_is_taken(tmp_path: Path, left: int, lacking: int) -> None:
    """What the job takes beyond the margin is given back, and the whole margin with it."""
    assert lacking_bytes(written(tmp_path, {"proc/meminfo": meminfo(64 * GIB, left)})) == lacking


def test_the_limit_that_lacks_most_counts(tmp_path: Path) -> None:
    files = {"proc/meminfo": meminfo(64 * GIB, MARGIN_BYTES // 2), "proc/self/cgroup": "0::/job\n"}
    files |= group(f"{V2}/job", str(16 * GIB), 16 * GIB)
    assert lacking_bytes(written(tmp_path, files)) == MARGIN_BYTES


def test_where_no_limit_is_known_memory_is_never_short(tmp_path: Path) -> None:
    assert lacking_bytes(str(tmp_path)) == 0
