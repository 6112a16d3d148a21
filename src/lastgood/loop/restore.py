"""Restoring the run of a Checkpointer: what surrounds `load` there, and how later saves continue from its result.

`RestoringRun` is the run as `load` uses it: all ranks examine a generation together; it is marked, and mended from
parity. `Restorer` notes when a load leaves the live state half loaded, and opens the lineage that later saves continue.
Everything here runs on the training thread.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import msgspec

from .. import reporting
from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks, AnyTopic
from ..data.sampler import ResumableSampler
from ..data.step_counting import report_missing_parts
from ..engine import guard
from ..engine.arena import Arena
from ..engine.finite import not_finite_error
from ..errors import HalfLoaded, LastgoodError, NoSuchStep, NothingGood, NotWritable, Unavailable
from ..format import commit, layout
from ..format.commit import Survey
from ..format.values import Filter
from ..policy.arguments import is_whole, require
from ..ports import Tier
from ..records import Finding, Generation, GenerationId, Record
from ..run import advice, node_opening, reader, side_records
from ..run.advice import Advice
from ..run.content import Content
from ..run.node_cache import NodeCache
from ..run.node_disks import NodeTier
from ..run.node_transfer import Carried, Chunks, note_fetched, share_manifests
from ..run.peer_reads import PeerReads
from ..run.peers import READING, VERIFIED_BY_CALLER
from ..run.pipeline import Pipeline
from ..run.watched import Sources
from ..run.writer import RunWriter
from ..state.loader_positions import counting_loaders
from ..state.objects import find_objects, instances_of
from ..state.parameter_versions import stepped
from ..units import shortened
from . import suspects
from .load import LoadRequest, Restored, load
from .progress import Progress
from .reports import Reports
from .save_planner import SavePlanner
from .saver import Saver

T = TypeVar("T")


class RestoringRun:
    """The run of a Checkpointer as a `run.candidates.RestorableRun`. The coordinator mends what is damaged."""

    def __init__(self, pipeline: Pipeline, planner: SavePlanner, ranks: AnyRanks) -> None:
        self._pipeline, self._planner, self._ranks = pipeline, planner, ranks
        self.sources = Sources()
        self._cache: NodeCache | None = None
        self._peer_reads: PeerReads | None = None
        self._failed = set[GenerationId]()
        """generations that did not load"""

    @property
    def survey(self) -> Survey:
        return self._pipeline.run.known.view

    @property
    def workers(self) -> Executor:
        return self._pipeline.workers

    def place_of(self, generation: Generation, topic: AnyTopic | None = None) -> Tier:
        """The nearest place whose copy may be restored. What is read from it is counted in `sources`."""
        tier = self._pipeline.places.writer_of(generation.id).tier
        if topic is not None and isinstance(tier, NodeTier) and isinstance(self._ranks, RankGroup):
            share_manifests(tier, generation, self._ranks, topic)
        counted = self.sources.counted(tier)
        if isinstance(tier, NodeTier) and tier.links.table is not None:
            self.release()
            # guard: bad-path-found-at-second-load
            how = READING if generation.id in self._failed else VERIFIED_BY_CALLER
            self._peer_reads = PeerReads(counted, self.sources, tier.links.table, how)
            return self._peer_reads
        if self._ranks.size == 1 or not commit.visible_is_durable(tier):
            return counted
        self.release()
        self._cache = NodeCache(counted)
        return self._cache

    def gather(self, content: Content, wanted: Chunks, topic: AnyTopic) -> None:
        """Fetch the chunks that are wanted here and lie on the disks of other nodes only, once for each node; but what
        this rank alone wants it reads from the agents of these nodes. From an object store, fetch those that several
        ranks of a machine want, once for each machine."""
        places, ranks, generation = self._pipeline.places, self._ranks, content.generation
        if self._cache is not None and isinstance(ranks, RankGroup):
            self._cache.fill(content, wanted, ranks, topic)  # guard: shared-objects-read-once
        rank, tier = ranks.rank, places.writer_of(generation.id).tier
        if not isinstance(tier, NodeTier) or not tier.nodes.others:
            return
        begun, leader = self.sources.now(), str(tier.nodes.leaders[rank])
        wants: list[Any] = []  # the coordinator alone keeps what each rank wants
        topic.agree(dict(wanted), lambda posts: wants.extend(posts))
        carried = self.by_coordinator(topic, lambda: msgspec.to_builtins(places.carry(generation, wants)))
        found = msgspec.convert(carried, Carried)
        here = found.fetched.get(leader, {})
        note_fetched(tier, generation, here)
        if self._peer_reads is not None:
            folder, elsewhere = layout.folder(generation.id), dict[str, list[int]]()
            for name, leaders in found.direct.items():
                if name in wanted and int(leader) not in leaders and name not in here:
                    first = rank % max(len(leaders), 1)  # another node for each rank
                    elsewhere[f"{folder}/{name}"] = [*leaders[first:], *leaders[:first]]
            self._peer_reads.note(elsewhere, places.below_with(generation.id))
        for place, size in found.copied.get(leader, {}).items():
            self.sources.add(place, size, begun)

    def release(self) -> None:
        """Delete what `gather` has fetched: every rank has loaded the generation, or another one is tried."""
        for one in (self._cache, self._peer_reads):
            if one is not None:
                one.close()
        self._cache = self._peer_reads = None
        tier = self._pipeline.run.tier
        if isinstance(tier, NodeTier) and tier.leads:
            tier.shown.forget()

    def arena(self, total_bytes: int, chunk_bytes: int) -> Arena:
        """Memory for reading: the arena of the saves if it is large enough, else a new one, which replaces it."""
        return self._planner.reading_arena(total_bytes, chunk_bytes)

    def share_survey(self, topic: AnyTopic) -> None:
        """Make every rank adopt what rank 0 knows of the run, and count the same restores, so that all choose alike."""
        ranks = self._ranks
        if ranks.size == 1:
            return
        # guard: restore-counted-by-coordinator
        ranks.begin_restore(topic.agree(ranks.restore_count, lambda counts: 1 + max(counts)))
        self._adopt(topic)
        topic.agree(None, lambda _: None)

    def _adopt(self, topic: AnyTopic) -> None:
        places = self._pipeline.places
        places.adopt(topic.agree(None, lambda _: places.shared_surveys()))

    def examine(self, generation: Generation, topic: AnyTopic | None = None) -> list[Finding]:
        """Read all of a generation again. Each of several ranks reads a part of the files; all return the same.

        `topic`: where the ranks agree; None for a new topic, after a load that has failed. Then the copies on all nodes
        are read, because each rank loads from its own.
        """
        run, arena = self._pipeline.places.writer_of(generation.id), self._pipeline.upkeep.arena()
        if topic is None:
            self._failed.add(generation.id)
        if self._ranks.size == 1:
            return reader.read_all(self.place_of(generation), generation, arena, self._pipeline.workers)
        divide = node_opening.parts if topic is not None else node_opening.every_copy  # guard: every-copy-examined
        topic = topic or self._ranks.topic("examine")
        with topic.failing():
            parts = topic.agree(None, lambda _: divide(run.tier, self._ranks, generation))
            mine = run.own_findings(generation, arena, parts[self._ranks.rank])

        def decide(posts: list[Any]) -> Any:
            found = list[Any]()
            for one in (one for findings in posts for one in findings):
                if one not in found:  # the same of two copies
                    found.append(one)
            return found or msgspec.to_builtins(reader.disagreeing(run.tier, generation))

        return msgspec.convert(topic.agree(msgspec.to_builtins(mine), decide), list[Finding])

    def mark(self, generation: Generation, findings: list[Finding]) -> None:
        """Record what was found. If the mark cannot be written now, that is reported, and the restore goes on."""
        try:
            self._pipeline.places.mark(generation, findings)
        except (Unavailable, NotWritable) as error:
            self._pipeline.outcomes.put(error)

    def mend(self, generation: Generation) -> bool:
        """Mend a generation from parity or another place. Returns whether it is whole now.

        Of several ranks, rank 0 mends, and the others then know from which place it is read.
        """
        places, arena = self._pipeline.places, self._pipeline.upkeep.arena()
        topic = self._ranks.topic("mend")
        whole = self.by_coordinator(topic, lambda: places.mend(generation, arena))
        if self._ranks.size > 1:
            self._adopt(topic)
        return whole

    def mend_known(self, step: int | None, topic: AnyTopic) -> None:
        """Mend what is marked as damaged, of the generations that a restore of `step` would try: rank 0 does."""
        places, arena = self._pipeline.places, self._pipeline.upkeep.arena()
        self.by_coordinator(topic, lambda: places.mend_known(step, arena))

    def by_coordinator(self, topic: AnyTopic, work: Callable[[], T]) -> T:
        """Do something at rank 0 that may take longer than the timeout between ranks. All ranks return its result."""
        ranks = self._ranks
        if not isinstance(ranks, RankGroup):
            return work()
        if not ranks.is_coordinator:
            while not (verdict := topic.agree(None, lambda _: None))[0]:
                pass
            return cast(T, verdict[1])
        with ThreadPoolExecutor(1, "lastgood-mend") as thread, topic.failing():
            job = thread.submit(work)
            while wait([job], ranks.timeout_seconds / 2).not_done:
                topic.agree(None, lambda _: (False, None))  # the others wait on
            done = job.result()
            topic.agree(None, lambda _: (True, done))
            return done

    def protect(self) -> None:
        """Begin to make the copies on other nodes that are missing. After a load, which needs the network first."""
        self._pipeline.places.protect_newest()

    def repaired(self) -> list[tuple[int, str]]:
        """(step, files) of each generation that was mended since `mend_known`."""
        return self._pipeline.places.mended()


class Followed(Record, frozen=True, kw_only=True):
    """The advice that one restore follows. `from_start`: whether nothing good was ever saved: then it starts over."""

    advice: list[Advice] = msgspec.field(default_factory=list)
    from_start: bool = False


class Restorer:
    """What a restore of one `Checkpointer` does where the load fails, and after it."""

    def __init__(
        self,
        request: LoadRequest,
        url: str,
        pipeline: Pipeline,
        planner: SavePlanner,
        ranks: AnyRanks,
        saver: Saver,
        progress: Progress,
        reports: Reports,
    ) -> None:
        self._request, self._url, self._pipeline, self._planner, self._ranks = request, url, pipeline, planner, ranks
        self._saver, self._progress, self._reports = saver, progress, reports
        self.run = RestoringRun(pipeline, planner, ranks)

    @contextlib.contextmanager
    def noting_half_loaded(self) -> Iterator[None]:
        """Around a load: note whether it may have left the live state as a part of a step. Then nothing is saved."""
        try:
            yield
        except BaseException as error:
            # KeyboardInterrupt may come at any point; of the errors of this package only HalfLoaded comes after the
            # first write.
            self._saver.half_loaded |= isinstance(error, HalfLoaded) or not isinstance(error, LastgoodError)
            if not isinstance(error, Exception):
                self._planner.interrupted()
            raise

    def loaded(self, request: LoadRequest, followed: Followed) -> Restored:
        """The state as `load` leaves it. Where nothing was saved, it is left as it is, and counts as that of step 0: if
        it is not, as far as this process knows, that is reported. Another Checkpointer may load it next."""
        try:
            with self.noting_half_loaded():
                found = self.started_over(followed) or load(request, self.run, self._ranks)
        except NoSuchStep:
            if request.step != 0 or not is_whole(request.step, 0):
                raise
            found = self.start_over()
        if found.generation is None and self._has_moved_on():  # guard: trained-state-at-step-0-reported
            reporting.threat(
                f"{self._pipeline.run.tier.place}: restore() has found nothing that was saved, so it counts as step 0, "
                f"and the state is that of step {self._progress.step} or later: what follows is no training from the "
                "beginning. Build the state anew, in a new process or as new objects in a new Checkpointer"
            )
        elif found.generation is None and self._ranks.is_coordinator and (before := stepped(self._request.state)):
            reporting.warning(  # guard: stepped-optimizer-at-step-0-reported
                f"{self._pipeline.run.tier.place}: restore() has found nothing that was saved, so it counts as step 0, "
                f"but the state has optimizers that have made steps: {shortened(before, 3)}. If this process has "
                "trained it, as in a cell of a notebook that is run again, what follows is no training from the "
                "beginning: build the state anew. If it was loaded from elsewhere, nothing is wrong"
            )
        return found

    def start_over(self) -> Restored:
        """The result of a restore without a generation. Raises Refused if the state is half loaded, or no longer the
        initial one, as far as this process has trained or restored it."""
        require(
            not self._saver.half_loaded, "the live state is half of another step", "Build it anew, or restore a step."
        )
        require(
            not self._has_moved_on(),  # guard: start-over-needs-initial-state
            f"the run cannot start over with this state, which is that of step {self._progress.step} or later",
            "Build the state anew, in a new process or as new objects in a new Checkpointer, and restore there.",
        )
        return Restored(step=0, generation=None, seconds=0.0, bytes=0)

    def _has_moved_on(self) -> bool:
        """Whether this process has trained the state, or restored it."""
        progress = self._progress
        trained = progress.called and (progress.step > 0 or progress.parameters_changed())
        return trained or bool(progress.restored_generation)

    def followed_advice(self, topic: AnyTopic) -> Followed:
        """The advice that the run has for this restore. Rank 0 reads it, and marks the suspect generations.

        If its durable place cannot be read, that is reported, and there is none.
        """
        return msgspec.convert(self.run.by_coordinator(topic, self._advised), Followed)

    def _advised(self) -> Any:
        try:
            with side_records.opened(self._url) as tier:
                found = advice.read(tier)
        except Unavailable as error:
            self._pipeline.outcomes.put(error)
            return msgspec.to_builtins(Followed())
        over = suspects.start_over(self._pipeline, found)
        for one in suspects.set_aside(self._pipeline, found, over):
            reporting.warning(f"{one.suspect} is suspect, and the only good one: it is restored again. {one.why}")
        if over:
            reporting.warning("training has diverged before anything good was saved: it starts from the beginning")
        return msgspec.to_builtins(Followed(advice=found, from_start=over))

    def started_over(self, followed: Followed) -> Restored | None:
        """The result of a restore where training has diverged before anything good was saved; None elsewhere.

        Raises NothingGood in a process that has trained: its state is the one that has diverged.
        """
        if not followed.from_start:
            return None
        if self._progress.called:  # guard: diverged-state-is-not-the-start
            raise NothingGood(
                "training has diverged before anything good was saved",
                safe="Nothing was deleted.",
                todo="Start the process again: it begins at step 0, without the batches that were left out.",
            )
        return self.start_over()

    def _leave_out(self, found: list[Advice]) -> None:
        """Leave out the batches that are to be skipped, if it is known to which sampler they belong."""
        skips = [(one.skip, one.why) for one in found if one.skip is not None]
        sampler = self._only_sampler() if skips else None
        if sampler is None:
            return
        left, kept = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
        epoch_before, _ = sampler.counted
        for skip, why in skips:
            windows = sampler.order(skip.epoch)[skip.first : skip.first + skip.count]
            # guard: windows-of-another-order-kept
            if skip.samples and sorted(skip.samples) != sorted(windows.reshape(-1).tolist()):
                kept[skip.epoch, why] += skip.count
            else:
                left[skip.epoch, why] += len(sampler.skip(skip.epoch, skip.first, skip.count))
        if not self._ranks.is_coordinator:
            return
        if sampler.counted[0] > epoch_before:  # guard: passed-end-of-epoch-is-reported
            reporting.warning(
                f"all that was left of epoch {epoch_before} is left out: no batch completes it, so what the loop does "
                "at the end of an epoch, a schedule or an evaluation, is not done for it"
            )
        for (epoch, why), samples in left.items():
            if samples:
                reporting.warning(f"{samples:,} samples are left out, from epoch {epoch}: {why}")
        for (epoch, why), batches in kept.items():
            reporting.warning(
                f"batches of epoch {epoch} that were to be left out ({batches:,}) have other samples now, because "
                f"global_batch or the dataset has changed, and are trained: {why}"
            )

    def _only_sampler(self) -> ResumableSampler | None:
        """The sampler that advice is about, the only one of each rank's state; None if a rank has none, or several."""
        samplers = instances_of(self._request.state, ResumableSampler)
        alone = self._ranks.topic("sampler of advice").agree(len(samplers) == 1, all)
        if alone:  # guard: ranks-leave-out-the-same
            return samplers[0]
        if self._ranks.is_coordinator:
            reporting.warning(
                "no batches are left out, although advice names some: they are those of the only ResumableSampler in "
                "the state, and a rank has none there, or several"
            )
        return None

    def _report_missing_parts(self) -> None:
        """Report, at rank 0, if no sampler of any rank has a part of the order."""
        found = find_objects(self._request.state)
        mine = {path: [one.world_size, one.rank] for path, one in found.items() if isinstance(one, ResumableSampler)}
        self._ranks.topic("parts of the order").agree(mine, report_missing_parts)

    def _report_other_world(self, generation: Generation) -> None:
        """Report, at rank 0, each loader of torchdata in a state that another number of ranks has saved: its position
        is that of one rank, in a part of the data that no rank has now."""
        then, now = generation.commit.world.ranks, self._ranks.size
        if then != now and self._ranks.rank == 0:  # guard: loader-of-another-world-is-reported
            for path in counting_loaders(self._request.state, Filter(self._request.include, self._request.exclude)):
                reporting.threat(
                    f"step {generation.step}: {path} is a StatefulDataLoader, whose position is that of one of {then} "
                    f"ranks; now there are {now}, so the rest of an epoch has samples twice or never. Go on with {then}"
                    " ranks, or use lastgood.ResumableSampler, which continues exactly with any number of them"
                )

    def continue_from(self, found: Restored, followed: Followed) -> None:
        """Make the saves that follow descend from the restored generation, or from nothing if there is none.

        `followed`: the advice that was followed; the batches that it names are left out.
        """
        self._leave_out(followed.advice)
        if self._ranks.size > 1:
            self._report_missing_parts()
        pipeline, generation, state = self._pipeline, found.generation, self._request.state
        if generation is not None:
            self._report_other_world(generation)
        run, several = pipeline.run, self._ranks.size > 1
        self._saver.half_loaded = False
        run.begin(generation.id if generation else None)
        self._planner.exempt(state, found.not_demanded if generation else None)
        # The state of optimizers exists once it was restored, or after the first step.
        self._saver.examined = False
        self._planner.watch_updates(state)  # guard: updates-seen-from-restore-on
        if several and generation is not None:
            self._saver.examine_state()
        if generation is not None and not generation.verified:
            self.run.mark(generation, [guard.finding(not_finite_error(name)) for name in found.unfit])
        if isinstance(run, RunWriter):
            with self._reports.deferring_problems():
                run.marks.point()
        pipeline.upkeep.note_latest()
        self.run.protect()
        self._progress.restored(found.step, generation)
        # guard: rewind-durable-at-once
        alone = not several and generation is not None and run.known.resumes_at(generation.id)
        self._saver.follow(found.step, generation if alone else None)
        for at, reason in found.stepped_over:
            self._reports.emit("stepped_over", at, detail=reason)
