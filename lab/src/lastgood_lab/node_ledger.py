"""What the generations of a schedule are, and the rules that each change of a file is held to.

a COMMIT              has the bytes of every other COMMIT of its generation; every rank has sealed its files
a COMMIT in the home  has every file beside it, with the bytes that its rank has sealed
a file of a rank      never changes while COMMIT and its manifest are beside it, and goes after all COMMITs
an agent              removes no COMMIT, and accepts no file of a generation without one
a removal             leaves the newest generation that can be restored, or a newer one. If a machine dies while
                      requests to remove are on their way, only what had copies counts
a death               leaves it too, if its copies were reported, and no more nodes died than these survive
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from lastgood.format import layout
from lastgood.records import Commit, GenerationId
from lastgood.run.peers import FileCall

from .interleaving import Process
from .shared_files import Content, SharedFiles

Rule = Callable[[], None] | None


@dataclass
class Ledger:
    """`world`: of the schedule. `nodes`: the numbers of the machines of the newest job."""

    world: Any
    nodes: list[int]
    spec: Any = None
    linger_seconds: float = 0.0
    orders: dict[str, int] = field(default_factory=dict)
    """incarnation -> its order"""
    jobs: dict[str, GenerationId | None] = field(default_factory=dict)
    """incarnation -> the generation that it continues"""
    sealed: dict[tuple[GenerationId, str], bytes] = field(default_factory=dict)
    """(generation, name of a file of a rank) -> its bytes when the rank sealed it"""
    commits: dict[GenerationId, tuple[bytes, Commit]] = field(default_factory=dict)
    reported: set[GenerationId] = field(default_factory=set)
    """those that a save has returned"""
    copied: dict[GenerationId, int] = field(default_factory=dict)
    """those whose copies were reported as made -> the number of nodes that had died before"""
    replaced: dict[GenerationId, set[Process]] = field(default_factory=dict)
    """those without copies that a newer one had replaced when a machine died -> the processes that lived then"""
    died: int = 0
    all_sealed: bool = False
    """whether a generation counts too that all ranks have sealed and that no save has returned"""
    agents: list[Process] = field(default_factory=list)

    def continued(self, world: Any) -> Ledger:
        """The same in another schedule that begins where this one has ended."""
        return replace(
            self,
            world=world,
            nodes=[*self.nodes],
            orders=dict(self.orders),
            jobs=dict(self.jobs),
            sealed=dict(self.sealed),
            commits=dict(self.commits),
            reported=set(self.reported),
            copied=dict(self.copied),
            replaced={},
            agents=[],
        )

    # ---- what can be restored ------------------------------------------------------------------------------

    def rank_of(self, at: GenerationId) -> tuple[int, int]:
        return self.orders[at.incarnation], at.step

    def best(self, every: bool = False) -> GenerationId | None:
        """The newest generation that the home, or the memory of all nodes together, can give back.

        One whose coordinator died before its save returned counts once it is in the home; with `every` in any case.
        """
        every = every or self.all_sealed
        for at in self._lineage():
            if self.in_home(at) or ((every or at in self.reported) and self.in_memory(at)):
                return at
        return None

    def _lineage(self) -> list[GenerationId]:
        """What was not abandoned, newest first. A job that continues an older generation abandons newer ones once its
        record or a COMMIT of it can be seen."""
        found, newest, bound = list[GenerationId](), self._newest_job(), None
        while newest in self.jobs:
            mine = [at for at in self.commits if at.incarnation == newest and (bound is None or at.step <= bound)]
            found += sorted(mine, key=self.rank_of, reverse=True)
            continued = self.jobs[newest]
            newest, bound = (continued.incarnation, continued.step) if continued else ("", None)
        return found

    def _newest_job(self) -> str:
        """The newest incarnation of which a COMMIT or the record can be seen."""
        roots = ["/home/run", *(f"/m{node}/run" for node in self.nodes)]
        seen = set[str]()
        for root in roots:
            files = self.world.files[root.split("/")[1]]
            seen |= {name.split("-")[1].partition(".")[0] for name in files.names_in(f"{root}/incarnations")}
            seen |= {
                at.incarnation for at in self.commits if layout.COMMIT in files.names_in(f"{root}/{layout.folder(at)}")
            }
        return max(seen & self.jobs.keys(), key=lambda one: self.orders[one], default="")

    def in_home(self, at: GenerationId) -> bool:
        there = self.world.files["home"].names_in(f"/home/run/{layout.folder(at)}")
        return (
            at in self.commits
            and layout.COMMIT in there
            and all(self._whole(at, name, there) for name in self.files_of(at))
        )

    def in_memory(self, at: GenerationId) -> bool:
        places = self.folders_of(at)
        committed = at in self.commits and any(layout.COMMIT in there for there in places.values())
        return committed and all(
            any(self._whole(at, manifest, there) and self._whole(at, blob, there) for there in places.values())
            for manifest, blob in self.parts_of(at)
        )

    def folders_of(self, at: GenerationId) -> dict[int, Any]:
        """Node -> what its memory has of a generation."""
        folder = layout.folder(at)
        return {node: self.world.files[f"m{node}"].names_in(f"/m{node}/run/{folder}") for node in self.nodes}

    def parts_of(self, at: GenerationId) -> list[tuple[str, str]]:
        """The manifest and the tensor file of each rank."""
        return [(one.manifest, layout.blob_name(one.rank)) for one in self.commits[at][1].seals]

    def files_of(self, at: GenerationId) -> list[str]:
        return [name for part in self.parts_of(at) for name in part]

    def _whole(self, at: GenerationId, name: str, there: Any) -> bool:
        content = there.get(name)
        return content is not None and content.data == self.sealed.get((at, name))

    # ---- the rules -----------------------------------------------------------------------------------------

    def changed(self, files: SharedFiles, call: str, path: str, content: Content | None) -> Rule:
        """Called before each change of a file of a generation. Returns what is to be checked after it."""
        if self.world.scheduler.quiet:
            return None
        if call == "move_tree":
            return self._keeps(f"{path} was removed", every=False)
        root, _, rest = path.partition("/gen/")
        name, _, file = rest.partition("/")
        at = layout.parse_folder(name)
        if at is None or not file:
            return None
        beside = files.names_in(f"{root}/gen/{name}")
        if call == "link" and content is not None:
            return self._linked(root, at, file, bytes(content.data), beside)
        manifest = f"{file.partition('.')[0]}.manifest.json"
        finished = layout.COMMIT in beside and (root == "/home/run" or manifest in beside)
        same = content is not None and bytes(content.data) == self.sealed.get((at, file))
        if file[0] == "r" and finished and not same and call in ("write", "remove", "rename"):
            self._wrong(f"{call} of {path}, which is committed and finished")
        if call != "remove":
            return None
        if file[0] == "r" and manifest in beside and root != "/home/run":
            for node, there in self.folders_of(at).items():
                if layout.COMMIT in there:
                    self._wrong(f"{path} was removed while node {node} has its COMMIT")
        if file == layout.COMMIT and self.world.me().name.startswith("agent"):
            self._wrong(f"{path} was removed by {self.world.me().name}")
        if file == layout.COMMIT or file[0] == "r":
            return self._keeps(f"{path} was removed by {self.world.me().name}", every=True)
        return None

    def _linked(self, root: str, at: GenerationId, file: str, data: bytes, beside: Any) -> Rule:
        if file == layout.COMMIT:
            return lambda: self._committed(root, at, data, beside)
        if file.endswith(".manifest.json"):
            blob = layout.blob_name(int(file[1 : file.index(".")]))
            if (at, file) not in self.sealed:
                if blob in beside:  # otherwise the coordinator has given this save up, and it is never committed
                    self.sealed[at, file] = data
                    self.sealed[at, blob] = bytes(beside[blob].data)
            elif not self._whole(at, blob, beside) or self.sealed[at, file] != data:
                self._wrong(f"{root}/{at}: {file} is there, and its file is not what the rank has sealed")
        return None

    def _committed(self, root: str, at: GenerationId, data: bytes, beside: Any) -> None:
        if at not in self.commits:
            self.commits[at] = data, layout.decode(data, Commit, "COMMIT")
            self.orders[at.incarnation] = self.commits[at][1].order
            self.jobs[at.incarnation] = self.commits[at][1].continues
            missing = [name for name in self.files_of(at) if (at, name) not in self.sealed]
            if missing:
                self._wrong(f"{at} was committed before {missing[0]} was sealed")
        if self.commits[at][0] != data:
            self._wrong(f"{at} has two different COMMITs")
        if root == "/home/run" and not self.in_home(at):
            self._wrong(f"{at} was committed in the home without all its files: {sorted(beside)}")

    def _keeps(self, what: str, every: bool) -> Rule:
        before = self.best(every)

        def rule() -> None:
            after = self.best(every)
            if before is None or self.world.me() in self.replaced.get(before, ()):
                return
            if after is None or self.rank_of(after) < self.rank_of(before):
                self._wrong(f"{what}: {before} could be restored, and now {after}")

        return rule

    def _wrong(self, what: str) -> None:
        self.world.scheduler.fail(what)

    def asked(self, node: int, request: bytes) -> Callable[[], None]:
        """An agent is asked for something by another one. What is returned is called if it has done so."""
        call = msgspec.json.decode(request, type=FileCall)
        path = f"/m{node}/run/{call.name.rpartition('/')[0]}"

        def committed() -> bool:
            return layout.COMMIT in self.world.files[f"m{node}"].names_in(path)

        before = committed()

        def accepted() -> None:
            if call.call in ("create", "write", "finish", "put") and not before and not committed():
                self._wrong(
                    f"the agent of node {node} accepted {call.call} of {call.name}, which is not committed there"
                )

        return accepted

    # ---- what is reported, and what dies -------------------------------------------------------------------

    def report(self, at: GenerationId) -> None:
        """A save has returned."""
        self.reported.add(at)
        best = self.best()
        if not self.died and (best is None or self.rank_of(best) < self.rank_of(at)):
            self._wrong(f"{at} was reported as committed, and cannot be restored")

    def hold_restored(self, found: GenerationId | None) -> None:
        """A job that opens the run continues this generation."""
        best = self.best()
        if best is not None and (found is None or self.rank_of(found) < self.rank_of(best)):
            self._wrong(f"{best} can be restored, and a job continues {found}")

    def report_copies(self, at: GenerationId, died_before: int) -> None:
        """The copies of a generation were reported as made. `died_before`: how many machines had died at its commit.

        A machine that died since may have taken some of them with it.
        """
        missing = self.held_once(at)
        if not missing:
            self.copied[at] = self.died
        elif self.died == died_before:
            self._wrong(f"the copies of {at} were reported, and {missing} lies on one node")

    def held_once(self, at: GenerationId) -> str:
        """A part of a generation that lies on fewer than two nodes; "" if there is none, or a newer one has come."""
        best, places = self.best(), self.folders_of(at)
        if best is not None and self.rank_of(best) > self.rank_of(at):
            return ""
        for manifest, blob in self.parts_of(at):
            held = [one for one in places.values() if self._whole(at, manifest, one) and self._whole(at, blob, one)]
            if len(held) < 2:
                return manifest
        return ""

    def lose(self, node: int, before: GenerationId | None) -> None:
        """The memory of a node is gone, with the machine. `before`: the newest that could be restored until then."""
        self.died += 1
        alive = {one.process for one in self.world.scheduler.actors}
        for at in self.commits.keys() - self.copied.keys():
            if before is not None and self.rank_of(at) < self.rank_of(before):
                self.replaced[at] = self.replaced.get(at, set()) | alive
        best = self.best()
        for at, died_before in self.copied.items():
            if self.died - died_before <= 1 and (best is None or self.rank_of(best) < self.rank_of(at)):
                self._wrong(f"node {node} died, and with it {at}, whose copies were reported")
