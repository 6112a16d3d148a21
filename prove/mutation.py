"""Take one safeguard out of the core, and see whether a test fails. Each mutant is one exact replacement in a copy of src/.

The tests of the core are the torch-free ones, quick ones first; the crash model comes last. A mutant that no test kills is a
safeguard that nothing guards: a test is missing, or the code is. A mutant that cannot matter says why, and is not run.
What was done is kept by the content of the mutated file and of the tests, so a run that was stopped goes on; where only
they have changed since, the test that killed a mutant is asked first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
HOME = HERE.parent
KEPT = HERE / "reports" / ".mutation.json"
TESTS = ["tiers", "slots", "persist", "plan", "layout", "places", "hostile", "flips", "crash_model"]
LOOP_TESTS = ["in_flight", "overlap", "pacing", "restore", "capture_plan"]
"""for what runs in and behind a training loop; these need torch"""
LIMIT_SECONDS = 600
MEMORY_BYTES = 8 << 30
"""of address space: a mutant that never ends may also never stop to grow"""


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
        in_loop = self.file.startswith("train/") or self.file == BACKGROUND
        return [f"tests/test_{name}.py" for name in (LOOP_TESTS if in_loop else TESTS)]


DISK, FILES, COMMIT, LAYOUT = "tiers/disk.py", "rawio/files.py", "format/commit.py", "format/layout.py"
FETCH, PERSIST, WRITER, READER = "engine/fetch.py", "engine/persist.py", "run/writer.py", "run/reader.py"
BACKGROUND = "run/background.py"
RESTORE, RETENTION, PLACES, CONTENTS = "plan/restore.py", "plan/retention.py", "run/places.py", "engine/contents.py"


def mutants() -> list[Mutant]:
    return [*_syncs(), *_writes(), *_commits(), *_orders(), *_digests(), *_forms(), *_retentions(), *_lineages()]


def _syncs() -> list[Mutant]:
    return [
        Mutant("fsync", name, file, old, new)
        for name, file, old, new in [
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
        ]
    ] + [
        Mutant("directory fsync", name, file, old, new)
        for name, file, old, new in [
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
        ]
    ]


def _writes() -> list[Mutant]:
    return [
        Mutant("write", name, file, old, new)
        for name, file, old, new in [
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
                '                    self.tier.delete(f"{home}/{name}".lstrip("/"))\n',
                "                    pass\n",
            ),
            (
                "failed save is cleared",
                WRITER,
                "            with contextlib.suppress(LastgoodError):\n                commit.retire(self.tier, at)\n            raise\n",
                "            raise\n",
            ),
            (
                "unfinished is cleared at opening",
                WRITER,
                "            commit.retire(self.tier, at)\n            self.survey.going",
                "            self.survey.going",
            ),
        ]
    ]


def _commits() -> list[Mutant]:
    return [
        Mutant("commit", name, file, old, new)
        for name, file, old, new in [
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
                "        raise _unknown(path, error) from error\n\n    def _remove_if_there",
                "        self._drop(path)\n        raise _unknown(path, error) from error\n\n    def _remove_if_there",
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
                "        except CommitUnknown:\n            with self.turn:\n                self._note_tried(at)  # this step may exist: it is not written again\n            raise\n",
                "",
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
                "            if self.survey.generations or self.survey.broken:\n                newest",
                "            if False:\n                newest",
            ),
            (
                "taken name: nothing is retired",
                WRITER,
                "        except NameTaken:\n            raise  # what lies there is not of this save\n",
                "",
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
                '            self._files.rename(path + ".tmp", path)\n',
                '            self._remove_if_there(path)\n            self._files.rename(path + ".tmp", path)\n',
            ),
        ]
    ]


def _orders() -> list[Mutant]:
    finish = "        sums = [job.result() for job in jobs]\n        upload.finish()\n"
    publish = "msgspec.structs.replace(commit.publish(self.tier, record, self._algorithm), bytes=size)\n"
    mark = "            commit.mark(self.tier, generation, findings)\n"
    going = "        if layout.GOING in there:\n"
    remove = '    tier.delete(f"{home}/{layout.COMMIT}")  # <- the generation is gone after this line\n'
    return [
        Mutant("order", name, file, old, new)
        for name, file, old, new in [
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
                "                findings = read_all(self.tier, generation, arena, self._workers, stop)\n",
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
                "        self.point()\n        for at in self.surplus():\n",
                "        for at in self.surplus():\n",
            ),
            ("point at what is verified", WRITER, "                self.point()\n\n    def point", "\n    def point"),
            ("pointer names a verified one", WRITER, "if one.verified and not one.damaged), None)", "), None)"),
            (
                "next older is verified after damage",
                WRITER,
                "            problem = problem or Damaged(",
                "            raise Damaged(",
            ),
            ("damage is raised", WRITER, "        if problem:\n            raise problem\n", ""),
            (
                "deleted only from the survey",
                WRITER,
                "            commit.retire(self.tier, at)\n            with self.turn:\n",
                "            with self.turn:\n",
            ),
            (
                "begin is durable before it is used",
                WRITER,
                "        self.tier.put_new(layout.incarnation_name(record), layout.encode(record))\n",
                "",
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
                "                self.tier.delete(layout.HEADER)  # damaged",
                "                pass  # damaged",
            ),
            ("publish is called", WRITER, publish, "Generation(commit=record, root='', bytes=size)\n"),
            (
                "older save is given up",
                WRITER,
                "        if newest.step > at.step and not pinned:\n",
                "        if False:\n",
            ),
            (
                "older save that is wanted is not",
                WRITER,
                "        if newest.step > at.step and not pinned:\n",
                "        if newest.step > at.step:\n",
            ),
            ("names the one before it", WRITER, "one.incarnation == at.incarnation and one.step < at.step)", "True)"),
        ]
    ]


def _digests() -> list[Mutant]:
    return [
        Mutant("digest", name, file, old, new)
        for name, file, old, new in [
            (
                "record's own",
                LAYOUT,
                "    if digest(found[1].decode(), body) != found[2].decode():\n",
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
                "    if digest(manifest.digest, view[: extent.length]) != blob.chunks[index]:\n",
                "    if False:\n",
            ),
            ("content of a tensor", FETCH, "            if piece.digest != found:\n", "            if False:\n"),
            (
                "header of a tensor file",
                FETCH,
                "        layout.validate_header(bytes(header), self._blob, self._pieces)\n",
                "        return\n",
            ),
            (
                "content check of a restore",
                FETCH,
                "                for name in check.see(data):\n                    sink.done(name)\n",
                "                pass\n",
            ),
            (
                "content check of a verification",
                FETCH,
                "                    check.see(data)\n                except",
                "                    pass\n                except",
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
                "    if hasher.hexdigest() != piece.digest:\n        raise",
                "    if False:\n        raise",
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
                READER,
                "        found = commit.read_generation(tier, generation.id, generation.commit.run)\n",
                "        found = generation\n",
            ),
            ("records are read past the cache", COMMIT, "memoryview(buffer), fresh=True)", "memoryview(buffer))"),
            (
                "chunks are read past the cache",
                FETCH,
                "length=extent.length), view, fresh=True)",
                "length=extent.length), view)",
            ),
            ("length of a manifest", COMMIT, "    _need_length(name, there.get(one.manifest), one.length)\n", ""),
            (
                "length of a blob",
                COMMIT,
                '        _need_length(f"{home}/{blob.name}", there.get(blob.name), blob.length)\n',
                "        pass\n",
            ),
            ("file that ends early", DISK, "                    if whole <= got:\n", "                    if False:\n"),
        ]
    ]


def _forms() -> list[Mutant]:
    return [
        Mutant("form", name, file, old, new)
        for name, file, old, new in [
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
            ("manifest is validated", COMMIT, "    layout.validate_manifest(manifest, generation.id, rank)\n", ""),
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
            ("name stands once", LAYOUT, '        need(piece.name not in names, f"{piece.name!r} stands twice")\n', ""),
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
                '    need(all(name in stored for name in manifest.aliases.values()), "an alias of nothing")\n',
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
        ]
    ]


def _retentions() -> list[Mutant]:
    return [
        Mutant("retention", name, RETENTION, old, new)
        for name, old, new in [
            (
                "counts verified ones only",
                "    good = [one for one in chain if one.verified and not one.damaged]\n    kept",
                "    good = [one for one in chain if not one.damaged]\n    kept",
            ),
            (
                "counts undamaged ones only",
                "    good = [one for one in chain if one.verified and not one.damaged]\n    kept",
                "    good = [one for one in chain if one.verified]\n    kept",
            ),
            (
                "keeps the last",
                "    kept = {one.id for one in good[: keep.last]} |",
                "    kept = {one.id for one in good[:1]} |",
            ),
            (
                "keeps what is newer than the newest verified",
                "    older = chain[chain.index(good[0]) + 1 :] if good else []\n",
                "    older = chain[1:]\n",
            ),
            ("unverified ones fill up", "    kept |= set(unread[: max(keep.last - len(good), 0)])\n", ""),
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


def _lineages() -> list[Mutant]:
    return [
        Mutant("lineage", name, file, old, new)
        for name, file, old, new in [
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
                "            passed.append((at, told(survey.generations[at].damaged)))\n        else:\n",
                "            pass\n        if at not in survey.broken:\n",
            ),
            (
                "next older after damage",
                READER,
                "            if intact or (step is not None and at == choice.candidates[-1]):\n",
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
        ]
    ]


# ---- the run -------------------------------------------------------------------------------------------------------


class Judgement(NamedTuple):
    """What became of a mutant."""

    outcome: str
    """killed, survived or stale"""
    told: str
    """by what: the first test that failed"""
    seconds: float
    of: str
    """what was judged: the mutant, the file it stands in, the tests"""


def judge(mutant: Mutant, last: Judgement | None = None) -> Judgement:
    """Run the tests on a mutant; first the one that killed it `last` time, when they were other tests."""
    of = fingerprint(mutant)
    source = (HOME / "src/lastgood" / mutant.file).read_text()
    if source.count(mutant.old) != 1:
        return Judgement("stale", f"its text is {source.count(mutant.old)} times in {mutant.file}", 0.0, of)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy, scratch = Path(folder, "copy"), Path(folder, "scratch")
        scratch.mkdir()
        shutil.copytree(HOME / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copytree(HOME / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(HOME / "pyproject.toml", copy)
        (copy / "src/lastgood" / mutant.file).write_text(source.replace(mutant.old, mutant.new))
        env = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(scratch)}
        env["CI"] = "1"  # hypothesis: no deadlines, the same examples every time
        rounds = [mutant.tests()]
        if last and last.outcome == "killed" and "::" in last.told:
            rounds.insert(0, [f"tests/test_{last.told}"])
        for tests in rounds:
            limited = ["prlimit", f"--as={MEMORY_BYTES}", sys.executable, "-m", "pytest"]
            command = [*limited, "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
            try:
                done = subprocess.run(
                    [*command, *tests], cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS
                )
            except subprocess.TimeoutExpired:
                return Judgement("killed", "it never ends", time.monotonic() - begun, of)
            found = re.search(r"^(?:FAILED|ERROR) tests/test_(\S+)", done.stdout, re.M)
            if found:
                return Judgement("killed", found[1], time.monotonic() - begun, of)
    if done.returncode == 0:
        return Judgement("survived", "", time.monotonic() - begun, of)
    return Judgement("killed", done.stdout[-200:] + done.stderr[-200:], time.monotonic() - begun, of)


def fingerprint(mutant: Mutant) -> str:
    told = hashlib.sha256(repr(mutant).encode())
    for path in [HOME / "src/lastgood" / mutant.file, *(HOME / test for test in mutant.tests())]:
        told.update(path.read_bytes())
    return told.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="mutants whose kind or name holds this")
    options = parser.parse_args()
    known = {name: Judgement(*one) for name, one in json.loads(KEPT.read_text()).items()} if KEPT.exists() else {}
    wanted = [one for one in mutants() if options.only in one.name and not one.equivalent]
    for file in (DISK, BACKGROUND):
        first_line = (HOME / "src/lastgood" / file).read_text().splitlines()[0]
        control = judge(Mutant("control", "nothing is taken out", file, first_line, first_line))
        if control.outcome != "survived":
            print(f"the tests fail as it is: {control.told}")
            return 2
    begun, done, turn = time.monotonic(), 0, threading.Lock()

    def run(mutant: Mutant) -> None:
        nonlocal done
        last = known.get(mutant.name)
        if last is None or last.of != fingerprint(mutant):
            judged = judge(mutant, last)
            with turn:
                known[mutant.name] = judged
                KEPT.parent.mkdir(exist_ok=True)
                KEPT.write_text(json.dumps(known))
        done += 1
        found = known[mutant.name]
        if found.outcome != "killed":
            print(f"\n{found.outcome}: {mutant.name} {found.told}")
        print(f"\r{done} of {len(wanted)}, {time.monotonic() - begun:.0f} s", end="", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, wanted))
    print()
    results = [(one, known[one.name]) for one in wanted]
    killed = sum(found.outcome == "killed" for _, found in results)
    if not options.only:
        write(results, killed)
    print(f"{killed} of {len(results)} killed")
    return int(killed < len(results))


def write(results: list[tuple[Mutant, Judgement]], killed: int) -> None:
    sys.path.insert(0, str(HERE))
    from syscalls import report

    rows = [
        f"| {one.kind} | {one.what} | `{one.file}` | {found.outcome} | {found.told.replace('|', ' ')} |"
        for one, found in results
    ]
    told = ["Not run, because nobody could tell:", ""]
    told += [f"- {one.kind}, {one.what} (`{one.file}`): {one.equivalent}." for one in mutants() if one.equivalent]
    facts = {
        "mutants": len(results),
        "killed": killed,
        "score": f"{100 * killed / len(results):.1f} %",
        "seconds": round(sum(found.seconds for _, found in results)),
        "survived": [one.name for one, found in results if found.outcome != "killed"],
    }
    table = "\n".join(
        ["| kind | what was taken out | file | outcome | first test that failed |", "|---|---|---|---|---|", *rows]
    )
    report("mutation", "Mutants of the core", facts, [table, "\n".join(told)])


if __name__ == "__main__":
    sys.exit(main())
