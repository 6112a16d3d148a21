"""`lastgood.testing`: the tools with which users test their own training loops."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lastgood.io.files import PosixFiles
from lastgood.testing import Call, Clock, Fault, FaultyFiles

PAGE = Path(__file__).parents[2] / "docs/testing.md"


def write(files: FaultyFiles, path: Path, data: bytes) -> None:
    """Write a new file, in as many calls as needed."""
    file = files.open(str(path), "new")
    try:
        done = 0
        while done < len(data):
            done += file.write_at(memoryview(data)[done:], done)
        file.sync()
    finally:
        file.close()


def test_the_example_of_the_page_passes(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, object] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    (test,) = (value for name, value in names.items() if name.startswith("test_"))
    test(tmp_path)


def test_only_the_nth_matching_call_fails_counted_from_the_injection(tmp_path: Path) -> None:
    files = FaultyFiles()
    write(files, tmp_path / "a.bin", b"1")
    files.inject(Fault("open new", "*.bin", errno.EMFILE, nth=2))
    write(files, tmp_path / "a.txt", b"1")  # this call does not match, and is not counted
    write(files, tmp_path / "b.bin", b"1")
    with pytest.raises(OSError) as caught:
        write(files, tmp_path / "c.bin", b"1")
    assert caught.value.errno == errno.EMFILE and not (tmp_path / "c.bin").exists()
    write(files, tmp_path / "c.bin", b"1")


@pytest.mark.parametrize("operation", ["make_dir", "open new"])
def test_a_fault_after_the_call_keeps_the_effect_of_the_call(tmp_path: Path, operation: str) -> None:
    files = FaultyFiles(Fault(operation, after=True))
    with pytest.raises(OSError):
        files.make_dir(str(tmp_path / "new")) if operation == "make_dir" else write(files, tmp_path / "new", b"1")
    assert (tmp_path / "new").exists()


def test_a_fault_on_every_change_does_not_affect_reads(tmp_path: Path) -> None:
    write(FaultyFiles(), tmp_path / "kept", b"content")
    files = FaultyFiles(Fault("change"))
    assert files.list(str(tmp_path)) == {"kept": 7}
    buffer = memoryview(bytearray(7))
    file = files.open(str(tmp_path / "kept"), "read")
    assert file.read_into(buffer, 0) == 7 and bytes(buffer) == b"content"
    file.close()
    for change in (
        lambda: files.remove(str(tmp_path / "kept")),
        lambda: files.rename(str(tmp_path / "kept"), str(tmp_path / "other")),
        lambda: files.link(str(tmp_path / "kept"), str(tmp_path / "other")),
    ):
        with pytest.raises(OSError):
            change()
    assert files.list(str(tmp_path)) == {"kept": 7}


def test_short_transfers_are_recorded_with_what_was_asked_for(tmp_path: Path) -> None:
    files = FaultyFiles(most_bytes=3)
    write(files, tmp_path / "x", b"1234567")
    assert (tmp_path / "x").read_bytes() == b"1234567"
    path = str(tmp_path / "x")
    assert [call for call in files.calls if call.operation == "write"] == [
        Call("write", path, 0, 7),
        Call("write", path, 3, 4),
        Call("write", path, 6, 1),
    ]
    assert files.changes()[-1] == ("sync", path)


def test_a_full_disk_has_space_again_after_a_removal(tmp_path: Path) -> None:
    files = FaultyFiles(capacity_bytes=10)
    write(files, tmp_path / "a", bytes(6))
    files.rename(str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(OSError) as caught:
        write(files, tmp_path / "c", bytes(6))
    assert caught.value.errno == errno.ENOSPC
    files.remove(str(tmp_path / "c"))
    files.remove(str(tmp_path / "b"))
    write(files, tmp_path / "c", bytes(6))


def test_a_linked_file_takes_space_after_its_first_name_is_removed(tmp_path: Path) -> None:
    """A record is linked to its name and its temporary name is removed; its bytes were no longer counted after that."""
    files = FaultyFiles(capacity_bytes=10)
    write(files, tmp_path / "a.tmp", bytes(6))
    files.link(str(tmp_path / "a.tmp"), str(tmp_path / "a"))
    files.remove(str(tmp_path / "a.tmp"))
    with pytest.raises(OSError) as caught:
        write(files, tmp_path / "c", bytes(6))
    assert caught.value.errno == errno.ENOSPC


def test_a_removal_whose_reply_is_lost_gives_its_space_back(tmp_path: Path) -> None:
    """The error was raised before the bytes of the removed file had been subtracted."""
    files = FaultyFiles(Fault("remove", after=True), capacity_bytes=10)
    write(files, tmp_path / "a", bytes(6))
    with pytest.raises(OSError):
        files.remove(str(tmp_path / "a"))
    write(files, tmp_path / "b", bytes(6))
    assert (tmp_path / "b").stat().st_size == 6


def test_a_call_raises_the_error_of_its_before_hook(tmp_path: Path) -> None:
    def refuse(call: Call) -> None:
        if call.name == "secret":
            raise PermissionError(call.path)

    files = FaultyFiles(before=refuse)
    write(files, tmp_path / "open", b"1")
    with pytest.raises(PermissionError):
        write(files, tmp_path / "secret", b"1")
    assert not (tmp_path / "secret").exists()


def test_wrapped_faulty_files_pass_errors_through(tmp_path: Path) -> None:
    below = FaultyFiles(Fault("make_dir", errno=errno.EROFS), files=PosixFiles())
    with pytest.raises(OSError) as caught:
        FaultyFiles(files=below).make_dir(str(tmp_path / "new"))
    assert caught.value.errno == errno.EROFS


def test_a_clock_moves_only_forward_and_only_when_it_is_moved() -> None:
    clock = Clock(5.0)
    assert clock() == clock() == 5.0
    clock.advance(2.5)
    assert clock() == 7.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1.0)


def test_the_package_needs_neither_torch_nor_pytest() -> None:
    code = "import sys, lastgood.testing; sys.exit(bool({'torch', 'pytest', '_pytest'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
