"""Counts the requests of a run with many generations in an object store. A measurement; it searches for no violation.

    python -m lastgood_lab.campaigns.many_generations [--count 10000]

One generation is saved; the others are made of it, with other steps, and put into the bucket as objects. The run is
then opened once without a catalog, and every request of what follows is counted at a proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable

import msgspec
import numpy as np
import obstore
from obstore.store import S3Store, from_url

import lastgood
from lastgood.format import commit, layout
from lastgood.io.checksum import digest
from lastgood.records import Generation, GenerationId, Manifest, Mark
from lastgood.run import access
from lastgood_lab.campaigns.trials import in_memory
from lastgood_lab.object_faults import FaultyProxy
from lastgood_lab.object_server import ObjectServer, make_bucket

RUN = "s3://many/run"
PUTS_AT_ONCE = 64
MANIFEST = layout.manifest_name(0)


def opened() -> lastgood.Checkpointer:
    state = {"w": np.arange(8.0), "n": 0}
    return lastgood.Checkpointer(RUN, state, retention=lastgood.Keep(last=1, every=1), save_on_exit=False)


def fill(count: int) -> None:
    """Save one generation, and make the others up to step `count` of it."""
    with opened() as ckpt:
        ckpt.save(1).result()
        ckpt.wait()
    tier = access.for_reading(RUN)
    (first,) = commit.survey(tier).generations.values()
    store, folder = from_url(RUN, client_options={"allow_http": True}), layout.folder(first.id)
    assert isinstance(store, S3Store)
    files = {name: bytes(obstore.get(store, f"{folder}/{name}").bytes()) for name in tier.list(folder)}

    async def put_all() -> None:
        limit = asyncio.Semaphore(PUTS_AT_ONCE)

        async def put(name: str, data: bytes) -> None:
            async with limit:
                await obstore.put_async(store, name, data, use_multipart=False)

        for start in range(2, count + 1, 500):
            made = [file for step in range(start, min(start + 500, count + 1)) for file in at_step(first, files, step)]
            await asyncio.gather(*(put(name, data) for name, data in made))

    asyncio.run(put_all())


def at_step(first: Generation, files: dict[str, bytes], step: int) -> list[tuple[str, bytes]]:
    """The objects of a generation like `first`, at another step."""
    at = GenerationId(step=step, incarnation=first.id.incarnation)
    manifest = layout.decode(files[MANIFEST], Manifest, MANIFEST)
    data = layout.encode(msgspec.structs.replace(manifest, step=step), manifest.digest)
    (seal,) = first.commit.seals
    seal = msgspec.structs.replace(seal, length=len(data), digest=digest(manifest.digest, data))
    before = GenerationId(step=step - 1, incarnation=at.incarnation)
    record = layout.encode(msgspec.structs.replace(first.commit, step=step, seals=[seal], parent=before), "xxh3_128")
    mark = layout.encode(Mark(format=layout.FORMAT, root=layout.root_of(record)))
    changed = {**files, MANIFEST: data, layout.COMMIT: record, layout.VERIFIED: mark}
    return [(f"{layout.folder(at)}/{name}", one) for name, one in changed.items()]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=10_000)
    args = options.parse_args()
    with in_memory() as at, ObjectServer(at / "server") as server, FaultyProxy(server.endpoint) as proxy:
        os.environ.update(server.environment())
        make_bucket(RUN)
        fill(args.count)
        begun = time.monotonic()
        opened().close()
        print(f"{args.count:,} generations, first opening without a catalog: {time.monotonic() - begun:.1f} s")
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint

        def counted(what: str, act: Callable[[], object]) -> None:
            proxy.clear()
            start = time.monotonic()
            found = act()
            seconds, size = time.monotonic() - start, sum(one.received for one in proxy.requests)
            print(f"{what}: {len(proxy.requests)} requests, {seconds:.1f} s, {size / 1e6:.1f} MB, {found}")

        counted("lastgood.open(...).generation()", lambda: lastgood.open(RUN).generation().step)
        counted("opening and closing", lambda: opened().close())
        with opened() as ckpt:
            counted("restore", lambda: ckpt.restore().step)
            counted("latest", ckpt.latest)

            def saved() -> int:
                step = ckpt.save(args.count + 1).result().step
                ckpt.wait()
                return step

            counted("save, verified", saved)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
