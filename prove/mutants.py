"""The mutants of prove/mutation.py: what is taken out of which file, as an exact replacement. Holds nothing else."""

from __future__ import annotations

from typing import NamedTuple

TESTS = [
    "persist",
    "plan",
    "retention",
    "places",
    "writer",
    "reader",
    "tiers",
    "slots",
    "layout",
    "crash_model",
    "hostile",
    "flips",
    "pointers",
    "undeletable",
    "moved_run",
    "quota",
    "labels",
]
"""torch-free"""
LOOP_TESTS = [
    "in_flight",
    "full_disk",
    "many_generations",
    "frozen_infinity",
    "overlap",
    "pacing",
    "restore",
    "capture_plan",
    "exit",
    "reports_of_failures",
]
"""for what runs in and behind a training loop; these need torch"""
MENDING_TESTS = ["guard", "parity", "scrub", "mending"]
"""for what looks at, rebuilds and reads again"""
DATA_TESTS = ["sampler_loop", "sampler_resume", "sampler", "audit_worlds"]
"""for the order of the samples, and what of it was trained"""
RANKS_TESTS = ["agreeing", "reshard", "ranks_faults", "ranks"]
"""for what several ranks agree on; the last two are worlds of processes"""
REQUEST_TESTS = ["load_once", "refusals"]
"""for what is refused before the first save, and what a load is asked for; these need torch"""

DROP_IN_TESTS = ["dcp_faults", "dcp"]
"""for the storage under torch.distributed.checkpoint"""

TWICE_TESTS = ["saved_twice"]
"""for steps that are saved a second time"""

LAYOUT_TESTS = ["layouts", "capture_plan"]
"""for the memory order of tensors"""


class Mutant(NamedTuple):
    """What is taken out, and where."""

    kind: str
    what: str
    file: str
    old: str
    new: str
    equivalent: str = ""
    """why nobody can tell"""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.what}"

    def tests(self) -> list[str]:
        in_loop = self.file.startswith("train/") or self.file == BACKGROUND or self.kind == "in flight"
        bytes_first = ("hostile", "flips") if self.kind in ("digest", "form") else ()
        names = (
            LOOP_TESTS if in_loop else sorted(TESTS, key=lambda one: one not in (FIRST.get(self.file), *bytes_first))
        )
        if self.kind in MENDING_KINDS:
            names = [*MENDING_TESTS, *names]
        if self.kind == "ranks":
            names = RANKS_TESTS
        if self.kind == "request":
            names = REQUEST_TESTS
        if self.kind == "drop-in":
            names = DROP_IN_TESTS
        if self.kind == "layout":
            names = LAYOUT_TESTS
        if self.kind == "data":
            names = DATA_TESTS
        if self.kind == "saved twice":
            names = TWICE_TESTS
        if self.kind == "adapters":
            names = ["peft", "subclasses"]
        return [f"tests/test_{name}.py" for name in names]


DISK, FILES, COMMIT, LAYOUT = "storage/directory.py", "io/files.py", "format/commit.py", "format/layout.py"
FETCH, PERSIST, WRITER, READER = "engine/read_file.py", "engine/write_file.py", "run/writer.py", "run/reader.py"
BACKGROUND, GUARD = "run/pipeline.py", "engine/guard.py"
RESTORE, RETENTION, PLACES, CONTENTS = (
    "policy/restore.py",
    "policy/retention.py",
    "run/access.py",
    "engine/content_digest.py",
)
SLOTS, TABLE, TABLE_FILE, POOL = (
    "storage/slots.py",
    "storage/slot_table.py",
    "storage/slot_file.py",
    "storage/slot_pool.py",
)
STAGING, TORN, BEHIND, CUTTING = (
    "snapshot/staging.py",
    "snapshot/torn_check.py",
    "snapshot/overlap.py",
    "loop/save_planner.py",
)
CHECKPOINTER, OUTCOMES = "loop/checkpointer.py", "run/outcomes.py"
RANKS, ANNOUNCING, FOLLOWER = "coordination/rounds.py", "coordination/announcements.py", "run/authority.py"
MEETING = "coordination/rendezvous.py"
TOGETHER, TIMING, DIVIDING = "ranks/replica_check.py", "loop/schedule.py", "ranks/partition.py"
DCP = "convert/dcp.py"
TENSORS, BINDING, CACHED, CAPTURE = "state/tensors.py", "state/binder.py", "state/capture_cache.py", "state/capture.py"
MERGING, RESHARD, LOADING = "policy/merge_values.py", "policy/reshard.py", "loop/load.py"
SNAPSHOTS, PATTERNS, STORABLE = "state/live_check.py", "state/patterns.py", "state/storable.py"
MATCH, ACCESS, ADAPTERS = "state/match.py", "loop/oneshot.py", "state/adapters.py"
SAMPLER, ITERATION, OBJECTS = "data/sampler.py", "data/iteration.py", "state/objects.py"
COUNTING, UNCHANGED = "data/step_counting.py", "snapshot/unchanged.py"
PARITY, FINITE, SCRUB, UPKEEP = "engine/parity.py", "engine/finite.py", "policy/scrub.py", "run/scrubber.py"
STRIPES, ERASURE = "format/parity_layout.py", "io/reed_solomon.py"
MENDING_KINDS = ("guard", "parity", "repair", "scrub")
FIRST = {DISK: "tiers", FILES: "tiers", LAYOUT: "layout", SLOTS: "slots", TABLE_FILE: "slots", POOL: "slots"}
"""the tests that are nearest to a file"""


def mutants() -> list[Mutant]:
    return [
        *_syncs(),
        *_writes(),
        *_commits(),
        *_orders(),
        *_digests(),
        *_forms(),
        *_retentions(),
        *_exemptions(),
        *_adapters(),
        *_lineages(),
        *_slots(),
        *_flights(),
        *_fences(),
        *_mending(),
        *_ranks(),
        *_requests(),
        *_drop_in(),
        *_layouts(),
        *_data(),
        *_saved_twice(),
    ]


def _of_kind(kind: str, rows: list[tuple[str, str, str, str]]) -> list[Mutant]:
    """Rows: what is taken out, the file, its text, what stands there instead."""
    return [Mutant(kind, *row) for row in rows]


def _syncs() -> list[Mutant]:
    return _of_kind(
        "fsync",
        [
            ("fsync itself", FILES, "        os.fsync(fd)", "        pass"),
            ("blob content", DISK, "            if self._disk._syncs_files:\n                self._file.sync()\n", ""),
            (
                "record content",
                DISK,
                "            if self._syncs_files:\n                file.sync()\n        finally",
                "        finally",
            ),
            (
                "record found in place",
                DISK,
                "                    if self._syncs_files:\n                        file.sync()  # who",
                "                    if False:\n                        file.sync()  # who",
            ),
            ("first failure is final", FILES, "            self._sync_failed = True\n", "            pass\n"),
            ("after a failed sync", FILES, "        if self._sync_failed:\n", "        if False:\n"),
        ],
    ) + _of_kind(
        "directory fsync",
        [
            (
                "fsync of a directory itself",
                FILES,
                "            _flush(fd)\n        finally:\n            _close",
                "            pass\n        finally:\n            _close",
            ),
            (
                "record's name",
                DISK,
                "            try:\n                self._sync_folder(_folder(name))\n            except OSError as error:\n",
                "            try:\n                pass\n            except OSError as error:\n",
            ),
            (
                "record's name where it was already",
                DISK,
                '                self._read_back(path, data, FileExistsError(errno.EEXIST, "it exists"))\n'
                "                self._sync_folder(_folder(name))\n",
                '                self._read_back(path, data, FileExistsError(errno.EEXIST, "it exists"))\n',
            ),
            ("pointer's name", DISK, '            self._sync_folder("")\n', ""),
            (
                "removed name",
                DISK,
                "                self._sync_folder(folder)  # also when it was gone",
                "                self._files.list(self._path(folder))  # also when it was gone",
            ),
            (
                "removed folder's name",
                DISK,
                "            self._settled.discard(folder)\n            self._sync_folder(_folder(folder))\n",
                "            self._settled.discard(folder)\n",
            ),
            (
                "new folder's name",
                DISK,
                "        self._sync_folder(_folder(folder))\n        self._settled.add",
                "        self._settled.add",
            ),
            (
                "folder that was there",
                DISK,
                "        with contextlib.suppress(FileExistsError):\n            self._files.make_dir(self._path(folder))\n",
                "        try:\n            self._files.make_dir(self._path(folder))\n"
                "        except FileExistsError:\n            self._settled.add(folder)\n            return\n",
            ),
            (
                "folder forgotten when it goes",
                DISK,
                "            self._settled.discard(folder)\n            self._sync",
                "            self._sync",
            ),
            ("folder forgotten on abort", DISK, "            self._disk._settled.discard(folder)\n", ""),
            (
                "run's directory",
                PLACES,
                "            PosixFiles().make_dir(root)\n    PosixFiles().sync_dir(above)\n",
                "            PosixFiles().make_dir(root)\n",
            ),
            (
                "run's directory that was there",
                PLACES,
                "            PosixFiles().sync_dir(above)\n        return",
                "            pass\n        return",
            ),
        ],
    )


def _writes() -> list[Mutant]:
    return _of_kind(
        "write",
        [
            ("short-write loop", DISK, "    while done < len(mv):\n", "    if done < len(mv):\n"),
            ("count of a short write", DISK, "        done += whole\n", "        done = len(mv)\n"),
            ("block boundary after a short write", DISK, "else count - count % BLOCK_BYTES or count\n", "else count\n"),
            ("write that takes nothing", DISK, "        if whole <= 0:\n", "        if False:\n"),
            ("short-read loop", DISK, "                    got = whole\n", "                    got = extent.length\n"),
            ("reservation", DISK, "                file.reserve(round_up(length))\n", "                pass\n"),
            (
                "reservation that fails cleans up",
                DISK,
                "            except OSError:\n                upload.abort()\n                raise\n            return upload",
                "            except OSError:\n                raise\n            return upload",
            ),
            ("cut of the padded tail", DISK, "            self._file.resize(self._length)\n", ""),
            (
                "abort removes the file",
                DISK,
                "        self._close()\n        self._disk._drop(self._disk._path(self._name))\n",
                "        self._close()\n",
            ),
            ("abort removes the folder", DISK, "            self._disk._drop(self._disk._path(folder))\n", ""),
            ("failed blob is aborted", PERSIST, "        upload.abort()\n", ""),
            (
                "writers let go before the abort",
                PERSIST,
                "            job.exception()  # every",
                "            pass  # every",
            ),
            (
                "first error cancels",
                PERSIST,
                "        sums = [job.result() for job in jobs]\n",
                '        sums = ["" if job.exception() else job.result() for job in jobs]\n',
            ),
            (
                "chunk comes home",
                PERSIST,
                "                if job is None:\n                    chunk.release()",
                "                if job is None:\n                    pass",
            ),
            (
                "written chunk comes home",
                PERSIST,
                "    finally:\n        chunk.release()\n",
                "    finally:\n        pass\n",
            ),
            ("padding is zeroed", PERSIST, "        chunk.buffer[length:padded] = bytes(padded - length)\n", ""),
            (
                "full disk leaves no staged record",
                DISK,
                "        except OSError:\n            self._drop(staged)\n            raise\n",
                "        except OSError:\n            raise\n",
            ),
            (
                "staged record is dropped",
                DISK,
                "                raise _unknown(path, error) from error\n            self._drop(staged)\n",
                "                raise _unknown(path, error) from error\n",
            ),
            ("stale staged record", DISK, "        self._remove_if_there(staged)\n", ""),
            ("stale staged link", DISK, '            self._remove_if_there(link + ".tmp")\n', ""),
            (
                "litter is cleared at opening",
                WRITER,
                '                    self._deletions.remove(f"{home}/{name}".lstrip("/"))\n',
                "                    pass\n",
            ),
            (
                "failed save is cleared",
                WRITER,
                "        with contextlib.suppress(LastgoodError):\n            commit.retire(self.tier, at)\n",
                "        pass\n",
            ),
            (
                "unfinished is cleared at opening",
                WRITER,
                "            if self._deletions.delete(at):\n                self.survey.going",
                "            if True:\n                self.survey.going",
            ),
        ],
    )


def _commits() -> list[Mutant]:
    return _of_kind(
        "commit",
        [
            (
                "link instead of overwriting",
                DISK,
                "                self._files.link(staged, path)\n",
                "                self._files.rename(staged, path)\n",
            ),
            ("staging: created in place", DISK, "            if not self._atomic:\n", "            if True:\n"),
            ("blob never replaces", FILES, "os.O_CREAT | os.O_EXCL if mode", "os.O_CREAT if mode"),
            (
                "unknown link is read back",
                DISK,
                "                else:\n                    self._read_back(path, data, error)\n            try",
                "                else:\n                    raise _unknown(path, error) from error\n            try",
            ),
            (
                "unknown link is not taken for success",
                DISK,
                "                else:\n                    self._read_back(path, data, error)\n            try",
                "                else:\n                    pass\n            try",
            ),
            ("read-back compares", DISK, "                if buffer[:found] == data:\n", "                if True:\n"),
            (
                "read-back reads past the end",
                DISK,
                "memoryview(bytearray(len(data) + 1))",
                "memoryview(bytearray(len(data)))",
            ),
            (
                "read-back loops",
                DISK,
                "                while (count := file.read_into(buffer[found:], found)) > 0:\n",
                "                if (count := file.read_into(buffer[found:], found)) > 0:\n",
            ),
            (
                "unknown outcome deletes nothing",
                DISK,
                "        raise _unknown(path, error) from error\n\n    def _rename_over",
                "        self._drop(path)\n        raise _unknown(path, error) from error\n\n    def _rename_over",
            ),
            (
                "unsynced name is unknown, not failed",
                DISK,
                "            try:\n                self._sync_folder(_folder(name))\n            except OSError as error:\n                raise _unknown(path, error) from error\n",
                "            self._sync_folder(_folder(name))\n",
            ),
            (
                "unknown in place",
                DISK,
                "                raise\n            raise _unknown(path, error) from error\n",
                "                raise\n            raise\n",
            ),
            (
                "unknown commit: nothing is retired",
                WRITER,
                "        except CommitUnknown as error:\n",
                "        except () as error:\n",
            ),
            (
                "unknown commit: its step is taken",
                WRITER,
                "                self._note_tried(at)  # this step may exist: it is not written again\n",
                "                pass\n",
            ),
            ("step ascends", WRITER, "(last and step <= last.step) or not", "not"),
            (
                "run that is not restored is refused",
                WRITER,
                "if self._incarnation is None and (self.survey.generations or self.survey.broken):",
                "if False:",
            ),
            (
                "taken name: nothing is retired",
                WRITER,
                "            if not isinstance(error, NameTaken):  # what lies there is not of this save\n",
                "            if True:\n",
            ),
            (
                "labels are durable before they are gone by",
                WRITER,
                "                commit.confirm_labels(self.tier, at)\n",
                "                pass\n",
            ),
            (
                "a missing record of an incarnation is written by the next opening",
                WRITER,
                '            if name.partition("/")[2] not in recorded:',
                "            if False:",
            ),
            (
                "a generation is not deleted while it gets a label",
                WRITER,
                "            if at in self._labelling or self._commit_of(at) != decided:\n",
                "            if self._commit_of(at) != decided:\n",
            ),
            (
                "a generation that got a label since its deletion was decided stays",
                WRITER,
                "            if at in self._labelling or self._commit_of(at) != decided:\n",
                "            if at in self._labelling:\n",
            ),
            (
                "a generation that is being deleted gets no label",
                WRITER,
                "            if at in self._deleting:\n",
                "            if False:\n",
            ),
            (
                "parent is durable before it is continued",
                WRITER,
                "            commit.confirm(self.tier, parent)\n",
                "            pass\n",
            ),
            ("lock", FILES, "            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "            pass\n"),
            ("lock is not inherited", FILES, "        os.register_at_fork(after_in_child=self._leave)\n", ""),
            (
                "pointer is renamed, not rewritten",
                DISK,
                '            self._rename_over(path + ".tmp", path)\n',
                '            self._remove_if_there(path)\n            self._rename_over(path + ".tmp", path)\n',
            ),
        ],
    )


def _orders() -> list[Mutant]:
    finish = "        sums = [job.result() for job in jobs]\n        upload.finish()\n"
    publish = "msgspec.structs.replace(commit.publish(self.tier, record, self._algorithm), bytes=size)\n"
    mark = "            commit.mark(self.tier, generation, findings)\n"
    going = "        if layout.GOING in there:\n"
    remove = '    tier.delete(f"{home}/{layout.COMMIT}")  # <- the generation is gone after this line\n'
    return _of_kind(
        "order",
        [
            (
                "seal after the blobs' last byte",
                PERSIST,
                finish,
                "        upload.finish()\n        sums = [job.result() for job in jobs]\n",
            ),
            ("seal only what is finished", PERSIST, finish, "        sums = [job.result() for job in jobs]\n"),
            ("seal before publish", COMMIT, '    tier.put_new(f"{layout.folder(at)}/{name}", data)\n', ""),
            (
                "content before name",
                DISK,
                "            self._write_staged(staged, data)\n            try:\n                self._files.link(staged, path)\n",
                "            self._files.open(path, 'new').close() if name.endswith('COMMIT.json') else None\n            self._write_staged(staged, data)\n            try:\n                self._files.rename(staged, path)\n",
            ),
            ("COMMIT goes first", COMMIT, remove, ""),
            (
                "COMMIT is gone before the rest, also after a kill",
                COMMIT,
                remove,
                "    if layout.COMMIT in there:\n    " + remove,
            ),
            (
                "GOING before COMMIT goes",
                COMMIT,
                '            tier.put_new(f"{home}/{layout.GOING}", layout.encode(Mark(format=layout.FORMAT, root="")))\n',
                "            pass\n",
            ),
            (
                "GOING goes last",
                COMMIT,
                "        if name != layout.GOING and length is not None:",
                "        if length is not None:",
            ),
            ("torn GOING is made anew", COMMIT, going, "        if False:\n"),
            (
                "GOING is not needed on a full disk",
                COMMIT,
                "        with contextlib.suppress(NoSpace):\n            tier",
                "        if True:\n            tier",
            ),
            ("old mark goes before the new", COMMIT, '        tier.delete(f"{home}/{old}")\n', "        pass\n"),
            (
                "verify before mark",
                WRITER,
                "                findings = self._read(generation, arena, stop, also)\n",
                "                findings = []\n",
            ),
            (
                "mark before point",
                WRITER,
                mark,
                "            self._take_in(msgspec.structs.replace(generation, verified=not findings))\n            self.point()\n"
                + mark,
            ),
            ("mark is written", WRITER, mark, ""),
            (
                "point before clean",
                WRITER,
                "        self.point()\n        self._deletions.next_cleaning()\n",
                "        self._deletions.next_cleaning()\n",
            ),
            (
                "point at what is verified",
                WRITER,
                "                self.point()\n\n    def point",
                "                pass\n\n    def point",
            ),
            (
                "pointer names a verified one",
                WRITER,
                "for one in self.lineage() if one.good), None)",
                "for one in self.lineage()), None)",
            ),
            (
                "next older is verified after damage",
                WRITER,
                "            problem = problem or _problem(generation.step, findings)\n",
                "            raise _problem(generation.step, findings)\n",
            ),
            ("damage is raised", WRITER, "        if problem:\n            raise problem\n", ""),
            (
                "deleted only from the survey",
                WRITER,
                "        gone = self._deletions.delete(at)\n",
                "        gone = True\n",
            ),
            (
                "half deleted is deleted",
                WRITER,
                "        if not gone and self._deletions.committed(at):\n",
                "        if not gone:\n",
            ),
            (
                "what the pointer names stays",
                WRITER,
                "            return [at for at in going if at != pointed and not self._deletions.postponed(at)]\n",
                "            return [at for at in going if not self._deletions.postponed(at)]\n",
            ),
            (
                "rest is deleted beside a stuck file",
                COMMIT,
                "                first = first or error\n",
                "                raise\n",
            ),
            (
                "reason stays with what is left",
                COMMIT,
                "    if tier.list(home).keys() <= {layout.GOING}:",
                "    if True:",
            ),
            (
                "the record of an incarnation is written",
                WRITER,
                "            self.tier.put_new(name, layout.encode(record))\n        self.survey",
                "            pass\n        self.survey",
            ),
            (
                "the pointer follows the durable lineage",
                WRITER,
                "            chain = restore.lineage(self.survey).chain\n            there = self.survey.generations\n            newest",
                "            chain = restore.lineage(self.view).chain\n            there = self.survey.generations\n            newest",
            ),
            (
                "order ascends",
                WRITER,
                "        order = self.survey.order + 1\n",
                "        order = self.survey.order or 1\n",
            ),
            (
                "header is written",
                WRITER,
                "            self.tier.put_new(layout.HEADER, layout.encode(RunHeader(format=layout.FORMAT, run=ident)))\n",
                "",
            ),
            (
                "damaged header is replaced",
                WRITER,
                "                    self.tier.delete(name)  # the commits say which run this is\n",
                "                    pass\n",
            ),
            ("publish is called", WRITER, publish, "Generation(commit=record, root='', bytes=size)\n"),
            (
                "older save is given up",
                WRITER,
                "        if newest.step > at.step and not pinned and at not in self.pinned:\n",
                "        if False:\n",
            ),
            (
                "older save that is wanted is not",
                WRITER,
                "        if newest.step > at.step and not pinned and at not in self.pinned:\n",
                "        if newest.step > at.step:\n",
            ),
            ("names the one before it", WRITER, "one.incarnation == at.incarnation and one.step < at.step)", "True)"),
        ],
    )


def _digests() -> list[Mutant]:
    return _of_kind(
        "digest",
        [
            (
                "record's own",
                LAYOUT,
                "    if not believe and digest(found[1].decode(), body) != found[2].decode():\n",
                "    if False:\n",
            ),
            ("record's envelope", LAYOUT, 'or not data.endswith(b"}\\n") or', "or"),
            ("record's algorithm", LAYOUT, " or found[1].decode() not in ALGORITHMS:", ":"),
            (
                "manifest against its seal",
                COMMIT,
                "    if digest(manifest.digest, data) != one.digest:\n",
                "    if False:\n",
            ),
            (
                "chunk",
                FETCH,
                "        if digest(manifest.digest, data) != blob.chunks[index]:\n",
                "        if False:\n",
            ),
            (
                "chunk of a verification",
                GUARD,
                "                    if error is None and found and found != blob.chunks[index]:\n",
                "                    if False:\n",
            ),
            ("content of a tensor", FETCH, "            if piece.digest != found:\n", "            if False:\n"),
            (
                "header of a tensor file",
                FETCH,
                "        layout.validate_header(header, self.blob, self.pieces)\n",
                "        return\n",
            ),
            (
                "content check of a restore",
                FETCH,
                "                    for name in check.see(data):\n                        sink.done(name)\n",
                "                    pass\n",
            ),
            (
                "content check of a verification",
                GUARD,
                '            self._tell("contents", self.content_error(piece, self._as_written))\n',
                "            pass\n",
            ),
            (
                "direct I/O into aligned memory only",
                DISK,
                "    return len(mv) >= round_up(length) > 0 and ctypes",
                "    return len(mv) >= round_up(length) > 0 or ctypes",
            ),
            (
                "one tensor",
                FETCH,
                "    if hasher.hexdigest() != piece.digest:\n        raise tensor_error(home, piece)\n    return out\n",
                "    return out\n",
            ),
            (
                "mark is of this commit",
                COMMIT,
                "    return found if found and found.root == root else None\n",
                "    return found\n",
            ),
            (
                "content covers dtype and shape",
                LAYOUT,
                '    return f"{dtype}{list(shape)}\\n".encode()\n',
                '    return b""\n',
            ),
            (
                "verification reads COMMIT anew",
                GUARD,
                "            self._generation = commit.read_generation(self._tier, self._generation.id, self._generation.commit.run)\n",
                "            pass\n",
            ),
            ("records are read past the cache", COMMIT, "memoryview(buffer), fresh=True)", "memoryview(buffer))"),
            (
                "chunks are read past the cache",
                FETCH,
                "            tier.read_into(at, view, fresh=fresh)\n",
                "            tier.read_into(at, view)\n",
            ),
            ("length of a manifest", COMMIT, "    _need_length(name, there.get(one.manifest), one.length)\n", ""),
            (
                "length of a blob",
                COMMIT,
                '        _need_length(f"{home}/{blob.name}", there.get(blob.name), blob.length)\n',
                "        pass\n",
            ),
            ("file that ends early", DISK, "                    if whole <= got:\n", "                    if False:\n"),
        ],
    )


def _forms() -> list[Mutant]:
    return _of_kind(
        "form",
        [
            ("newer version", LAYOUT, "        if version > FORMAT:\n", "        if False:\n"),
            ("commit of this folder", LAYOUT, "    if commit.id != at:\n", "    if False:\n"),
            ("commit of this run", LAYOUT, "    if run is not None and commit.run != run:\n", "    if False:\n"),
            (
                "a seal for every rank",
                LAYOUT,
                "    if not 0 < commit.world.ranks == len(commit.seals) or any(\n",
                "    if any(\n",
            ),
            (
                "manifest name of a seal",
                LAYOUT,
                "        if seal.manifest != manifest_name(seal.rank) or not",
                "        if not",
            ),
            ("commit is validated", COMMIT, "    layout.validate_commit(commit, at, run)\n", ""),
            (
                "manifest is validated",
                COMMIT,
                "    layout.validate_manifest(manifest, at, one.rank, ranks)\n",
                "",
            ),
            (
                "manifest of this place",
                LAYOUT,
                '    need((manifest.step, manifest.incarnation, manifest.rank) == (at.step, at.incarnation, rank), "is of another place")\n',
                "",
            ),
            (
                "name of a blob",
                LAYOUT,
                "        need(blob.name == blob_name(rank, part),",
                "        need(True or blob.name == blob_name(rank, part),",
            ),
            (
                "chunk length",
                LAYOUT,
                "        need(PAGE_BYTES <= blob.chunk_bytes <= CHUNK_LIMIT_BYTES,",
                "        need(blob.chunk_bytes > 0 or PAGE_BYTES <= blob.chunk_bytes <= CHUNK_LIMIT_BYTES,",
            ),
            (
                "count of chunks",
                LAYOUT,
                "        need(len(blob.chunks) == -(-blob.length // blob.chunk_bytes) > 0,",
                "        need(True,",
            ),
            ("name stands once", LAYOUT, '        need(piece.key not in names, f"{piece.key!r} stands twice")\n', ""),
            ("length by the shape", LAYOUT, "        need(extent.length == length,", "        need(True,"),
            ("blob of the manifest", LAYOUT, "        need(extent.blob in blobs,", "        need(True,"),
            (
                "no hole, no overlap",
                LAYOUT,
                "            need(extent.offset == ends[extent.blob],",
                "            need(True,",
            ),
            ("pieces end with the blob", LAYOUT, "        need(end == blob.length,", "        need(True,"),
            (
                "alias of something",
                LAYOUT,
                '    need(ranks > 1 or all(name in stored for name in manifest.aliases.values()), "an alias of nothing")\n',
                "",
            ),
            ("record's length", COMMIT, "    if not 0 <= length <= limit:\n", "    if False:\n"),
            (
                "name inside the run",
                DISK,
                '        if name.startswith("/") or ".." in name.split("/"):\n',
                "        if False:\n",
            ),
            (
                "link in the way of a folder",
                COMMIT,
                "        if at is None or length is not None:",
                "        if at is None:",
            ),
            ("link in the way of a file", FILES, "os.O_CLOEXEC | os.O_NOFOLLOW | (_DIRECT", "os.O_CLOEXEC | (_DIRECT"),
            (
                "incarnation in its own file",
                COMMIT,
                '        if _hint(tier, f"incarnations/{name}", length, Incarnation) in (None, named):  # else',
                '        if _hint(tier, f"incarnations/{name}", length, Incarnation) or True:  # else',
            ),
            (
                "damaged incarnation counts by its name",
                COMMIT,
                "length, Incarnation) in (None, named):  # else",
                "length, Incarnation) == named:  # else",
            ),
            (
                "incarnation that is no file",
                COMMIT,
                "        if named is None or length is None or length < 0:\n",
                "        if named is None:\n",
            ),
        ],
    )


def _retentions() -> list[Mutant]:
    return [
        Mutant("retention", name, RETENTION, old, new)
        for name, old, new in [
            (
                "a label that cannot be read keeps",
                "    return one.label_unread or wanted(",
                "    return wanted(",
            ),
            (
                "counts verified ones only",
                "    good = [one for one in chain if one.good]\n    # A step",
                "    good = [one for one in chain if not one.damaged]\n    # A step",
            ),
            (
                "counts undamaged ones only",
                "    good = [one for one in chain if one.good]\n    # A step",
                "    good = [one for one in chain if one.verified]\n    # A step",
            ),
            (
                "keeps the last",
                "key=good.index)[: keep.last]\n",
                "key=good.index)[:1]\n",
            ),
            (
                "a step that was saved again counts once",
                "    newest_of_step = {one.step: one for one in reversed(good)}\n",
                "    newest_of_step = {one.id: one for one in reversed(good)}\n",
            ),
            (
                "keeps what is newer than the newest verified",
                "    newest = chain.index(good[0]) if good else len(chain)\n",
                "    newest = 0\n",
            ),
            ("unverified ones fill up", "    kept |= set(unread[: max(keep.last - len(latest), 0)])\n", ""),
            ("keeps what is pinned", "    kept |= {one.id for one in whole if _pinned(keep, one)}\n", ""),
            ("keeps what is pinned, read or not", "for one in whole if _pinned", "for one in good if _pinned"),
            ("keeps the best", "    kept |= {one.id for known in (good, whole) for one in _best(keep, known)}\n", ""),
            ("keeps the best, read or not", "for known in (good, whole)", "for known in (good,)"),
            ("keeps the best of what was read", "for known in (good, whole)", "for known in (whole,)"),
            (
                "keeps the evidence",
                "    going = [one.id for one in older if one.id not in kept and not one.damaged]\n",
                "    going = [one.id for one in older if one.id not in kept]\n",
            ),
            ("abandoned ones wait", "        if newer >= keep.last and", "        if"),
            ("abandoned ones wait for those after them", "if other.commit.order > one.commit.order)", ")"),
            ("pinned abandoned ones stay", "not one.damaged and not _pinned(keep, one):", "not one.damaged:"),
            (
                "incarnations on the way stay",
                "                needed.update(passed)\n",
                "                needed.add(at.id)\n",
            ),
        ]
    ] + [
        Mutant(
            "retention",
            "keeps the newest committed",
            RETENTION,
            " | {one.id for one in chain[:1]}\n",
            "\n",
            "only what is older than the newest verified one may go at all, and that never holds the newest committed",
        )
    ]


def _exemptions() -> list[Mutant]:
    return _of_kind(
        "exempt",
        [
            (
                "what an optimizer steps is demanded",
                "state/exempt.py",
                " and captured.origins.get(name) is Origin.PARAMETER)\n",
                ")\n",
            ),
            (
                "what was restored as demanded is demanded",
                CUTTING,
                "masks(state, stored), None\n",
                "masks(state), None\n",
            ),
        ],
    )


def _adapters() -> list[Mutant]:
    return _of_kind(
        "adapters",
        [
            (
                "merged adapters are not saved",
                ADAPTERS,
                "            if found := _merged(layers):\n",
                "            if found := _merged([]):\n",
            ),
            (
                "nothing is loaded into merged adapters",
                BINDING,
                "        if found := adapters.merged(live):\n",
                "        if found := False:\n",
            ),
            (
                "AdaLoRA is not saved without its ranks",
                ADAPTERS,
                "            if rank_allocator(module) is not None:\n",
                "            if False:\n",
            ),
            (
                "a change of the active adapter is stored",
                ADAPTERS,
                "            if active != self._active.setdefault(path, active):\n",
                "            if False:\n",
            ),
            (
                "a frozen subclass is looked at by its inner tensors",
                "state/exempt.py",
                "    if not flattened.is_flattenable(tensor):\n",
                "    if True:\n",
            ),
        ],
    )


def _lineages() -> list[Mutant]:
    return _of_kind(
        "lineage",
        [
            ("bound of a rewind", RESTORE, " and (bound is None or at.step <= bound)]", "]"),
            (
                "newest incarnation first",
                RESTORE,
                "    current = max(survey.incarnations.values(), key=lambda one: one.order, default=None)\n    bound",
                "    current = min(survey.incarnations.values(), key=lambda one: one.order, default=None)\n    bound",
            ),
            (
                "newest step first",
                RESTORE,
                "        chain += sorted(mine, reverse=True)\n",
                "        chain += sorted(mine)\n",
            ),
            (
                "goes on with the parent",
                RESTORE,
                "        current = older if older is not None and older.order < current.order else None\n",
                "        current = None\n",
            ),
            (
                "circle comes to an end",
                RESTORE,
                "older is not None and older.order < current.order else None",
                "older is not None else None",
            ),
            (
                "damaged ones are passed over",
                RESTORE,
                "            passed.append((at, told(survey.generations[at].damaged)))\n",
                "            candidates.append(at)\n",
            ),
            (
                "next older after damage",
                READER,
                "            if again or (step is not None and at == choice.candidates[-1]):\n",
                "            if True:\n",
            ),
            (
                "lost ones are kept",
                RESTORE,
                "    return {at for at in survey.incomplete - named if at.step >= unsure}\n",
                "    return set(survey.incomplete)\n",
            ),
            (
                "lost ones are reported",
                RESTORE,
                '    passed = [(at, "its COMMIT is gone") for at in lost]\n',
                "    passed = []\n",
            ),
            (
                "commits stand in for incarnations",
                COMMIT,
                "        if at.incarnation not in found.incarnations:\n",
                "        if False:\n",
            ),
            (
                "empty folder is no loss",
                COMMIT,
                "        elif layout.GOING in there or not there:",
                "        elif layout.GOING in there:",
            ),
            (
                "half deleted is no loss",
                COMMIT,
                "        elif layout.GOING in there or not there:",
                "        elif not there:",
            ),
            (
                "damaged commit is no end",
                COMMIT,
                "            except Damaged as error:\n                found.broken[at] = error\n",
                "            except Damaged as error:\n                raise error\n",
            ),
            (
                "damaged hint is none",
                COMMIT,
                "    except Damaged:\n        return None\n",
                "    except Damaged:\n        raise\n",
            ),
        ],
    )


def _slots() -> list[Mutant]:
    return _of_kind(
        "slots",
        [
            (
                "flush 1 before flush 2",
                SLOTS,
                "        if draft and draft.dirty:\n            self._flush(draft)\n",
                "",
            ),
            (
                "flush of a record",
                SLOTS,
                "            self._flush(draft)\n        except OSError:\n            with self._lock:\n",
                "        except OSError:\n            with self._lock:\n",
            ),
            ("flush of the table", TABLE_FILE, "            _settled(file.sync)\n", ""),
            (
                "flush of the table's name",
                TABLE_FILE,
                '        _settled(lambda: self._files.sync_dir(self._path.rpartition("/")[0]))\n',
                "",
            ),
            (
                "flush of a new slot",
                POOL,
                "                file.sync()\n            self._files",
                "            self._files",
            ),
            ("flush of the slots' names", POOL, "            self._files.sync_dir(self._home)\n", ""),
            (
                "failed sync spoils a slot",
                POOL,
                "        with self._spoiling(slot):\n            file.sync()\n",
                "        file.sync()\n",
            ),
            (
                "spoiled slot is not synced again",
                SLOTS,
                "        self._pool.need_sound(draft.slot)\n        self._pool.sync",
                "        self._pool.sync",
            ),
            (
                "slot that could not be made is spoiled",
                POOL,
                "                self._spoiled.add(slot)  # what stays of it may have no durable name\n",
                "",
            ),
            (
                "spoiled slot is a new file",
                POOL,
                "                    self._files.remove(self._path(slot))\n                    had = None\n",
                "                    pass\n",
            ),
            (
                "unknown outcome of the table is unknown",
                TABLE_FILE,
                "            if self.possible[-1] is table and error.errno not in _FULL:\n",
                "            if False:\n",
            ),
            (
                "half a write of the table is of unknown outcome",
                TABLE_FILE,
                "                _settled(lambda: _write_all(file, page, at))\n",
                "                _write_all(file, page, at)\n",
            ),
            (
                "sync without space says nothing",
                TABLE_FILE,
                "        raise OSError(errno.EIO, error.strerror) from error\n",
                "        raise\n",
            ),
            (
                "overwritten table may come up",
                TABLE_FILE,
                "        try:\n            self.possible.append(table)\n            page",
                "        try:\n            page",
            ),
            (
                "replaced table may come up",
                TABLE_FILE,
                "        self.possible.append(table)\n        self._files.rename",
                "        self._files.rename",
            ),
            (
                "only while one is possible",
                TABLE_FILE,
                "        area_is_safe = len(self.possible) == 1 and len(data)",
                "        area_is_safe = len(data)",
            ),
            ("area that fits", TABLE_FILE, " and len(data) <= self._area_bytes\n", " and self._area_bytes > 0\n"),
            ("areas take turns", TABLE_FILE, "        self._area = 1 - self._area\n", ""),
            (
                "area after a new file",
                TABLE_FILE,
                "        self._area_bytes, self._area = area, 1\n",
                "        self._area_bytes, self._area = area, 0\n",
            ),
            ("records ascend", TABLE_FILE, "        self._sequence += 1\n", ""),
            (
                "goes on from the number that was found",
                TABLE_FILE,
                "            self._sequence, self.newest = found.sequence, decode(found, self._path)\n",
                "            self.newest = decode(found, self._path)\n",
            ),
            (
                "newest whole record",
                TABLE_FILE,
                "return max(found, key=lambda one: one.sequence)",
                "return min(found, key=lambda one: one.sequence)",
            ),
            (
                "what was found is made durable",
                TABLE_FILE,
                "        self.possible = [self.newest]\n        self.write(self.newest)\n",
                "        self.possible = [self.newest]\n",
            ),
            (
                "table without a record is damage",
                TABLE_FILE,
                '        raise SumMismatch(\n            f"both records',
                '        return None\n        raise SumMismatch(\n            f"both records',
            ),
            (
                "table gone beside slots is damage",
                SLOTS,
                "        if table is None and self._pool.lengths():\n",
                "        if False:\n",
            ),
            (
                "digest of a record",
                TABLE,
                '    if bytes.fromhex(digest("xxh3_128", data[:_CHECKED], body)) != told:\n',
                "    if False:\n",
            ),
            (
                "length of a record",
                TABLE,
                "    fits = magic == MAGIC and length <= min(room - ENVELOPE.size, RECORD_LIMIT_BYTES)\n",
                "    fits = magic == MAGIC\n",
            ),
            ("version of the table", TABLE, "    if record.version > VERSION:\n", "    if False:\n"),
            (
                "folder stands once",
                TABLE,
                '        need(one.folder not in folders, f"{one.folder!r} stands twice")\n',
                "",
            ),
            (
                "slot is given once",
                TABLE,
                '        need(one.slot not in slots, f"slot {one.slot} is given twice")\n',
                "",
            ),
            (
                "file stands once",
                TABLE,
                '        need(not one.extents.keys() & one.records.keys(), f"{one.folder!r} holds a file twice")\n',
                "",
            ),
            (
                "offsets and lengths of the table",
                TABLE,
                '            need(fits, f"{file!r} at {offset:,}, {length:,} bytes long")\n',
                "",
            ),
            (
                "slots that a crash may need",
                SLOTS,
                "        taken = {one.slot for table in self._tables.possible for one in table.kept}\n",
                "        taken = {one.slot for one in self._tables.newest.kept}\n",
            ),
            ("slots under way", SLOTS, "        taken |= {draft.slot for draft in self._drafts.values()}\n", ""),
            (
                "newest verified one stays",
                SLOTS,
                "        return tuple([one for one in good if self._verified in one.records][-1:] or good[-1:])\n",
                "        return tuple(good[-1:])\n",
            ),
            (
                "one that is not damaged stays",
                SLOTS,
                "        good = [one for one in kept if self._bad.isdisjoint(one.records)]\n",
                "        good = [*kept]\n",
            ),
            (
                "doubt is settled where no slot is free",
                SLOTS,
                "            if len(self._tables.possible) > 1:\n                self._settle(self._tables.newest.kept)\n            for one",
                "            for one",
            ),
            (
                "doubtful slot is free again",
                SLOTS,
                "            for one in [name for name, draft in self._drafts.items() if draft.doubtful]:\n                self._drop(one)\n",
                "",
            ),
            (
                "failed commit keeps its slot",
                SLOTS,
                "                draft.doubtful = True\n            raise\n",
                "                self._drop(folder)\n            raise\n",
            ),
            (
                "a name is taken once",
                SLOTS,
                "            if kept is not None or (draft and file in draft.extents):\n",
                "            if False:\n",
            ),
            (
                "same name, same bytes",
                SLOTS,
                "            if there == data:\n                return\n",
                "            return\n",
            ),
            (
                "aborted file leaves its slot",
                SLOTS,
                "                self._slots._forget(self._folder, self._draft, self._file)\n",
                "                pass\n",
            ),
            (
                "failed record leaves its slot",
                SLOTS,
                "            with self._lock:\n                self._forget(folder, draft, file)\n            raise\n",
                "            raise\n",
            ),
            (
                "failed write spoils a slot",
                POOL,
                "        with self._spoiling(slot):\n            _write_all(file, mv, offset)\n",
                "        _write_all(file, mv, offset)\n",
            ),
            (
                "what cannot be cleared is doubtful",
                SLOTS,
                "                draft.doubtful |= file == self._commit  # it is given up, and should the rest of that fail\n",
                "",
            ),
            ("pointer goes with what it names", SLOTS, "if one.to in there}\n", "}\n"),
            (
                "pointers are written at the end",
                SLOTS,
                "            if self._owned and self._pointed() != self._tables.newest.pointers:\n                self._settle(self._tables.newest.kept)\n",
                "",
            ),
            (
                "end of a file in a slot",
                SLOTS,
                "        if extent.offset + extent.length > length:\n",
                "        if False:\n",
            ),
            (
                "slot cut short is a short file",
                SLOTS,
                "(file: max(0, min(length, there - start)) for".replace("(", "{", 1),
                "{file: length for",
            ),
            ("zeros before use", POOL, "                self._fill(file, had or 0, need_bytes)\n", ""),
            ("reservation of a slot", POOL, "                grown[-1][1].reserve(need_bytes)\n", ""),
            (
                "slots that could not be grown go back",
                POOL,
                "                    self._files.remove(self._path(slot)) if had is None else file.resize(had)\n",
                "                    pass\n",
            ),
            (
                "verified mark is written at once",
                SLOTS,
                "        self._record(tuple(one.with_record(file, data) if one is kept else one for one in table.kept))\n",
                "        pass\n",
            ),
            (
                "deleted commit is gone at once",
                SLOTS,
                "                self._settle(tuple(rest if one is kept else one for one in table.kept if one is not kept or not gone))\n",
                "                pass\n",
            ),
        ],
    )


def _flights() -> list[Mutant]:
    return _of_kind(
        "in flight",
        [
            (
                "place is free again after a save",
                BACKGROUND,
                "            self.run.pinned.discard(flight.at)\n        self._free_places.release()\n",
                "            self.run.pinned.discard(flight.at)\n",
            ),
            (
                "place is free again where nothing began",
                CHECKPOINTER,
                "            if not started:\n                self._behind.leave(n, topic, sys.exc_info()[1])\n",
                "",
            ),
            (
                "place is free before the outcome is told",
                BACKGROUND,
                "        self._end(flight)  # whoever has its outcome may begin the next one\n        save.note_outcome(generation, failed)\n",
                "        save.note_outcome(generation, failed)\n        self._end(flight)\n",
            ),
            (
                "earlier try of a step has ended",
                BACKGROUND,
                "        for save in earlier:\n            save.wait_ended()\n",
                "",
            ),
            (
                "threads are there before they are needed",
                BACKGROUND,
                "        for job in [ThreadPoolExecutor.submit(pool, together.wait) for _ in range(count)]:\n            job.result()\n",
                "        pass\n",
            ),
            (
                "older saves are overtaken",
                BACKGROUND,
                "            older = [one for one in self._flights if one.at < newer.at and not one.pinned]\n",
                "            older: list[_Flight] = []\n",
            ),
            (
                "newer saves are not overtaken",
                BACKGROUND,
                "if one.at < newer.at and not one.pinned]",
                "if one.at != newer.at and not one.pinned]",
            ),
            (
                "what retention wants is not overtaken",
                BACKGROUND,
                "if one.at < newer.at and not one.pinned]",
                "if one.at < newer.at]",
            ),
            (
                "overtaken one is not committed",
                WRITER,
                "            self._require_newest(at, pinned)\n            record",
                "            record",
            ),
            (
                "its parent is older",
                WRITER,
                "if one.incarnation == at.incarnation and one.step < at.step)",
                "if one.incarnation == at.incarnation)",
            ),
            (
                "the copier learns that nobody wants it",
                BACKGROUND,
                "            for lease in fill(lambda: flight.chunks.unwanted):\n",
                "            for lease in fill(lambda: False):\n",
            ),
            (
                "whoever waits for memory is woken",
                BACKGROUND,
                "        self.chunks.give_up(reason)\n        self.arena.wake()\n",
                "        self.chunks.give_up(reason)\n",
            ),
            (
                "chunks of a failed save come home",
                BACKGROUND,
                "        chunks.drain()\n        self._writers.put(writers)\n",
                "        self._writers.put(writers)\n",
            ),
            (
                "failed copy is told to the lane",
                BACKGROUND,
                "            flight.save.note_staged()\n            flight.chunks.close(failed)\n",
                "            flight.save.note_staged()\n            flight.chunks.close(None)\n",
            ),
            (
                "failed copy lets the loop go on",
                BACKGROUND,
                "            flight.save.note_staged()\n            flight.chunks.close(failed)\n",
                "            flight.chunks.close(failed)\n            if failed is None:\n"
                "                flight.save.note_staged()\n",
            ),
            (
                "what the copier found out last stops the commit",
                BACKGROUND,
                "            chunks.finish()  # what the copier found out last\n",
                "",
            ),
            (
                "failure is told in the loop",
                BACKGROUND,
                "        self.outcomes.put(error, save.step)\n",
                "",
            ),
            (
                "overtaken one is no failure",
                OUTCOMES,
                "                self.overtaken_saves += 1\n                continue\n",
                "                self.overtaken_saves += 1\n",
            ),
            (
                "failures are reported at growing intervals",
                OUTCOMES,
                "        if _is_power_of_two(self.row):\n",
                "        if self.row == 1:\n",
            ),
            (
                "a row of failures ends with a durable save",
                OUTCOMES,
                "        self.row = self.torn_row = 0\n",
                "        self.torn_row = 0\n",
            ),
            (
                "the newest step is saved on a clean exit",
                CHECKPOINTER,
                "                self._save_last()\n",
                "                pass\n",
            ),
            (
                "due save is skipped",
                CHECKPOINTER,
                "        if skips or not self._behind",
                "        if not self._behind",
            ),
            (
                "save by hand is not skipped",
                CHECKPOINTER,
                'self._options.when_full == "skip" and not must\n',
                'self._options.when_full == "skip"\n',
            ),
            (
                "upkeep gives way to saves",
                BACKGROUND,
                "            return bool(self._flights)\n",
                "            return False\n",
            ),
            (
                "verifying goes before the next save",
                BACKGROUND,
                "            if self.run.backlog() > self._backlog_limit:\n",
                "            if False:\n",
            ),
            (
                "deleting goes before the next save",
                BACKGROUND,
                "            elif self.run.surplus():\n",
                "            elif False:\n",
            ),
            (
                "few deletions go before a save",
                BACKGROUND,
                "                    self.run.clean(most=DELETIONS_AHEAD)\n",
                "                    self.run.clean()\n",
            ),
            (
                "a full disk is relieved",
                "run/disk_space.py",
                "                return self._tier.create(name, length)\n            except NoSpace as error:\n                if not (_is_full(error) and self._make_room(length)):\n",
                "                return self._tier.create(name, length)\n            except NoSpace as error:\n                if True:\n",
            ),
        ],
    )


def _fences() -> list[Mutant]:
    return _of_kind(
        "fence",
        [
            (
                "update waits",
                STAGING,
                "        self.enqueued.wait()  # waiting for an event that is not recorded yet would be no wait at all\n",
                "",
            ),
            (
                "fence ends when the copy fails",
                STAGING,
                "        finally:\n            self.enqueued.set()\n",
                "        finally:\n",
            ),
            (
                "hook before each step",
                STAGING,
                "            self._hooks[ident] = (wanted[ident], wanted[ident].register_step_pre_hook(self._before_step))\n",
                "            self._hooks[ident] = (wanted[ident], wanted[ident].register_step_post_hook(self._before_step))\n",
            ),
            (
                "hooks go at the end",
                STAGING,
                "        for _, handle in self._hooks.values():\n            handle.remove()\n",
                "",
            ),
            (
                "hooks of what left the state go",
                STAGING,
                "            self._hooks.pop(ident)[1].remove()\n",
                "            pass\n",
            ),
            (
                "older copy is waited for when hooks go",
                STAGING,
                "            self.wait()  # an older copy may still want to be read before their next step\n",
                "            pass\n",
            ),
            (
                "a fork waits for no copy",
                STAGING,
                " or self._process != os.getpid():  # in a fork nobody copies\n",
                ":\n",
            ),
            (
                "snapshot holds the next update",
                CUTTING,
                "        self.fence.add(cut.snapshot)\n",
                "        pass\n",
            ),
            (
                "what forward may change is cloned",
                CUTTING,
                "                tensors.keys() - bearers.keys()\n                if plan.division is None\n",
                "                ()\n                if plan.division is None\n",
            ),
            (
                "blocking waits for the copy",
                CHECKPOINTER,
                "            here = not cut.overlapped\n",
                "            here = False\n",
            ),
            (
                "no hook, no overlap",
                CUTTING,
                '            self.note = FSDP1_NOTE if found.moves else ""\n            return None\n',
                "            pass\n",
            ),
            (
                "Ctrl-C in a copy is raised",
                BACKGROUND,
                '            failed = Cancelled("the copy was interrupted", safe="Nothing of it was committed.")\n            raise\n',
                '            failed = Cancelled("the copy was interrupted", safe="Nothing of it was committed.")\n',
            ),
            (
                "FSDP1 waits for the copy",
                BEHIND,
                "            moves |= is_fsdp1(part)\n",
                "",
            ),
            (
                "large average is not cloned",
                CUTTING,
                "        return found.all if found.beside_all_bytes <= staging.SIDE_BYTES else None\n",
                "        return found.trained\n",
            ),
            (
                "average by hand is cloned",
                CUTTING,
                "        if captured.optimizers and found.beside_trained_bytes <= staging.SIDE_BYTES:\n            return found.trained\n",
                "",
            ),
            (
                "what an object says itself is cloned",
                BEHIND,
                "captured.origins[name] is Origin.OTHER or name in found",
                "name in found",
            ),
            (
                "bearers are found anew",
                CUTTING,
                " or plan.found_in is not captured.origins or not plan.behind.holds(captured):\n",
                ":\n",
            ),
            (
                "layout is made anew",
                CUTTING,
                "        if plan is None or (plan.key, plan.finite) != (captured.key, must) or plan.division is not division:\n",
                "        if plan is None:\n",
            ),
            (
                "torn: identity and version",
                STAGING,
                "            found = self._watch.replaced(self._cut.versions)\n",
                "",
            ),
            (
                "torn: another tensor hangs there",
                TORN,
                "            if container.get(key) is not tensor or tensor.data_ptr()",
                "            if tensor.data_ptr()",
            ),
            (
                "torn: it lies elsewhere",
                TORN,
                " or tensor.data_ptr() != address or",
                " or",
            ),
            (
                "torn: its version",
                TORN,
                " or tensor._version != version:\n",
                ":\n",
            ),
            (
                "torn: moved before it was read",
                STAGING,
                "            torn |= source.moved\n",
                "",
            ),
            (
                "torn: samples after the copy",
                STAGING,
                "            torn |= self._compare()\n",
                "",
            ),
            (
                "torn: samples in the copy",
                STAGING,
                "                torn.update(self._cut.differs_in(lease.buffer, samples))\n",
                "                pass\n",
            ),
            (
                "torn save is dropped",
                STAGING,
                "        if torn:\n            raise torn_error(torn)\n",
                "",
            ),
            (
                "full check compares",
                CUTTING,
                "            if wrong:\n                raise staging.torn_error(wrong)\n",
                "",
            ),
            (
                "twice torn, then blocking",
                CHECKPOINTER,
                "        if outcomes.torn_row >= TORN_LIMIT and self._cutter",
                "        if False and self._cutter",
            ),
            (
                "torn in a row",
                OUTCOMES,
                "        self.row = self.torn_row = 0\n",
                "        self.row = 0\n",
            ),
        ],
    )


def _mending() -> list[Mutant]:
    return [
        *_of_kind(
            "guard",
            [
                (
                    "what is shorter is told",
                    GUARD,
                    "        if length < blob.length:\n            look.shorter(self._tier, name)\n            return\n",
                    "        if length < blob.length:\n            return\n",
                ),
                (
                    "what is longer is told",
                    GUARD,
                    "        if length != blob.length:\n",
                    "        if length < blob.length:\n",
                ),
                (
                    "a file that is gone is told",
                    GUARD,
                    '            self._tell("structure", MissingBlob(f"{name} is gone, or no file", blob=blob.name))\n',
                    "",
                ),
                ("what cannot be read is told", GUARD, '                        self._tell("digests", error)\n', ""),
                (
                    "what cannot be read now is no evidence",
                    GUARD,
                    "        if isinstance(error, Unreadable):\n            raise error",
                    "        if False:\n            raise error",
                ),
                ("only wanted layers speak", GUARD, "        if layer in self._layers:\n", "        if True:\n"),
                (
                    "finite is looked at",
                    GUARD,
                    "                if tensor in self._finite and not_finite(",
                    "                if False and not_finite(",
                ),
                (
                    "finite in every block",
                    GUARD,
                    "                part = data[max(at, low) : min(at + length, high)]\n",
                    "                part = data[max(at, low) : min(at + length, high)] if low == 0 else data[:0]\n",
                ),
                (
                    "the header against the manifest",
                    GUARD,
                    '            self._tell("agreement", error)\n',
                    "            pass\n",
                ),
                (
                    "the header by itself",
                    GUARD,
                    "            layout.validate_file(header, self._length, self.blob.name)\n",
                    "            pass\n",
                ),
                ("reading can be given up", READER, "    while not stop():\n", "    while True:\n"),
                (
                    "NaN of float32",
                    FINITE,
                    '    "float32": _Pattern("u4", 0x7FFF_FFFF, 0x7F80_0000),\n',
                    '    "float32": _Pattern("u4", 0x7FFF_FFFF, 0x7F80_0001),\n',
                ),
                ("the sign does not matter", FINITE, "np.bitwise_and(block, mask, out", "np.bitwise_or(block, 0, out"),
                ("single patterns", FINITE, "if pattern.single else", "if False else"),
                (
                    "not finite while loading",
                    FETCH,
                    "                    self._unfit(piece.name)\n",
                    "                    pass\n",
                ),
            ],
        ),
        *_of_kind(
            "parity",
            [
                (
                    "cells are those that were verified",
                    PARITY,
                    "    return view if digest(algorithm, view[: extent.length]) == digests[number] else None\n",
                    "    return view\n",
                ),
                (
                    "the padding of a cell is zeros",
                    PARITY,
                    "    view[extent.length :] = bytes(len(view) - extent.length)\n",
                    "",
                ),
                ("cells that do not exist are zeros", PARITY, "        view[:] = bytes(len(view))\n", ""),
                (
                    "its sums",
                    PARITY,
                    "                    digests.append(digest(algorithm, cell))\n",
                    '                    digests.append("0" * 32)\n',
                ),
                ("a copy of the manifest", PARITY, "        tail[: len(copy)] = copy\n", ""),
                (
                    "it is durable",
                    PARITY,
                    "            upload.write_at(tail, cut.file_bytes)\n            upload.finish()\n",
                    "            upload.write_at(tail, cut.file_bytes)\n",
                ),
                ("nothing of a failure stays", PARITY, "            undo.callback(uploads[index].abort)\n", ""),
                (
                    "it can be given up",
                    PARITY,
                    '                if stop():\n                    raise Cancelled("parity was given up")\n',
                    "",
                ),
                ("older parity is cleared first", PARITY, "    clear(tier, home)\n    cut", "    cut"),
                (
                    "records go first",
                    PARITY,
                    'key=lambda one: not one.endswith(".json")',
                    'key=lambda one: one.endswith(".json")',
                ),
                (
                    "neighbours in different rows",
                    STRIPES,
                    "        return [column * self.rows + row for column in range(self.data)]\n",
                    "        return [row * self.data + column for column in range(self.data)]\n",
                ),
                ("a record makes sense by itself", STRIPES, "        not fits\n", "        False\n"),
                (
                    "its cells have a bound",
                    STRIPES,
                    "        or not PAGE_BYTES <= record.cell_bytes <= CELL_LIMIT_BYTES\n",
                    "",
                ),
                (
                    "its sums are as many as its rows",
                    STRIPES,
                    "        or len(record.sums) != -(-len(record.cells) // record.data)\n",
                    "",
                ),
                ("it fits the files", STRIPES, "    if count != len(record.cells) or", "    if"),
                (
                    "the limit of a code",
                    STRIPES,
                    "    if data < 1 or parity < 1 or data + parity > CELLS_LIMIT:\n",
                    "    if data < 1 or parity < 1:\n",
                ),
                (
                    "its record is of this generation",
                    PARITY,
                    "            if layout.root_of(text) == record.root:\n",
                    "            if True:\n",
                ),
                (
                    "a commit that is there decides",
                    PARITY,
                    "        found = {root: found[root]} if root in found else {}\n",
                    "",
                ),
                (
                    "the seal and the copy are of one length",
                    PARITY,
                    "    if len(told.seals) != 1 or told.seals[0].length != first.manifest_bytes:\n",
                    "    if len(told.seals) != 1:\n",
                ),
                (
                    "only records that agree",
                    PARITY,
                    "(one for one in others if one.alike(first))",
                    "(one for one in others)",
                ),
                (
                    "asked for, and made",
                    WRITER,
                    "        if self._code is not None and newest is not None and newest.id not in self._protected:\n",
                    "        if False:\n",
                ),
                (
                    "made of what was verified",
                    WRITER,
                    '    ) -> None:\n        """Give a verified generation its parity',
                    '    ) -> None:\n        return\n        """Give a verified generation its parity',
                ),
                (
                    "whole parity is let be",
                    WRITER,
                    "            if parity.whole(self.tier, generation, manifest, code, stop):\n                return\n",
                    "",
                ),
            ],
        ),
        *_of_kind(
            "repair",
            [
                (
                    "what was rebuilt is read back",
                    PARITY,
                    "            _need_good(tier, home, manifest, blob, readers)\n",
                    "            pass\n",
                ),
                (
                    "it is durable before it takes the place",
                    PARITY,
                    "        for upload in uploads.values():\n            upload.finish()\n",
                    "",
                ),
                (
                    "it takes the place",
                    PARITY,
                    '        tier.replace(f"{home}/{blob.name}", f"{home}/{blob.name}{REBUILT}")\n',
                    "        pass\n",
                ),
                ("nothing of a failure stays", PARITY, "            undo.callback(uploads[blob.name].abort)\n", ""),
                ("beyond the budget is refused", PARITY, "        if left < len(missing):\n", "        if False:\n"),
                (
                    "files of another length are written anew",
                    PARITY,
                    " or lengths.get(one.name) != one.length]\n",
                    "]\n",
                ),
                (
                    "parity that is damaged stands in for nothing",
                    PARITY,
                    "    return data if data and digest(record.digest, data) == record.sums[row] else None\n",
                    "    return data if data else None\n",
                ),
                (
                    "the manifest that was sealed",
                    PARITY,
                    "        if digest(spare.records[0].digest, data) == seal.digest:\n",
                    "        if data:\n",
                ),
                (
                    "copies of the manifest",
                    PARITY,
                    "    places += [(striping.parity_name(0, one.index), len(one.sums) * one.cell_bytes) for one in spare.records]\n",
                    "",
                ),
                (
                    "records are put back",
                    PARITY,
                    "            _put_back(tier, home, name, data)\n            done.append(name)\n",
                    "            done.append(name)\n",
                ),
                (
                    "the commit comes last",
                    PARITY,
                    "    records = {seal.manifest: _manifest(tier, spare), layout.COMMIT: spare.commit}\n",
                    "    records = {layout.COMMIT: spare.commit, seal.manifest: _manifest(tier, spare)}\n",
                ),
                (
                    "a record is read back",
                    PARITY,
                    '        if fetch.some(tier, f"{home}/{name}{REBUILT}", len(data)) != data:\n',
                    "        if False:\n",
                ),
                (
                    "a record that was not put back leaves nothing",
                    PARITY,
                    "    except BaseException:\n        upload.abort()\n        raise\n",
                    "    except ZeroDivisionError:\n        raise\n",
                ),
                (
                    "what died over it is cleared",
                    PARITY,
                    '            tier.delete(f"{home}/{blob.name}{REBUILT}")  # somebody may have died over it\n',
                    "",
                ),
                (
                    "a record that died over it is cleared",
                    PARITY,
                    '    tier.delete(f"{home}/{name}{REBUILT}")\n    upload',
                    "    upload",
                ),
                (
                    "looking can be given up",
                    PARITY,
                    '            if stop():\n                raise Cancelled("repair was given up")\n',
                    "",
                ),
                (
                    "all of it is read afterwards",
                    WRITER,
                    "        findings = read_all(self.tier, generation, arena, self._workers)\n        with self.turn:\n",
                    "        findings: list[Finding] = []\n        with self.turn:\n",
                ),
                (
                    "what does not read back is told",
                    WRITER,
                    "        if not intact(findings):\n            raise BeyondRepair",
                    "        if False:\n            raise BeyondRepair",
                ),
                ("it is no more broken", WRITER, "            self.survey.broken.pop(at, None)\n", ""),
                (
                    "what is beyond is marked",
                    WRITER,
                    "                self.conclude(known, read_all(self.tier, known, arena, self._workers))\n            raise\n",
                    "                pass\n            raise\n",
                ),
                (
                    "it is told",
                    WRITER,
                    '            self._tell(self._event("repaired", at, detail=", ".join(names)))\n',
                    "",
                ),
                (
                    "a failure is told",
                    WRITER,
                    '            self._tell(self._event("not_repaired", at, detail=f"{type(error).__name__}: {error.what}"))\n',
                    "",
                ),
                (
                    "a restore mends only what it would pass over",
                    WRITER,
                    "            if one is not None and not one.damaged:\n                if step is None and not one.unfit:\n                    break\n                continue\n",
                    "",
                ),
                (
                    "what came back is surveyed",
                    WRITER,
                    "                self.survey = commit.survey(self.tier)  # what came back",
                    "                pass  # what came back",
                ),
                (
                    "another is tried where the first does not load",
                    READER,
                    "                    if not mend(generation):\n                        raise\n",
                    "                    raise\n",
                ),
            ],
        ),
        *_of_kind(
            "scrub",
            [
                (
                    "longest ago first",
                    SCRUB,
                    "        return read_at.get(one.id, 0.0), one.commit.order, one.id\n",
                    "        return 0.0, one.commit.order, one.id\n",
                ),
                (
                    "neighbours of damage first",
                    SCRUB,
                    "(apart(one) if damaged else 0, longest_ago(one))",
                    "(0, longest_ago(one))",
                ),
                ("the nearest first", SCRUB, "        return min(abs(", "        return max(abs("),
                (
                    "a round reads what was there",
                    UPKEEP,
                    "        mine = [one for at, one in there.items() if at in self._left]\n",
                    "        mine = [*there.values()]\n",
                ),
                (
                    "a round ends",
                    UPKEEP,
                    "            self._round_over = True\n            self._damaged.clear()\n",
                    "            self._damaged.clear()\n",
                ),
                ("damage of one round is forgotten in the next", UPKEEP, "            self._damaged.clear()\n", ""),
                ("its pace", UPKEEP, "            self._pause(ahead)\n", "            pass\n"),
                ("what gave way comes again", UPKEEP, "        self._left.add(at)\n", ""),
                ("what gave way was not read", UPKEEP, "        self._read_at.pop(at, None)\n", ""),
                ("damage is noted", UPKEEP, "            self._damaged.add(generation.id)\n", "            pass\n"),
                (
                    "news is marked",
                    WRITER,
                    "        if generation != judged(generation, findings):\n",
                    "        if False:\n",
                ),
                (
                    "damage is mended",
                    WRITER,
                    "            return findings, self.try_to_mend(generation.id, arena, stop)\n",
                    "            return findings, False\n",
                ),
                (
                    "parity is looked after",
                    WRITER,
                    "                self._protect(generation, code, arena, stop)\n        return findings, False\n",
                    "                pass\n        return findings, False\n",
                ),
                (
                    "what cannot be read is mended",
                    WRITER,
                    "            if self.try_to_mend(generation.id, arena, stop):\n                return [guard.finding(error)], True\n            raise\n",
                    "            raise\n",
                ),
                (
                    "damage is told in the loop",
                    BACKGROUND,
                    "        if done is not None and not done.whole:\n",
                    "        if False:\n",
                ),
                (
                    "it waits for its turn",
                    BACKGROUND,
                    "        if self._scrub and time.monotonic() - self._scrubbed_at >= self._scrub.seconds:\n",
                    "        if self._scrub:\n",
                ),
                (
                    "not beside a save",
                    BACKGROUND,
                    "                if not self._flights and not self._hurried:\n",
                    "                if not self._hurried:\n",
                ),
                (
                    "not while somebody waits for the end",
                    BACKGROUND,
                    "                if not self._flights and not self._hurried:\n",
                    "                if not self._flights:\n",
                ),
            ],
        ),
    ]


def _ranks() -> list[Mutant]:
    return _of_kind(
        "ranks",
        [
            (
                "a rank that comes after one that died is looked for",
                MEETING,
                "            if left:\n                continue\n",
                "",
            ),
            (
                "who is here hears who is not",
                MEETING,
                "            answer(filter(None, map(posts.heard, here)))",
                "            pass",
            ),
            (
                "no meeting has the name of another",
                MEETING,
                "    name = secrets.token_hex(8)\n",
                '    name = "0"\n',
            ),
            (
                "a topic of a step has its name from the step",
                RANKS,
                'f"{self.name}/{kind}/{step}/{begun.count(step)}"',
                'f"{self.name}/{kind}/{len(begun)}/1"',
            ),
            ("a second try is another topic", RANKS, '{step}/{begun.count(step)}"', '{step}/1"'),
            ("a rewind leaves what was said", RANKS, "            self.rewound = number\n", "            pass\n"),
            (
                "who is elsewhere is not waited for, by rank 0",
                RANKS,
                "                if elsewhere := self._elsewhere(rank):\n",
                '                if elsewhere := "":\n',
            ),
            (
                "who is elsewhere is not waited for, by others",
                RANKS,
                "            elsewhere = self._elsewhere(COORDINATOR)\n",
                '            elsewhere = ""\n',
            ),
            ("who may still come is waited for", RANKS, " or max(begun) < self._begun[-1]:\n", ":\n"),
            (
                "an error of one is an error of all",
                RANKS,
                "        if failed:\n            rank, post",
                "        if False:\n            rank, post",
            ),
            ("who failed is named", RANKS, '{**post, "what": f"rank {rank}: {post[\'what\']}{more}"}', "post"),
            (
                "a verdict that fails is told",
                RANKS,
                '            ranks.post(f"{key}/verdict", told(error))\n',
                "",
            ),
            (
                "what keeps a rank from its answer is posted",
                RANKS,
                "            self.fail(error)\n            raise\n",
                "            raise\n",
            ),
            (
                "posts are deleted",
                RANKS,
                '        ranks.delete([f"{key}/{ranks.rank}"])  # it has been read\n',
                "",
            ),
            ("verdicts are deleted", RANKS, "            self.delete(gone)\n", "            pass\n"),
            (
                "what could not be asked is asked again",
                ANNOUNCING,
                '            posts.post(f"{self._name}/asked", self._ranks.rank)\n            self._asked = True\n',
                '            self._asked = True\n            posts.post(f"{self._name}/asked", self._ranks.rank)\n',
            ),
            (
                "a store that is down is asked ever more rarely",
                ANNOUNCING,
                "            self._pause_seconds *= 2\n",
                "",
            ),
            (
                "told ahead",
                ANNOUNCING,
                "        step = n + max(math.ceil(ahead), 1) + (ahead > 1 or steps == 0)\n",
                "        step = n + 1\n",
            ),
            ("taken once", ANNOUNCING, "        self.coming = [one for one in self.coming if one.step > n]\n", ""),
            (
                "what was missed by time fails",
                TIMING,
                "                missed += [one.step] if one.step <= before else []\n",
                "",
            ),
            (
                "what was missed by an interval fails",
                TIMING,
                "                missed += range(one.step + one.value, before + 1, one.value)\n",
                "",
            ),
            (
                "an interval holds from its step",
                TIMING,
                "                self._interval, self._from = one.value, one.step\n",
                "                self._interval = one.value\n",
            ),
            (
                "the end of a save is told",
                TIMING,
                '(save is None or save.ended()) and ahead.tell(n, "ended", step)',
                "False",
            ),
            (
                "the end of a save is not taken before it is told to all",
                TIMING,
                "        return None if self._in_flight is None else len(self._flying) >= self._in_flight\n",
                "        return None if self._in_flight is None else sum(not (one and one.ended()) for one in self._flying.values()) >= self._in_flight\n",
            ),
            (
                "a follower calls bad what is bad",
                FOLLOWER,
                "            self._ranks.post(self._place(newest, self.rank), not findings)\n",
                "            self._ranks.post(self._place(newest, self.rank), True)\n",
            ),
            (
                "of whom nothing is heard the files are read",
                FOLLOWER,
                "        findings += read_all(self.tier, generation, arena, self._workers, stop, of=rest)\n",
                "",
            ),
            (
                "rank 0 reads its own",
                FOLLOWER,
                "        findings = self.read_own(generation, arena, stop)\n",
                "        findings: list[Finding] = []\n",
            ),
            ("nobody reads all", FOLLOWER, "if self._reader(one.rank) not in good]", "if one.rank != self.rank]"),
            (
                "a stale plan is never used",
                TOGETHER,
                "    if structures != list(agreed) if agreed else len(set(structures)) > 1:\n        return AGAIN\n",
                "",
            ),
            (
                "ranks know the same of each other",
                TOGETHER,
                '    if len({one.get("knows") for one in told}) > 1:  # it is not all who know, or not the same\n        return AGAIN\n',
                "",
            ),
            (
                "a second try waits for the end of the first",
                WRITER,
                "            if together is not None and together.again:\n",
                "            if False:\n",
            ),
            (
                "a folder that was removed is made again",
                FOLLOWER,
                "        self._shared.forget(layout.folder(at))\n",
                "",
            ),
            (
                "what is not finite anywhere is not good",
                LOADING,
                "            unfit.update(one.tensor for one in findings)  # of all ranks: this one reads but a part\n",
                "",
            ),
            (
                "a load that was given up half way is not mixed",
                LOADING,
                "        if half is not None and not request.strict:  # what",
                "        if False:  # what",
            ),
            (
                "a restore is counted by rank 0",
                CHECKPOINTER,
                "            ranks.rewind(topic.agree(ranks.rewound, lambda told: 1 + max(told)))\n",
                "            topic.agree(ranks.rewound, lambda told: 1 + max(told))\n            ranks.rewind(ranks.rewound + 1)\n",
            ),
            (
                "all know what rank 0 knows of the run",
                CHECKPOINTER,
                "                run.see(seen)\n",
                "                run.look()\n",
            ),
            (
                "what is tied is told",
                DIVIDING,
                '    for alias, name in captured.aliases.items():\n        told.update(f"{alias} = {name}\\n".encode())\n',
                "",
            ),
            (
                "a structure is found out when it has changed",
                TOGETHER,
                "                self._known = self._ask(topic, structure, listed(captured))\n                raise",
                "                raise",
            ),
            (
                "replicas are compared",
                TOGETHER,
                "    return SAME if all(len(found) == 1 for found in content.values()) else DIFFERING\n",
                "    return SAME\n",
            ),
            ("weights that differ are refused", TOGETHER, "            if refused:\n", "            if False:\n"),
            (
                "what differs each rank writes from then on",
                TOGETHER,
                "            self._known = replace(self._known or known, own=known.own | own)\n",
                "",
            ),
            (
                "what differs each rank writes at once",
                TOGETHER,
                "            return list(self._further([items[key] for key in sorted(differing) if key in items], kept, pieces))\n",
                "            return ()\n",
            ),
            (
                "a name means one thing",
                TOGETHER,
                "            if before != what:\n",
                "            if False:\n",
            ),
            (
                "random number generators are each rank's own",
                DIVIDING,
                'name == "rng" or name.startswith("rng.") or name in own',
                "name in own",
            ),
            (
                "ranks seal one generation",
                WRITER,
                "            if len({folder for folder, _ in told}) > 1:\n",
                "            if False:\n",
            ),
            (
                "what was committed stays where nobody could be told",
                WRITER,
                "            if not published:\n                raise\n            return published[0]",
                "            raise",
            ),
            (
                "all ranks load, or none",
                CHECKPOINTER,
                "            topic.agree(None, lambda _: None)\n        finally",
                "            pass\n        finally",
            ),
            (
                "all ranks load one generation",
                CHECKPOINTER,
                "    if len({root for root, _, _ in told}) > 1:\n",
                "    if False:\n",
            ),
            (
                "what several want is read once",
                CHECKPOINTER,
                "bool(wanted[here] > SHARED * generation.bytes)",
                "            False",
            ),
            (
                "what no rank has a place for is refused",
                MERGING,
                "    return sorted(name for name in set().union(*listed) if all(_covers(one, name) for one in listed))\n",
                "    return []\n",
            ),
            (
                "pieces without a hole",
                RESHARD,
                '        _need(bool(whole), f"the pieces of {name} leave a hole")\n',
                "",
            ),
            (
                "pieces without an overlap",
                RESHARD,
                '        _need(not overlapping(boxes), f"{name} is stored twice in part")\n',
                "",
            ),
            (
                "a rank's own comes before what others hold",
                RESHARD,
                "Part(tensor.own.get((rank, one.box), one), box)",
                "Part(one, box)",
            ),
        ],
    )


def _requests() -> list[Mutant]:
    return _of_kind(
        "request",
        [
            ("state_dict() in the state is refused", CHECKPOINTER, "        require_live(state)\n", ""),
            (
                "a number is watched from the beginning",
                SNAPSHOTS,
                "type(value) in (int, float)",
                "type(value) is float",
            ),
            ("a pattern is checked at the first step", CUTTING, "            patterns.require(state)\n", ""),
            (
                "a pattern for an optimizer's state is not waited for without end",
                PATTERNS,
                "return self._looks < LOOKS and any",
                "return any",
            ),
            (
                "an optimizer's state may come with its first step",
                PATTERNS,
                "return self._looks < LOOKS and any",
                "return False and any",
            ),
            (
                "a pattern that matches on one rank only is right",
                TOGETHER,
                "return [one for one in first if all(one in other for other in others)]",
                "return first",
            ),
            (
                "a pattern that matches on no rank is refused",
                TOGETHER,
                "return [one for one in first if all(one in other for other in others)]",
                "return []",
            ),
            (
                "a forgotten restore is known at the first step",
                CHECKPOINTER,
                "            self._behind.run.require_restored()\n",
                "",
            ),
            (
                "every unstorable entry is listed",
                STORABLE,
                "while len(found) < LISTED and",
                "while False and",
            ),
            ("the list of them has an end", STORABLE, "while len(found) < LISTED and", "while"),
            (
                "a part of a run leaves the generators",
                MATCH,
                "if partial and others and not any",
                "if False and not any",
            ),
            (
                "a misspelt key shows what is there",
                MATCH,
                "if partial and others and not any(component(key) in plan.missing for key in state):",
                "if partial and others:",
            ),
            ("a restore takes no part", LOADING, "    partial: bool = False\n", "    partial: bool = True\n"),
            (
                "generators are loaded with a pattern only if it names them",
                ACCESS,
                'exclude = [*exclude, "rng"]',
                "exclude = [*exclude]",
            ),
        ],
    )


def _drop_in() -> list[Mutant]:
    return _of_kind(
        "drop-in",
        [
            (
                "the generation that comes with a plan is used once",
                DCP,
                "        at, self.at = self.at, None\n",
                "        at = self.at\n",
            ),
            (
                "a rank with a kept plan waits for the record of this save",
                DCP,
                "        self._order = newest.order if newest else 0\n",
                "        self._order = newest.order + 1 if newest else 0\n",
            ),
            (
                "all ranks have written the generation that is committed",
                DCP,
                "        if others:\n",
                "        if False:\n",
            ),
            (
                "what was planned has been written",
                DCP,
                "    if lacking:\n",
                "    if False:\n",
            ),
            (
                "a part without elements is not stored",
                DCP,
                "    if not box.elements and (0 not in whole or any(box.offsets)):\n",
                "    if False:\n",
            ),
            (
                "a tensor without elements is stored all the same",
                DCP,
                "    if not box.elements and (0 not in whole or any(box.offsets)):\n",
                "    if not box.elements:\n",
            ),
            (
                "one rank records a sharded tensor without elements",
                DIVIDING,
                "            if 0 in whole and rank == min(_holders(None, homes[name])):",
                "            if False:",
            ),
        ],
    )


def _layouts() -> list[Mutant]:
    follows = "            memory = tensors.order(parameter) if alike and ref.order == order else ref.order\n"
    return _of_kind(
        "layout",
        [
            (
                "bytes of a single element with a stride",
                TENSORS,
                "    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)\n",
                "    return tensor.reshape(-1).view(torch.uint8)\n",
            ),
            (
                "a dimension of one element comes after others of its stride",
                TENSORS,
                "key=lambda at: (-stride[at], shape[at] == 1)",
                "key=lambda at: -stride[at]",
            ),
            (
                "an expanded tensor counts as row-major",
                TENSORS,
                "    if tensor.numel() <= 1 or 0 in stride:\n",
                "    if tensor.numel() <= 1:\n",
            ),
            (
                "new state has its stored order",
                BINDING,
                follows,
                "            memory = tensors.order(parameter) if alike else ()\n",
            ),
            ("new state takes the order of its parameter", BINDING, follows, "            memory = ref.order\n"),
            (
                "state that differed from its parameter keeps its order",
                BINDING,
                follows,
                "            memory = tensors.order(parameter) if alike else ref.order\n",
            ),
            (
                "live state of another order is replaced",
                BINDING,
                "            fits = (live.device, tensors.order(live)) == (making.device, making.order)\n",
                "            fits = live.device == making.device\n",
            ),
            (
                "the order of a parameter is stored",
                CAPTURE,
                "    return [one.qualified, [*one.parameter.shape], *([[*order]] if order else [])]\n",
                "    return [one.qualified, [*one.parameter.shape]]\n",
            ),
            (
                "a plan sees other strides",
                CACHED,
                "            and (self._strides is None or list(map(_stride, block)) == self._strides[to])\n",
                "",
            ),
            (
                "a plan sees other strides of a parameter",
                CACHED,
                "        return kept if same and all(map(operator.eq, map(_stride, flat.told), self._told_strides)) else None\n",
                "        return kept if same else None\n",
            ),
        ],
    )


def _data() -> list[Mutant]:
    return _of_kind(
        "data",
        [
            (
                "a loop that does not read from its sampler is reported",
                COUNTING,
                "    if samplers and not read and first and rank == 0:\n",
                "    if False:\n",
            ),
            (
                "a sampler that is not read stands still beside one that is",
                COUNTING,
                "        if not read or one in read or one.world_size < ranks:\n",
                "        if True:\n",
            ),
            (
                "what was counted already need not be read",
                SAMPLER,
                "        return self._cached is None and step != self._step\n",
                "        return self._cached is None\n",
            ),
            (
                "a sampler that is given as sampler= is refused",
                ITERATION,
                "        if several > 1:\n",
                "        if False:\n",
            ),
            (
                "another order is refused",
                SAMPLER,
                "        if order != self._order and (cursor or order.seed != self._seed):\n",
                "        if False:\n",
            ),
            (
                "another order in mid-epoch is refused",
                SAMPLER,
                "(cursor or order.seed != self._seed)",
                "(order.seed != self._seed)",
            ),
            (
                "another seed is refused where an epoch begins",
                SAMPLER,
                "(cursor or order.seed != self._seed)",
                "cursor",
            ),
            (
                "another order is refused before anything is loaded",
                OBJECTS,
                'return one.differs(data) if isinstance(one, ResumableSampler) else ""',
                'return ""',
            ),
            (
                "earlier epochs keep their order",
                SAMPLER,
                "                self._earlier = [*saved.earlier, (saved.epoch, saved.order)]\n",
                "                pass\n",
            ),
            ("a step is counted once", SAMPLER, "        if step != self._step:\n", "        if True:\n"),
            (
                "steps are counted by their numbers",
                SAMPLER,
                "or step < self._step else step - max(self._step, previous))",
                "or step < self._step else 1)",
            ),
            (
                "no more steps are counted than batches were fetched",
                SAMPLER,
                "place > at.fetched(self.steps_per_epoch) or (",
                "(",
            ),
            (
                "steps across two iterations are refused",
                SAMPLER,
                " or (steps > 1 and not at.sure):",
                ":",
            ),
            (
                "the last step of an epoch takes what is left of it",
                SAMPLER,
                "        left = -(-self.remaining // each)\n",
                "        left = self.remaining // each\n",
            ),
            (
                "what was handed out ahead of a step is not counted",
                SAMPLER,
                "follows=self._sampler.batches_per_step is None",
                "follows=True",
            ),
            (
                "what was handed out ahead of a step is not counted at the end of an epoch",
                SAMPLER,
                "        if at.follows:\n            sampler._move(at.epoch, at.next_step)",
                "        if True:\n            sampler._move(at.epoch, at.next_step)",
            ),
            ("an iteration from before a load is over", ITERATION, "        if self.stale:\n", "        if False:\n"),
            (
                "numbers begin anew with a restore",
                CHECKPOINTER,
                "            one.restart_after(found.step)\n",
                "            pass\n",
            ),
            (
                "records of an audit are with one rank of another world",
                MERGING,
                "    if len(manifests) != ranks:\n",
                "    if False:\n",
            ),
            (
                "each record is with one rank",
                MERGING,
                "manifests[rank::ranks]",
                "manifests[rank:]",
            ),
        ],
    )


def _saved_twice() -> list[Mutant]:
    return _of_kind(
        "saved twice",
        [
            (
                "a restored step that is the same is not written again",
                CHECKPOINTER,
                "            if is_same(self._cutter.captured(self._request.state), manifest):\n",
                "            if False:\n",
            ),
            (
                "a rewind that is saved at once is durable",
                CHECKPOINTER,
                " and run.resumes_at(found.generation.id)\n",
                "\n",
            ),
            (
                "values of a restored step are compared",
                UNCHANGED,
                "        and _values(captured.values) == _values(manifest.values)\n",
                "",
            ),
            (
                "names of a restored step are compared",
                UNCHANGED,
                "        {piece.name for piece in pieces} == {name for name in captured.tensors if not _is_random(name)}\n",
                "        True\n",
            ),
            (
                "tensors of a restored step are compared",
                UNCHANGED,
                "        and all(_holds(captured, piece, manifest.digest) for piece in pieces)\n",
                "",
            ),
        ],
    )
