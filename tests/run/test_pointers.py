"""`POINTER.json` and `latest_ok` are hints: whatever is found in their place, a run can be restored, saved and
cleaned up."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import continued, load, save
from lastgood.engine.arena import Arena
from lastgood.format import commit, layout
from lastgood.io.files import PosixFile, PosixFiles
from lastgood.policy.retention import Keep
from lastgood.records import Incarnation
from lastgood.run import access
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood.testing import Fault, FaultyFiles

V1 = Path(__file__).parents[1] / "golden" / "v1"


def tier_of(root: Path, files: PosixFiles | None = None) -> Disk:
    return Disk(files or PosixFiles(), str(root))


def opened(tier: Disk) -> RunWriter:
    """A writer that continues the newest generation of a run."""
    Path(tier.place).mkdir(exist_ok=True)
    return continued(tier, Keep(last=1))


def saved(run: RunWriter, *steps: int, verify: bool = True) -> None:
    for step in steps:
        save(run, step, {"w": bytes([step]) * 20_000})
        if verify:
            run.verify(Arena(3 * 8192, 8192))
            run.clean()


def steps_in(tier: Disk) -> list[int]:
    return sorted(at.step for at in commit.survey(tier).generations)


def test_a_run_copied_with_dereferenced_links_is_restored_and_cleaned_up(tmp_path, caplog):
    """`cp -rL` turned `latest_ok` into a folder: restore() raised MissingBlob about another file after it had loaded
    the state, and nothing was ever deleted again."""
    saved(opened(tier_of(tmp_path / "run")), 1, 2)
    saved(opened(tier_of(tmp_path / "run")), 3, verify=False)  # the process died before it verified its last save
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=False)
    assert (tmp_path / "copy" / layout.LINK).is_dir()
    tier = tier_of(tmp_path / "copy")
    run = opened(tier)
    assert load(tier)[0].generation.step == 3
    run.conclude(run.lineage()[0], [])
    saved(run, 4, 5)
    assert steps_in(tier) == [5]
    assert os.readlink(tmp_path / "copy" / layout.LINK) == layout.folder(run.lineage()[0].id)
    aside = tmp_path / "copy" / f"{layout.LINK}.copy-1"
    assert (aside / layout.COMMIT).exists(), "a folder that a user has copied is not deleted"
    assert caplog.text.count(str(aside)) == 1


@pytest.mark.parametrize("name", [layout.POINTER, layout.LINK])
@pytest.mark.parametrize("kind", ["folder", "full folder", "file", "dangling link"])
def test_any_file_in_place_of_the_pointer_is_replaced(tmp_path, name, kind):
    saved(opened(tier_of(tmp_path)), 1)
    path = tmp_path / name
    path.unlink()
    if kind == "file":
        path.write_bytes(b"anything")
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    else:
        path.mkdir()
        if kind == "full folder":
            (path / "kept").write_bytes(b"somebody's")
    tier = tier_of(tmp_path)
    saved(opened(tier), 2, 3)
    survey = commit.survey(tier)
    assert steps_in(tier) == [3] and survey.pointer is not None and survey.pointer.step == 3
    assert (tmp_path / layout.LINK).resolve().name.startswith("000000000003-")
    assert kind != "full folder" or (tmp_path / f"{name}.copy-1" / "kept").read_bytes() == b"somebody's"


def test_a_second_dereferenced_copy_is_kept_beside_the_first(tmp_path):
    for step in (1, 2):
        saved(opened(tier_of(tmp_path)), step)
        (tmp_path / layout.LINK).unlink()
        (tmp_path / layout.LINK).mkdir()
    saved(opened(tier_of(tmp_path)), 3)
    assert {one.name for one in tmp_path.glob("latest_ok*")} == {"latest_ok", "latest_ok.copy-1", "latest_ok.copy-2"}


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_pointer_whose_link_failed_keeps_what_it_names(tmp_path, error):
    """The first pointer was written, and then its link failed. That generation was deleted while POINTER.json named
    it, and the next opening reported it as lost."""
    files = FaultyFiles(Fault("symlink", errno=error))
    tier = Disk(files, str(tmp_path))
    run = opened(tier)
    saved(run, 1)
    files.inject(Fault("rename"))
    saved(run, 2, 3)
    pointer = commit.survey(tier).pointer
    assert pointer is not None and pointer.step == 1 and steps_in(tier) == [1, 3]


# ---- names that differ only in case ------------------------------------------------------------------------------


def test_no_two_names_of_the_format_differ_only_in_case():
    """`lastgood.json` and `LASTGOOD.json` were one file on APFS, SMB and exFAT."""
    incarnation = layout.incarnation_name(Incarnation(format=1, order=1, id="0a0a0a0a", parent=None))
    root = [layout.HEADER, layout.POINTER, layout.LINK, access.LOCK, "gen", "incarnations", "slots", incarnation]
    inside = [layout.COMMIT, layout.VERIFIED, layout.DAMAGED, layout.UNFIT, layout.GOING]
    inside += [layout.manifest_name(0), layout.blob_name(0), layout.blob_name(0, 1), "r00000.parity-0"]
    for names in (root, inside):
        assert len({name.casefold() for name in names}) == len(names)


def test_a_run_with_the_old_pointer_name_continues_with_one_pointer(tmp_path):
    shutil.copytree(V1, tmp_path / "run", symlinks=True)
    tier = tier_of(tmp_path / "run")
    old = commit.survey(tier).pointer
    assert old is not None and (tmp_path / "run" / layout.OLD_POINTER).exists()
    run = opened(tier)
    assert run.survey.pointer == old
    run.marks.point()
    assert commit.survey(tier).pointer == old
    assert {one.name for one in (tmp_path / "run").glob("*.json")} == {layout.HEADER, layout.POINTER}


class CaseBlind(PosixFiles):
    """A file system that preserves the case of names and ignores it in lookups, like APFS, SMB and exFAT."""

    def _found(self, path: str) -> str:
        folder, name = os.path.split(path)
        names = os.listdir(folder) if os.path.isdir(folder) else []
        return os.path.join(folder, next((one for one in names if one.lower() == name.lower()), name))

    def open(self, path: str, *args: Any, **options: Any) -> PosixFile:
        return super().open(self._found(path), *args, **options)

    def link(self, old: str, new: str) -> None:
        super().link(old, self._found(new))

    def rename(self, old: str, new: str) -> None:
        super().rename(self._found(old), self._found(new))

    def remove(self, path: str) -> None:
        super().remove(self._found(path))


def test_header_and_pointer_stay_apart_where_names_ignore_case(tmp_path):
    tier = tier_of(tmp_path, CaseBlind())
    saved(opened(tier), 1)
    run = opened(tier)
    saved(run, 2)
    survey = commit.survey(tier)
    assert survey.run == run.survey.generations[max(run.survey.generations)].commit.run
    assert survey.pointer is not None and survey.pointer.step == 2


@pytest.mark.parametrize("name", [layout.HEADER, layout.OLD_POINTER])
def test_a_run_whose_old_pointer_replaced_its_header_still_opens(tmp_path, name):
    """Earlier versions left one file on such a disk, under either name, with the pointer in it."""
    shutil.copytree(V1, tmp_path / "run", symlinks=True)
    pointer = (tmp_path / "run" / layout.OLD_POINTER).read_bytes()
    for one in (layout.HEADER, layout.OLD_POINTER):
        (tmp_path / "run" / one).unlink()
    (tmp_path / "run" / name).write_bytes(pointer)
    tier = tier_of(tmp_path / "run", CaseBlind())
    run = opened(tier)
    run.marks.point()
    survey = commit.survey(tier)
    assert survey.run == run.lineage()[0].commit.run
    assert survey.pointer is not None and survey.pointer.step == 20


@pytest.fixture
def case_blind_folder(tmp_path: Path) -> Iterator[Path]:
    """An ext4 folder that ignores case, in a loop-mounted image."""
    image, mount = tmp_path / "image", tmp_path / "mounted"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-O", "casefold", str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True, capture_output=True)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("needs root, e2fsprogs, and a kernel with CONFIG_UNICODE for `mkfs.ext4 -O casefold`")
    try:
        (mount / "blind").mkdir()
        subprocess.run(["chattr", "+F", str(mount / "blind")], check=True)
        yield mount / "blind"
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_run_works_on_a_file_system_that_ignores_case(case_blind_folder):
    with access.for_writing(case_blind_folder / "run", "atomic_dirsync") as tier:
        saved(opened(tier), 1, 2)
        survey = commit.survey(tier)
        assert survey.run is not None and survey.pointer is not None and survey.pointer.step == 2
