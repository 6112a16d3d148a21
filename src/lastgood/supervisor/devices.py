"""The devices of this machine, as torch counts them, and what ranks get of them.

torch is asked in a process that ends then, so that neither the supervisor nor the process from which ranks are forked
touches a device.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from ..errors import Refused
from ..io import os_errors
from .program import CPUS

_COUNT = """
import sys
from torch.distributed.run import determine_local_world_size
try:
    print(determine_local_world_size(sys.argv[1]))
except ValueError as error:
    if "Unsupported" not in str(error):
        raise
    print(0)
"""
_BINDING = """
import json, sys
from torch.numa.binding import AffinityMode, NumaOptions, _get_logical_cpus_to_bind_to
options = NumaOptions(affinity_mode=AffinityMode(sys.argv[1]))
ranks = range(int(sys.argv[2]))
print(json.dumps([sorted(_get_logical_cpus_to_bind_to(gpu_index=one, numa_options=options)) for one in ranks]))
"""


def count(kind: str) -> int | None:
    """The number of ranks for --nproc-per-node; None: torch knows no such kind. `kind`: "gpu", "xpu", "auto", or the
    name of a backend that is installed. Raises Refused if there is no such device."""
    found = int(_asked(f"--nproc-per-node {kind}", _COUNT, kind))
    return found or None


def bindings(mode: str, ranks: int) -> list[list[int]]:
    """The processors near the device of each local rank. `mode`: of torch.numa.binding. Raises Refused."""
    text = _asked(f"--numa-binding {mode}", _BINDING, mode, str(ranks))
    return msgspec.json.decode(text, type=list[list[int]])


def of_rank(local: int, bound: Sequence[Sequence[int]], virtual: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a local rank about devices. `bound`: as `bindings` returns it, or empty. `virtual`: whether the
    rank sees its own device alone. Raises what `one_visible` raises.
    """
    found = one_visible(local, environ) if virtual else {}
    return {**found, CPUS: ",".join(map(str, bound[local]))} if bound else found


def one_visible(local: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank that sees its own device alone, as number 0.

    `local`: the local rank. Raises Refused if the device is not among CUDA_VISIBLE_DEVICES of `environ`.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    devices = None if visible is None else visible.split(",")
    if devices is not None and local >= len(devices):
        raise Refused(
            f"--virtual-local-rank: local rank {local} has no device in CUDA_VISIBLE_DEVICES={visible}",
            safe="Nothing was started.",
            todo="Start fewer ranks, or make more devices visible.",
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(local) if devices is None else devices[local].strip()}


def _asked(option: str, program: str, *arguments: str) -> str:
    """What a short program prints. `option`: needs it, for errors."""
    with os_errors.needed(f"{option} asks torch in a process of its own, which cannot be started", ""):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"torch ended with exit code {done.returncode}"])[-1]
        raise Refused(
            f"{option}: {reason}", safe="Nothing was started.", todo="Give a number of ranks, or leave it out."
        )
    return done.stdout.splitlines()[-1]
