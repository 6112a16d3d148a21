"""The batch scripts of docs/manifests: shown by the pages, and run with stand-ins for the commands of Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import until
from lastgood.errors import NotARun, Refused
from lastgood.policy.recovery import GAVE_UP, PREEMPTED
from lastgood.supervisor.arguments import Job, parsed

DOCS = Path(__file__).resolve().parents[2] / "docs"
SUPERVISED, AGENT = DOCS / "manifests/supervised.sbatch", DOCS / "manifests/agent.sbatch"
KILLED, TERMINATED = 137, 143
COMMANDS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'if [[ $1 == show ]]; then echo node-a; echo node-b; else echo "scontrol $*" >> "$NOTES"; fi',
    "lastgood": """echo "$*" >> "$NOTES"
case "$1 $2" in
"agent stop") exit "$STOPS" ;;
run*) code=$(head -1 "$NOTES.codes"); sed -i 1d "$NOTES.codes"; exit "$code" ;;
esac""",
}


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the commands note their arguments."""
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    job = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]"}
    for name, value in {**job, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "notes"


def played(script: Path, notes: Path, *codes: int, stops: int = 0) -> tuple[int, list[str]]:
    """Run a script; its exit code, and what its commands were called with.

    `codes`: how `lastgood run` ends, one start after another. `stops`: how `lastgood agent stop` ends.
    """
    notes.with_name("notes.codes").write_text("".join(f"{code}\n" for code in codes))
    ended = subprocess.run(["bash", script], env={**os.environ, "STOPS": str(stops)}, timeout=60)
    return ended.returncode, notes.read_text().splitlines()


def started(command: str) -> Job:
    """The arguments of a `lastgood run`, as it takes them."""
    program, *arguments = command.split()
    assert program == "run"
    return parsed(arguments, {})


@pytest.mark.parametrize("script", [SUPERVISED, AGENT], ids=["one node", "agents"])
@pytest.mark.parametrize("code", [0, Refused.exit_code, GAVE_UP, PREEMPTED, TERMINATED])
def test_only_a_job_that_was_asked_to_end_is_put_back(scripts: Path, script: Path, code: int) -> None:
    """A job that was preempted while its ranks started ended with 143, and was not put back into the queue."""
    ended, noted = played(script, scripts, code)
    assert ended == code
    assert (noted[-1] == "scontrol requeue 17") is (code in (PREEMPTED, TERMINATED))
    assert len([one for one in noted if one.startswith("run ")]) == 1


@pytest.mark.parametrize("script", [SUPERVISED, AGENT], ids=["one node", "agents"])
def test_slurm_gives_the_ranks_the_time_to_save(scripts: Path, script: Path) -> None:
    """The script left --shutdown-timeout at 30 s, so ranks with a grace period of 90 s were killed in their last save.
    And it sent SIGTERM to srun, which kills its step for that: the steps get it from Slurm (`--signal` without B)."""
    (command,) = [one for one in played(script, scripts, 0)[1] if one.startswith("run ")]
    job = started(command)
    assert job.program.arguments == ["--run", "/scratch/gpt"]
    (signalled,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", script.read_text(), re.MULTILINE)
    (grace,) = set(re.findall(r"Preemption\(grace_seconds=(\d+)\)", (DOCS / "slurm.md").read_text()))
    assert int(grace) < job.shutdown_seconds < int(signalled)


def test_the_agent_outlives_a_training_step_that_was_killed(scripts: Path) -> None:
    """The step is started again beside the same agent, and at the end memory is copied and removed."""
    code, noted = played(AGENT, scripts, KILLED, PREEMPTED)
    starts = [started(one) for one in noted if one.startswith("run ")]
    assert (code, len(starts)) == (PREEMPTED, 2)
    assert {one.rendezvous.settings.endpoint for one in starts if one.rendezvous} == {"node-a:29400"}
    assert [one for one in noted if not one.startswith("run ")] == [
        "agent run /scratch/gpt",
        "agent stop /scratch/gpt",
        "scontrol requeue 17",
    ]


def test_memory_is_copied_although_the_agent_was_asked_to_end_too(scripts: Path) -> None:
    """Slurm sends SIGTERM to every step. The agent ends then and keeps the memory, which nobody would have removed."""
    _, noted = played(AGENT, scripts, PREEMPTED, stops=NotARun.exit_code)
    assert noted[-3:] == ["agent stop /scratch/gpt", "agent run --linger 0 /scratch/gpt", "scontrol requeue 17"]


@pytest.mark.parametrize(("script", "page"), [(SUPERVISED, "slurm.md"), (AGENT, "agent.md")])
def test_a_page_shows_each_batch_script_as_it_is(script: Path, page: str) -> None:
    assert re.findall(r"```bash\n(.*?)```", (DOCS / page).read_text(), re.DOTALL) == [script.read_text()]


CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge.sock,cred_expire=5
StateSaveLocation={at}
SlurmdSpoolDir={at}/spool
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
KillWait=1
MpiDefault=none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""
DAEMONS = (
    "munged --foreground --force --socket={at}/munge.sock --key-file={at}/key --pid-file={at}/munged.pid "
    "--log-file={at}/munged.log --seed-file={at}/seed",
    "slurmctld -D -c -f {at}/slurm.conf",
    "slurmd -D -f {at}/slurm.conf -N {host}",
)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Slurm of one node, this machine, whose daemons end with the test; its folder."""
    if os.geteuid() != 0 or not all(shutil.which(one.split()[0]) for one in DAEMONS):
        pytest.skip("needs root and the Debian packages slurmctld, slurmd, slurm-client and munge")
    host = socket.gethostname()
    with tempfile.TemporaryDirectory(prefix="slurm-") as at, contextlib.ExitStack() as daemons:
        ports = []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as free:
                ports.append(free.getsockname()[1])
        Path(at, "slurm.conf").write_text(CONFIGURATION.format(host=host, at=at, ports=ports))
        Path(at, "key").write_bytes(os.urandom(1024))
        Path(at, "key").chmod(0o600)
        monkeypatch.setenv("SLURM_CONF", f"{at}/slurm.conf")
        with open(f"{at}/log", "wb") as log:
            for one in DAEMONS:
                command = one.format(at=at, host=host).split()
                daemon = daemons.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
                daemons.callback(daemon.terminate)
        until(lambda: b"idle" in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True).stdout)
        yield Path(at)


@pytest.mark.root
@pytest.mark.long
def test_slurm_starts_a_job_again_that_has_saved(slurm: Path) -> None:
    """A real Slurm: SIGTERM reaches the step, its 75 the script, and the same job is started a second time."""
    notes, command = slurm / "notes", slurm / "lastgood"
    lines = f"trap 'kill $!; exit {PREEMPTED}' TERM", f"echo $SLURM_RESTART_COUNT. >> {notes}", "sleep 60 & wait"
    command.write_text("\n".join(("#!/bin/bash", *lines, "")))
    command.chmod(0o755)
    script = SUPERVISED.read_text().replace(" --gpus-per-node=8", "")
    environment = {**os.environ, "PATH": f"{slurm}:{os.environ['PATH']}"}
    subprocess.run(["sbatch", "-o", slurm / "out"], input=script.encode(), env=environment, check=True)

    def noted() -> str:
        return notes.read_text() if notes.exists() else ""

    until(lambda: noted() == ".\n")
    subprocess.run(["scancel", "--signal=TERM", "1"], check=True)
    until(lambda: noted() == ".\n1.\n")
    subprocess.run(["scancel", "1"], check=True)
    until(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, check=True).stdout)
