"""What the generations of a schedule are, and the rules that each change of a file is held to.

a COMMIT              has the bytes of every other COMMIT of its generation; every rank has sealed its files
a COMMIT in the home  has every file beside it, with the bytes that its rank has sealed
a file of a rank      never changes while COMMIT and its manifest are beside it, and goes after all COMMITs
an agent              removes no COMMIT, and accepts no file of a generation without one; commits late for others only
                      while no process has the run open there, and deletes the intent once all nodes have COMMIT
a removal             leaves the newest generation that can be restored, or a newer one. If a machine dies while
                      requests to remove are on their way, only what had copies counts
a removal of COMMIT   by a job that makes copies or parity leaves the newest generation that survives a lost node, or a
                      newer one that does: one that the job has found, or that has all its copies or parity. If a
                      machine has died since the job began, or parity was damaged, it may not be known which these are;
                      nor whether one is, whose copies were given up: the answer that they are made may have been lost
a death               leaves it too, if its copies or its parity were reported, and no more nodes died than these
                      survive
a report of them      is true: without any nodes, as many as they survive, the generation can still be restored
a restore             gives each rank the bytes that it has saved
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import msgspec

from lastgood.format import layout
from lastgood.records import Commit, GenerationId
from lastgood.run.access import AGENTS_MARK, LOCK
from lastgood.run.peers import FileCall

from .interleaving import Process
from .node_stripes import Names, SealedFiles
from .shared_files import Content, SharedFiles

Rule = Callable[[], object] | None


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
    """those whose copies or parity were reported as made -> the number of nodes that had died when they were begun"""
    losses: int = 1
    """how many nodes may die after such a report"""
    replaced: dict[GenerationId, set[Process]] = field(default_factory=dict)
    """those without copies that a newer one had replaced when a machine died -> the processes that lived then"""
    damaged: set[GenerationId] = field(default_factory=set)
    """those of which a file of parity was damaged"""
    died: int = 0
    """machines, and files of parity that were damaged"""
    died_before_job: int | None = None
    """how many had died when the newest job began, if it makes copies or parity"""
    found: set[GenerationId] = field(default_factory=set)
    """those that were committed by then"""
    given_up: set[GenerationId] = field(default_factory=set)
    """those whose copies or parity the newest job has given up, because a newer one was committed"""
    agents: list[Process] = field(default_factory=list)
    _files: dict[GenerationId, SealedFiles] = field(default_factory=dict)

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
            damaged=set(self.damaged),
            died_before_job=None,
            found=set(),
            given_up=set(),
            agents=[],
            _files=dict(self._files),
        )

    # ---- what can be restored ------------------------------------------------------------------------------

    def rank_of(self, at: GenerationId) -> tuple[int, int]:
        return self.orders[at.incarnation], at.step

    def best(self, every: bool = False) -> GenerationId | None:
        """The newest generation that the home, or the memory of all nodes together, can give back.

        One whose coordinator died before its save returned counts once it is in the home; with `every` in any case.
        """
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

    def in_memory(self, at: GenerationId, without: Collection[int] = ()) -> bool:
        """Whether the memory of the nodes has a generation, or can give it back, if some of them are lost."""
        places = [there for node, there in self.folders_of(at).items() if node not in without]
        committed = at in self.commits and any(layout.COMMIT in there for there in places)
        return committed and all(self._has_part(at, manifest, blob, places) for manifest, blob in self.parts_of(at))

    def _has_part(self, at: GenerationId, manifest: str, blob: str, places: Collection[Names]) -> bool:
        """Whether the files of a rank lie on a node, or can be computed from parity."""
        if any(self._whole(at, manifest, there) and self._whole(at, blob, there) for there in places):
            return True
        if at not in self._files:
            self._files[at] = SealedFiles({name: data for (one, name), data in self.sealed.items() if one == at})
        return self._files[at].can_be_rebuilt(manifest, places)

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
        if file == layout.INTENT and layout.COMMIT in beside:
            self._withdrawn(at, path)
        if file == layout.COMMIT or file[0] in "rs":
            what = f"{path} was removed by {self.world.me().name}"
            rules = [self._keeps(what, every=True)]
            if file == layout.COMMIT and root != "/home/run" and self.died == self.died_before_job:
                rules.append(self._protects(what))
            return lambda: [rule() for rule in rules if rule is not None]
        return None

    def _withdrawn(self, at: GenerationId, path: str) -> None:
        """The intent beside a COMMIT is removed."""
        who = self.world.me().name
        for node, there in self.folders_of(at).items() if who.startswith("agent") else ():
            if layout.COMMIT not in there and any(manifest in there for manifest, _ in self.parts_of(at)):
                self._wrong(f"{path} was removed by {who}, and node {node} has no COMMIT yet")

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

    def _protects(self, what: str) -> Rule:
        before = self.surviving()
        if before is None or any(self.rank_of(at) > self.rank_of(before) for at in self.damaged):
            return None  # parity of a newer one is not read before it counts

        def rule() -> None:
            after = self.surviving()
            if after is None or self.rank_of(after) < self.rank_of(before):
                self._wrong(f"{what}: {before} would have survived a lost node, and now {after}")

        return rule

    def surviving(self) -> GenerationId | None:
        """The newest generation of which the newest job can know that it is left whichever node is lost: one that it
        has found, or with as many lost nodes as its copies or its parity are to survive."""
        for at in self._lineage():
            if self.in_home(at):
                return at
            if at in self.given_up and at not in self.found:
                continue
            nodes = combinations(self.nodes, 1 if at in self.found else self.losses)
            if all(self.in_memory(at, lost) for lost in nodes):
                return at
        return None

    def _wrong(self, what: str) -> None:
        self.world.scheduler.fail(what)

    def asked(self, node: int, request: bytes) -> Callable[[], None]:
        """An agent is asked for something by another one. What is returned is called if it has done so."""
        call = msgspec.json.decode(request, type=FileCall)
        held = self.world.locks.get(f"/m{node}/run/{LOCK}")
        open_before = held is not None and held[0].alive and held[1] != AGENTS_MARK
        path = f"/m{node}/run/{call.name.rpartition('/')[0]}"

        def committed() -> bool:
            return layout.COMMIT in self.world.files[f"m{node}"].names_in(path)

        before = committed()

        def accepted() -> None:
            if call.call == "commit" and open_before and held is not None and held[0].alive:  # all the while
                self._wrong(f"the agent of node {node} committed {call.name} while a process had the run open there")
            if call.call in ("create", "write", "finish", "put") and not before and not committed():
                self._wrong(
                    f"the agent of node {node} accepted {call.call} of {call.name}, which is not committed there"
                )

        return accepted

    # ---- what is reported, and what dies -------------------------------------------------------------------

    def begin_copies(self) -> None:
        """The newest job begins to make copies or parity."""
        self.died_before_job, self.found = self.died, set(self.commits)

    def report(self, at: GenerationId) -> None:
        """A save has returned."""
        self.reported.add(at)
        best = self.best()
        if not self.died and (best is None or self.rank_of(best) < self.rank_of(at)):
            self._wrong(f"{at} was reported as committed, and cannot be restored")

    def hold_restored(self, found: GenerationId | None, is_exact: bool) -> None:
        """A job that opens the run continues this generation. `is_exact`: whether its bytes are those of the save."""
        best = self.best()
        if best is not None and (found is None or self.rank_of(found) < self.rank_of(best)):
            self._wrong(f"{best} can be restored, and a job continues {found}")
        if not is_exact:
            self._wrong(f"{found} is restored with other bytes than were saved")

    def report_copies(self, at: GenerationId, died_before: int) -> None:
        """The copies or the parity of a generation were reported as made. `died_before`: how many machines had died
        when they were begun.

        A machine that died since may have taken some of them with it, before or after they were complete.
        """
        fatal = self.lost_with(at)
        if at in self.damaged:  # the copies are counted without being read
            return
        if not fatal:
            seen = self.died if self.best() == at else died_before  # what a newer one replaces is not looked at
            self.copied[at] = max(seen, self.copied.get(at, 0))
        elif self.died == died_before:
            self._wrong(f"the copies of {at} were reported, and it is lost with {' and '.join(map(str, fatal))}")

    def lost_with(self, at: GenerationId) -> tuple[int, ...]:
        """Nodes, as many as may be lost, without which a generation cannot be restored from memory; () if there are
        none, or a newer one has come, or an agent has removed its memory, because the home has it."""
        best = self.best()
        if best is not None and self.rank_of(best) > self.rank_of(at):
            return ()
        if self.in_home(at) and not all(self.folders_of(at).values()):
            return ()
        return next((lost for lost in combinations(self.nodes, self.losses) if not self.in_memory(at, lost)), ())

    def damage(self, at: GenerationId) -> None:
        """A file of parity was damaged: it is as good as lost."""
        self.died += 1
        self.damaged.add(at)

    def lose(self, node: int, before: GenerationId | None) -> None:
        """The memory of a node is gone, with the machine. `before`: the newest that could be restored until then."""
        self.died += 1
        alive = {one.process for one in self.world.scheduler.actors}
        for at in self.commits.keys() - self.copied.keys():
            if before is not None and self.rank_of(at) < self.rank_of(before):
                self.replaced[at] = self.replaced.get(at, set()) | alive
        best = self.best()
        for at, died_before in self.copied.items():
            if self.died - died_before <= self.losses and (best is None or self.rank_of(best) < self.rank_of(at)):
                self._wrong(f"node {node} died, and with it {at}, whose copies were reported")
