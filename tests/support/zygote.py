"""Many short runs of one training script, each forked from a process that has imported the framework.

Importing torch and a framework takes seconds; a forked run takes a few tenths of a second. The zygote has one
thread, reads one request per line from stdin, and answers each with the exit status of the run: of several ranks,
the first one that is not 0. A run executes the
script like `python SCRIPT ARGUMENTS`. It is killed by SIGKILL after a number of printed steps, or at a numbered file
operation of a save.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OPERATIONS = ("pwrite", "link", "fsync", "fdatasync", "rename")


class Zygote:
    """The test's handle of the zygote process. `modules` are imported before it forks."""

    def __init__(self, *modules: str) -> None:
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **alone},
        )

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()  # waits for the end of the process, and closes both pipes

    def live(self, script: Path, run: Path | str, output: Path, **wishes: Any) -> int:
        """Run `script RUN` once, and append its output; returns its exit code, or minus the signal.

        `arguments`: what follows `RUN`. `after_steps`, `at_operation`: where it is killed. `digest`: an expression over
        the script's names, whose value is hashed into the last line. `ranks`: the number of processes, started as
        torchrun would, each with an output of its own; only rank 0 is killed, and the other ranks end with it. Without
        it the script runs as one process of no job.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"script": str(script), "run": str(run), "output": str(output), **wishes}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def zygote_of(*modules: str) -> Any:
    """A pytest fixture: one zygote that has imported `modules`, shared by all tests of a file."""
    import pytest  # not in the zygote: a framework may behave differently where pytest is loaded

    @pytest.fixture(scope="module")
    def zygote() -> Iterator[Zygote]:
        with Zygote(*modules) as found:
            yield found

    return zygote


def kill_and_compare(
    zygote: Zygote, script: Path, folder: Path, digest: str, kills: int = 8, seed: int = 0, ranks: int = 0
) -> None:
    """Kill `script` `kills` times at random points, and compare its output with that of an uninterrupted run, bit
    for bit."""
    calm, restless = folder / "calm.txt", folder / "restless.txt"
    wishes = {"digest": digest, "ranks": ranks}
    assert zygote.live(script, folder / "calm", calm, **wishes) == 0, calm.read_text()
    chance, inside = random.Random(seed), 0
    for _ in range(kills):
        in_save = chance.random() < 0.5
        point = {"at_operation": chance.randint(1, 40)} if in_save else {"after_steps": chance.randint(1, 6)}
        ended = zygote.live(script, folder / "run", restless, **wishes, **point)
        assert ended == -signal.SIGKILL, restless.read_text()[-4000:]
        inside += in_save
    assert inside >= kills // 4
    assert zygote.live(script, folder / "run", restless, **wishes) == 0, restless.read_text()[-4000:]
    for rank in range(ranks or 1):
        expected, found = dict(_printed_values(_of_rank(calm, rank))), list(_printed_values(_of_rank(restless, rank)))
        differing = [
            f"{name}: {value}, expected {expected.get(name)}" for name, value in found if expected.get(name) != value
        ]
        assert not differing, "\n".join([*differing, _of_rank(restless, rank).read_text()[-8000:]])
        if rank == 0:
            assert dict(found) == expected


def _of_rank(output: Path, rank: int) -> Path:
    return output.with_name(f"{output.name}.{rank}") if rank else output


def _printed_values(output: Path) -> Iterator[tuple[str, str]]:
    """Yields ("step 7 loss", "0.25") for each line `step 7 loss 0.25`."""
    for line in output.read_text().splitlines():
        fields = line.split()
        if fields[:1] in (["step"], ["digest"]) and len(fields) >= 2:
            yield " ".join(fields[:-1]), fields[-1]


# ---- in the zygote, and in each run --------------------------------------------------------------------------


def main(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        port = _free_port()
        children = []
        for rank in range(request.get("ranks") or 1):
            if not (child := os.fork()):
                _live(_as_rank(request, rank, port))
            children.append(child)
        statuses = [os.waitpid(children[0], 0)[1]]
        for child in children[1:]:
            if statuses[0]:
                os.kill(child, signal.SIGKILL)
            statuses.append(os.waitpid(child, 0)[1])
        print(os.waitstatus_to_exitcode(next(filter(None, statuses), 0)), flush=True)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _as_rank(request: dict[str, Any], rank: int, port: int) -> dict[str, Any]:
    """Set the environment that torchrun sets; only rank 0 is killed."""
    if not (size := request.get("ranks")):
        return request
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    if not rank:
        return request
    kept = {name: value for name, value in request.items() if name not in ("after_steps", "at_operation")}
    return {**kept, "output": str(_of_rank(Path(request["output"]), rank))}


def _remove_cut_line(output: int) -> None:
    """Remove the part of a line that a killed run has left: what the next run prints would continue it."""
    text = os.pread(output, os.fstat(output).st_size, 0)
    os.ftruncate(output, text.rfind(b"\n") + 1)


def _live(request: dict[str, Any]) -> None:
    code = 1
    try:
        output = os.open(request["output"], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _remove_cut_line(output)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(os.path.dirname(request["output"]))
        if "after_steps" in request:
            _die_after(request["after_steps"])
        if "at_operation" in request:
            _die_at(request["at_operation"])
        sys.argv = [request["script"], request["run"], *request.get("arguments", [])]
        names = runpy.run_path(request["script"], run_name="__main__")
        if "digest" in request:
            whole = hashlib.blake2b(digest_size=16)
            _feed(eval(request["digest"], names), whole)
            print("digest", whole.hexdigest(), flush=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _die_after(steps: int) -> None:
    """Send SIGKILL to this process once this number of lines that begin with `step` has been printed."""
    write = sys.stdout.write

    def counting(text: str) -> int:
        nonlocal steps
        if text == "step":  # print writes its arguments one by one
            if steps == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            steps -= 1
        return write(text)

    sys.stdout.write = counting  # type: ignore[method-assign]


def _die_at(operations: int) -> None:
    """Send SIGKILL to this process in place of the nth call that writes, links or syncs."""
    remaining = operations

    def dying(call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in OPERATIONS:
        setattr(os, name, dying(getattr(os, name)))


def _feed(thing: Any, whole: Any) -> None:
    """Hash nested containers, tensors by their bytes, and everything else by its repr()."""
    import torch

    if isinstance(thing, torch.Tensor):
        whole.update(f"{thing.dtype} {tuple(thing.shape)}".encode())
        whole.update(thing.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(thing, dict):
        for key, value in thing.items():
            whole.update(repr(key).encode())
            _feed(value, whole)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            _feed(value, whole)
    else:
        whole.update(repr(thing).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
