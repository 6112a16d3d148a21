"""A tier whose files of ranks are in the memory of another node: written and read over the wire, as agents do it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping

import msgspec

from lastgood.agent.peer_files import PeerFiles
from lastgood.errors import NameTaken
from lastgood.format import layout
from lastgood.io.memory_files import MemoryFiles
from lastgood.ports import Upload
from lastgood.records import Extent
from lastgood.run.peers import CALL_SECONDS, RANK_FILE, FileCall, PeerDisk, PeerNode, Peers
from lastgood.storage.directory import Disk
from lastgood.wire.channel import Channel
from lastgood.wire.port import Peer
from lastgood.wire.security import SharedKey
from lastgood.wire.serving import Server
from lastgood.wire.window import MakeMemory

JOB, BY_KEY = "0" * 16, SharedKey(b"k" * 32)


class Committed(Disk):
    """The memory of a node where every generation is committed, as it is before anything of it is copied there."""

    def list(self, folder: str) -> Mapping[str, int | None]:
        return {layout.COMMIT: 1, **super().list(folder)}


class PeerUpload:
    """A file that is sent to another node. `begun`: the call that has begun it."""

    def __init__(self, channel: Channel, begun: FileCall) -> None:
        self._channel, self._begun = channel, begun

    def write_at(self, mv: memoryview, offset: int) -> None:
        data = mv[: self._begun.length - offset]  # `mv` may be padded
        call = msgspec.structs.replace(self._begun, call="write", offset=offset, length=len(data))
        called(self._channel, call, data)

    def finish(self) -> None:
        called(self._channel, msgspec.structs.replace(self._begun, call="finish", length=0))

    def abort(self) -> None:
        called(self._channel, msgspec.structs.replace(self._begun, call="abort", length=0))


def called(channel: Channel, call: FileCall, *data: memoryview) -> None:
    channel.call(msgspec.json.encode(call), outgoing=data, timeout_seconds=CALL_SECONDS)


class PeerTier(Disk):
    """`root`: the folder in the memory of the other node. `windows`: as for `Peers`, at both nodes."""

    def __init__(self, root: str, windows: MakeMemory | None = None) -> None:
        super().__init__(MemoryFiles(root), root)
        self._open = contextlib.ExitStack()
        files = PeerFiles(lambda: Committed(MemoryFiles(root), root))
        self._open.callback(files.close)
        server = self._open.enter_context(Server(("127.0.0.1", 0), Peer(JOB, "b"), BY_KEY, files, windows=windows))
        self._channel = self._open.enter_context(Channel(server.address, "b", Peer(JOB, "a"), BY_KEY, windows=windows))
        peers = self._open.enter_context(contextlib.closing(Peers(JOB, BY_KEY, "a", windows)))
        node = PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=server.address[1])
        self._peer = PeerDisk(peers, node)

    def close(self) -> None:
        self._open.close()

    def list(self, folder: str) -> Mapping[str, int | None]:
        found = super().list(folder)
        if RANK_FILE.fullmatch(f"{folder}/r00000.safetensors"):
            committed = layout.COMMIT in found
            found = {name: at for name, at in self._peer.list(folder).items() if name != layout.COMMIT or committed}
        return found

    def create(self, name: str, length: int) -> Upload:
        if not RANK_FILE.fullmatch(name):
            return super().create(name, length)
        folder, _, file = name.rpartition("/")
        if file in self._peer.list(folder):  # which an agent asks for before it sends a file
            raise NameTaken(f"{name} is on the other node", safe="It is untouched.")
        call = FileCall(call="create", name=name, sending=secrets.token_hex(8), length=length)
        called(self._channel, call)
        return PeerUpload(self._channel, call)

    def put_new(self, name: str, data: bytes) -> None:
        if RANK_FILE.fullmatch(name):
            called(self._channel, FileCall(call="put", name=name, length=len(data)), memoryview(data))
        else:
            super().put_new(name, data)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        if RANK_FILE.fullmatch(extent.blob):
            self._peer.read_into(extent, mv, fresh=fresh)
        else:
            super().read_into(extent, mv, fresh=fresh)
