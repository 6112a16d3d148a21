"""`lastgood bench objects`: saves to an S3 server and restores from it, beside obstore's own requests and DCP.

The server (SeaweedFS, object_server.py) runs on this machine in its own processes. Each round measures every contender
once, in an order that rotates. The raw contenders upload as many bytes as a save from memory that is warm, as one
multipart upload, and read one object in ranges into no memory of the caller; the best of several numbers of requests at
a time, and of several lengths of a range, counts. The seconds of a save end when the save is reported as complete, and
those of a restore when the state is in the live tensors. Processor seconds are those of the client's process, all its
threads together. The server speaks http, and obstore does not sign the bytes of an upload, like lastgood over
https (AWS_UNSIGNED_PAYLOAD); s3torchconnector does not sign them either, and s3fs always does over http.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import obstore
import torch.distributed.checkpoint as dcp
from obstore.store import S3Store

import lastgood

from .contenders import warm_memory
from .durable import of_contender, ratios
from .journal import Journal, rotated
from .models import Workload
from .object_faults import FaultyProxy
from .object_server import ObjectServer, make_bucket
from .report import Progress, Report, Table, hardware, spread
from .restore import Options as Options
from .usage import working_place

BUCKET = "bench"
PART_BYTES = 8 << 20
RANGES_BYTES = (2 << 20, 4 << 20, 8 << 20)
"""Lengths of one request of the raw reads."""
AT_ONCE = (2, 4, 8)
"""Requests at a time of the raw contenders."""
RAW, OURS = "obstore", "lastgood"
S3FS, CONNECTOR = "DCP, s3fs", "DCP, s3torchconnector"
PEERS = {S3FS: "s3fs", CONNECTOR: "s3torchconnector"}
SAVE, RESTORE, ONE_TENSOR = "save", "restore", "one tensor"
Row = Mapping[str, Any]


class Timing(NamedTuple):
    """Seconds of a save or a restore, and of the processor meanwhile."""

    seconds: float
    processor_seconds: float


Work = Callable[[], Timing]


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "objects.journal.jsonl", {"hardware": hardware()})
    keys = list(_keys(options))
    if any(journal.get(**key) is None for key in keys):
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(working_place(options))
            server = stack.enter_context(ObjectServer(place / "server", volumes=100))
            stack.enter_context(mock.patch.dict(os.environ, {**server.environment(), "AWS_UNSIGNED_PAYLOAD": "true"}))
            make_bucket(f"s3://{BUCKET}/")
            contenders = _Contenders(Workload("gpt2-124m", options.scale, 0.03), server, stack)
            for key in keys:
                if journal.get(**key) is None:
                    found = contenders.measure(key["contender"], key["what"])
                    journal.put(found, **key)
                    progress(f"round {key['round'] + 1}/{options.rounds}  {key['what']:10s}  {key['contender']}")
    return [{**key, **(journal.get(**key) or {})} for key in keys]


def _keys(options: Options) -> Iterator[dict[str, Any]]:
    names = [RAW, OURS, *(name for name, package in PEERS.items() if importlib.util.find_spec(package))]
    for number in range(options.rounds):
        for what in (SAVE, RESTORE):
            for name in rotated(names, number):
                yield {"scale": options.scale, "what": what, "contender": name, "round": number, "unsigned": True}
    yield {"scale": options.scale, "what": ONE_TENSOR, "contender": OURS, "round": 0, "unsigned": True}


class _Contenders:
    """Every contender with its own folder in the bucket, and the state that all of them save and restore."""

    def __init__(self, trained: Workload, server: ObjectServer, stack: contextlib.ExitStack) -> None:
        self._state = {"model": trained.module, "optimizer": trained.optimizer}
        self._live = {"model": trained.module.state_dict(), "optimizer": trained.optimizer.state_dict()}
        self._server, self._step = server, 0
        self._dcp_saves: dict[str, str] = {}
        """contender -> the URL of its newest save"""
        self._url = f"s3://{BUCKET}/run"
        self._ckpt = stack.enter_context(
            lastgood.Checkpointer(
                self._url, self._state, in_flight=1, cadence=lastgood.Every(steps=1), retention=lastgood.Keep(last=1)
            )
        )
        self.bytes = self._ckpt.save(self._next()).result().bytes  # the first save faults in its memory
        self._ckpt.wait()
        self._store = S3Store(BUCKET, prefix="raw", client_options={"allow_http": True})
        self._memory = warm_memory(8)
        self._put_at_once = min(AT_ONCE, key=lambda count: self._put(count).seconds)
        ways = [(count, length) for count in AT_ONCE for length in RANGES_BYTES]
        self._get_how = min(ways, key=lambda how: self._get(*how).seconds)

    def measure(self, name: str, what: str) -> dict[str, Any]:
        """One measurement, as a row of the journal."""
        if what == ONE_TENSOR:
            return self._one_tensor()
        if name == RAW:
            found = self._put(self._put_at_once) if what == SAVE else self._get(*self._get_how)
        elif name == OURS:
            found = self._save() if what == SAVE else _timed(self._ckpt.restore)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of DCP, about a process without a group
                found = self._dcp_save(name) if what == SAVE else self._dcp_load(name)
        return {**found._asdict(), "bytes": self.bytes}

    def _one_tensor(self) -> dict[str, Any]:
        """Read the first tensor of the run, and no other, through a proxy that counts the bytes of all replies."""
        with FaultyProxy(self._server.endpoint) as proxy:
            with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": proxy.endpoint}):
                name = next(iter(self._live["model"]))
                tensor = lastgood.open(self._url).tensor(f"model.{name}")
            replies = proxy.requests
        of_tensors = [one.received for one in replies if one.target.endswith(".safetensors")]
        return {
            "bytes": tensor.nbytes,
            "received": sum(of_tensors),
            "records": sum(one.received for one in replies) - sum(of_tensors),
            "requests": len(replies),
            "whole": self.bytes,
        }

    def _next(self) -> int:
        self._step += 1
        return self._step

    def _save(self) -> Timing:
        step = self._next()
        found = _timed(lambda: self._ckpt.save(step).result())
        self._ckpt.wait()  # verification and retention are not timed
        return found

    def _put(self, at_once: int) -> Timing:
        def parts() -> Iterator[memoryview]:
            for start in range(0, self.bytes, PART_BYTES):
                at = start % len(self._memory)
                yield self._memory[at : at + min(PART_BYTES, self.bytes - start)]

        return _timed(
            lambda: obstore.put(
                self._store, "blob", parts(), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=at_once
            )
        )

    def _get(self, at_once: int, range_bytes: int) -> Timing:
        def read(start: int) -> None:
            obstore.get_range(self._store, "blob", start=start, length=min(range_bytes, self.bytes - start))

        def read_all() -> None:
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(read, range(0, self.bytes, range_bytes)))

        return _timed(read_all)

    # ---- DCP -----------------------------------------------------------------------------------------------

    def _dcp_save(self, name: str) -> Timing:
        url = self._dcp_saves[name] = f"s3://{BUCKET}/dcp-{PEERS[name]}-{self._next()}"
        writer = self._s3fs("Writer", url) if name == S3FS else self._connector("Writer", url)
        return _timed(lambda: dcp.save(self._live, storage_writer=writer, no_dist=True))

    def _dcp_load(self, name: str) -> Timing:
        if name not in self._dcp_saves:  # the journal has the save of this round from an earlier run
            self._dcp_save(name)
        url = self._dcp_saves[name]
        reader = self._s3fs("Reader", url) if name == S3FS else self._connector("Reader", url)
        return _timed(lambda: dcp.load(dict(self._live), storage_reader=reader, no_dist=True))

    def _s3fs(self, kind: str, url: str) -> Any:
        from torch.distributed.checkpoint import _fsspec_filesystem as found

        keys = {"key": os.environ["AWS_ACCESS_KEY_ID"], "secret": os.environ["AWS_SECRET_ACCESS_KEY"]}
        return getattr(found, f"Fsspec{kind}")(url, endpoint_url=self._server.endpoint, **keys)

    def _connector(self, kind: str, url: str) -> Any:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector import dcp as found
        from s3torchconnector._s3client import S3Client

        storage = getattr(found, f"S3Storage{kind}")("us-east-1", url)
        how = S3ClientConfig(force_path_style=True)  # no public argument takes the address of another server
        client = S3Client("us-east-1", endpoint=self._server.endpoint, s3client_config=how)
        storage.fs = found.S3FileSystem("us-east-1", s3_client=client)
        return storage


def _timed(work: Callable[[], object]) -> Timing:
    begun, used = time.perf_counter(), time.process_time()
    work()
    return Timing(time.perf_counter() - begun, time.process_time() - used)


# ---- the report ----------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], options: Options) -> Report:
    tables, notes = [], []
    for what in (SAVE, RESTORE):
        mine = [row for row in rows if row["what"] == what]
        names = list(dict.fromkeys(row["contender"] for row in mine if row["round"] == 0))
        lines = [
            [
                name,
                spread([row["seconds"] for row in of_contender(mine, name)]),
                f"{statistics.median(row['bytes'] / 1e9 / row['seconds'] for row in of_contender(mine, name)):.2f}",
                spread([row["processor_seconds"] * 1e9 / row["bytes"] for row in of_contender(mine, name)]),
            ]
            for name in names
        ]
        tables.append(Table(what, ["contender", "s", "GB/s", "processor s per GB"], lines))
        notes.append(f"{what}: {OURS} / {RAW}, round by round: {spread(ratios(mine, RAW, OURS, 'seconds'), '.2f')}")
        for name in names[2:]:
            used = [1 / one for one in ratios(mine, name, OURS, "processor_seconds")]
            notes.append(f"{what}: processor time of {OURS} / {name}, round by round: {spread(used, '.2f')}")
    (single,) = (row for row in rows if row["what"] == ONE_TENSOR)
    notes.append(
        f"One tensor of {single['bytes']:,} bytes alone (`lastgood.open(run).tensor(name)`): {single['received']:,} "
        f"bytes of the tensor file are read and {single['records']:,} of records, in {single['requests']} requests; "
        f"the generation has {single['whole']:,}."
    )
    return Report(
        name="objects",
        title=f"Saves to an S3 server and restores from it, {single['whole'] / 1e9:.2f} GB GPT-2-size AdamW state",
        about=f"Medians of {options.rounds} interleaved rounds, (least-most). The server runs on the same machine; "
        "obstore and lastgood do not sign the bytes of uploads, as over https.",
        tables=tables,
        rows=rows,
        notes=notes,
        figures={},
    )
