"""Files that an agent receives from another node, call by call: what overlaps, fails, or is given up half way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from lastgood import errors
from lastgood.agent.peer_files import PeerFiles
from lastgood.io.memory_files import MemoryFiles
from lastgood.ports import Upload
from lastgood.run.peers import FileCall
from lastgood.storage.directory import Disk
from lastgood.wire.port import Peer

SENDER = Peer("0" * 16, "b")
OLDER, NEWER = "gen/000000000001-0a0b0c0d", "gen/000000000002-0a0b0c0d"
NAME = f"{OLDER}/r00000.safetensors"


class Watched:
    """An upload. `hold`: called before it is written to or finished."""

    def __init__(self, upload: Upload, hold: Callable[[str], None]) -> None:
        self._upload, self._hold, self.calls = upload, hold, list[str]()

    def write_at(self, mv: memoryview, offset: int) -> None:
        self._hold("write")
        self._upload.write_at(mv, offset)
        self.calls.append("write")

    def finish(self) -> None:
        self._hold("finish")
        self._upload.finish()
        self.calls.append("finish")

    def abort(self) -> None:
        self._upload.abort()
        self.calls.append("abort")


class Node:
    """The files of a node that has committed the generations OLDER and NEWER."""

    def __init__(self, root: Path) -> None:
        self.root, self.uploads = root, list[Watched]()
        self.hold: Callable[[str], None] = lambda call: None
        for folder in (OLDER, NEWER):
            (root / folder).mkdir(parents=True)
            (root / folder / "COMMIT.json").write_bytes(b"{}")
        node = self

        class Recording(Disk):
            def create(self, name: str, length: int) -> Upload:
                node.uploads.append(Watched(super().create(name, length), lambda call: node.hold(call)))
                return node.uploads[-1]

        disk = Recording(MemoryFiles(str(root)), str(root), shared=True)
        self.files = PeerFiles(lambda: disk)

    def call(self, call: str, sending: str = "first", data: bytes = b"", name: str = NAME, length: int = 0) -> None:
        request = FileCall(call=call, name=name, sending=sending, length=length or len(data))  # type: ignore[arg-type]
        self.files.handle(SENDER, msgspec.json.encode(request), memoryview(bytearray(data)))

    def names(self) -> set[str]:
        return {one.name for one in self.root.glob("gen/*/r*")}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("call", ["abort", "create"])
def test_a_file_is_dropped_after_the_write_that_is_under_way(node: Node, call: str) -> None:
    """The upload was closed and its memory given to the next save while bytes were still copied into it."""
    writing, go_on = threading.Event(), threading.Event()

    def hold(_: str) -> None:
        writing.set()
        assert go_on.wait(20)

    node.hold = hold
    node.call("create", length=6)
    with ThreadPoolExecutor(1) as other:
        late = other.submit(node.call, "write", data=b"abc")
        assert writing.wait(20)
        if call == "create":
            with pytest.raises(errors.Refused, match="is being received; try again"):
                node.call("create", "second", length=6)
        else:
            node.call("abort")
        assert node.uploads[0].calls == []
        go_on.set()
        late.result()
    assert node.uploads[0].calls == ["write", "abort"] and node.names() == set()
    with pytest.raises(errors.Refused, match="was not begun"):
        node.call("write", data=b"def")
    node.call("create", "second", length=3)
    node.call("write", "second", data=b"abc")
    node.call("finish", "second")
    assert (node.root / NAME).read_bytes() == b"abc"


def test_a_file_that_gets_its_name_is_not_begun_anew(node: Node) -> None:
    """A second sending began while the first one's file was synced: the empty file of the second got the name."""

    def hold(call: str) -> None:
        if call == "finish":
            with pytest.raises(errors.Refused, match="is being received; try again"):
                node.call("create", "second", length=3)

    node.hold = hold
    node.call("create", length=3)
    node.call("write", data=b"abc")
    node.call("finish")
    assert (node.root / NAME).read_bytes() == b"abc" and len(node.uploads) == 1
    assert node.uploads[0].calls == ["write", "finish"]


def test_a_file_that_cannot_be_finished_is_closed_and_removed(node: Node) -> None:
    """Its descriptor, and the blocks of the file, were held until the agent ended."""

    def hold(call: str) -> None:
        if call == "finish":
            raise errors.NoSpace("the quota is used up")

    node.hold = hold
    node.call("create", length=3)
    node.call("write", data=b"abc")
    with pytest.raises(errors.NoSpace):
        node.call("finish")
    assert node.uploads[0].calls == ["write", "abort"] and node.names() == set()
    node.hold = lambda call: None
    node.call("create", "second", length=3)


def test_a_file_that_cannot_be_made_is_begun_anew(node: Node, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise errors.NoSpace("no block is free")

    with monkeypatch.context() as there, pytest.raises(errors.NoSpace):
        there.setattr(Disk, "create", full)
        node.call("create", length=3)
    node.call("create", "second", length=3)


def test_what_a_lost_sender_has_begun_goes_with_its_generation(node: Node) -> None:
    """A sender that was cut off could not drop its file, and its generation was overtaken: the file stayed, with as
    much memory as it was to have, until the run was opened again."""
    node.call("create", length=3)
    (node.root / OLDER / "COMMIT.json").unlink()
    node.call("create", name=NAME.replace(OLDER, NEWER), length=3)
    assert node.uploads[0].calls == ["abort"] and not (node.root / OLDER / "r00000.safetensors.copy.tmp").exists()
    assert node.uploads[1].calls == []
