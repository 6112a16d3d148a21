"""`lastgood run`: real ranks that are killed, fail and are asked to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import lastgood
from agents import until
from lastgood.cli import app
from lastgood.errors import Refused
from lastgood.format import commit
from lastgood.policy.recovery import GAVE_UP, PREEMPTED
from lastgood.run import access, advice
from lastgood.run.content import Content
from lastgood.supervisor import attempt_log
from several import FORKED

pytestmark = pytest.mark.slow

SUPERVISOR = [str(Path(sys.executable).with_name("lastgood")), "run"]
STARTS = pytest.mark.parametrize("start", [[*SUPERVISOR, "--spawn"], FORKED], ids=["new process", "forked"])
"""ways in which ranks without torch are started"""

TRAINING = """
import os, signal, sys, time
import numpy, torch, torch.distributed as dist
import lastgood

run, last, troubles = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
numpy.random.seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
with lastgood.Checkpointer(run, state, cadence=lastgood.Every(steps=5), preemption=lastgood.Preemption()) as ckpt:
    for n in range(ckpt.restore().step + 1, last + 1):
        if f"kill:{attempt}:{rank}:{n}" in troubles:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"stop:{attempt}:{rank}:{n}" in troubles:
            os.kill(os.getpid(), signal.SIGSTOP)
        if f"hang:{attempt}:{rank}:{n}" in troubles:
            time.sleep(1000)
        if f"evaluate:{attempt}:{rank}:{n}" in troubles:
            with ckpt.phase("eval"):
                time.sleep(6)
        if f"raise:{attempt}:{rank}:{n}" in troubles:
            raise ValueError(f"batch {n} is bad")
        if f"wait:{attempt}:{rank}:{n}" in troubles:
            open(run + ".waits", "w").close()
            time.sleep(0.5)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * n + rank)
        model(torch.randn(2, 4, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        save = ckpt.step(n)
        if save is not None:
            save.committed()
"""


@pytest.fixture
def training(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return str(path)


def supervised(*arguments: object, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SUPERVISOR, *map(str, arguments)], capture_output=True, text=True, **settings)  # type: ignore[call-overload,no-any-return]


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def digests(run: Path) -> dict[str, str]:
    """The content digest of each tensor of the newest generation."""
    tier = access.for_reading(run)
    content = Content(tier, max(commit.survey(tier).generations.values(), key=lambda one: one.step))
    return {name: content.digest(name) for name in content.tensors()}


def test_a_job_goes_on_exactly_after_a_killed_rank_and_an_exception(tmp_path: Path, training: str) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert supervised("--nproc-per-node", 2, training, whole, 20).returncode == 0
    found = supervised("--nproc-per-node", 2, training, run, 20, "kill:0:1:8", "raise:1:0:13")
    assert found.returncode == 0, found.stderr
    first, second, third = attempt_log.read(access.for_reading(run))
    assert first.cause is not None and (first.cause.rank, first.cause.what) == (1, "SIGKILL")
    assert (first.restored_step, first.last_step, second.restored_step) == (0, 7, 5)
    assert second.replayed_steps == 2
    assert second.cause is not None and (second.cause.rank, second.cause.what) == (0, "ValueError: batch 13 is bad")
    assert "train.py" in second.cause.stack and "runpy" not in second.cause.stack
    assert third.cause is None and (third.restored_step, third.last_step) == (10, 20)
    assert "rank 1 failed first: SIGKILL, at step 7" in found.stderr
    assert digests(run) == digests(whole)


def test_a_rank_that_hangs_is_named_and_the_job_goes_on(tmp_path: Path, training: str) -> None:
    run = tmp_path / "run"
    done = supervised("--nproc-per-node", 2, "--hang-timeout", 3, training, run, 15, "stop:0:1:8", "hang:1:1:12")
    assert done.returncode == 0, done.stderr
    stopped, hung, last = attempt_log.read(access.for_reading(run))
    for one, step, where in ((stopped, 7, "is stopped by a signal"), (hung, 11, "train.py")):
        assert one.cause is not None and (one.cause.kind, one.cause.rank) == ("hang", 1)
        assert f"in the step after step {step}" in one.cause.what and where in one.cause.what
        assert "backward" in one.cause.stacks["0"], "the other rank waits for it"
    assert (hung.restored_step, last.restored_step, last.last_step) == (5, 10, 15)


def test_the_rank_that_others_have_waited_for_is_named_and_not_those(tmp_path: Path) -> None:
    """A rank that never joins, or never comes to a collective, made all others fail: one of them was named."""
    path = script(
        tmp_path,
        """
        import datetime, os, time, torch, torch.distributed as dist
        rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if (rank, attempt) == (2, 0):
            time.sleep(1000)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
        if (rank, attempt) == (1, 1):
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))
        """,
    )
    done = supervised("--nproc-per-node", 3, path)
    assert done.returncode == 0, done.stderr
    report = [line for line in done.stderr.splitlines() if line.startswith("lastgood: attempt")]
    assert "attempt 1: rank 2 hangs" in report[0] and "attempt 2: rank 1 hangs" in report[1], report


def test_a_rank_that_is_stopped_before_it_opens_its_run_hangs(tmp_path: Path) -> None:
    """The campaign of faults stopped rank 0 while a group was made. The others waited for its store, which counts
    torch's timeouts, and the job stood still for ever."""
    path = script(
        tmp_path,
        """
        import os, signal, torch.distributed as dist
        rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if (rank, attempt) == (0, 0):
            store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.init_process_group("gloo")
        """,
    )
    done = supervised("--nproc-per-node", 2, "--hang-timeout", 1, path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "attempt 1: rank 0 hangs before its state was restored: it is stopped by a signal" in done.stderr


def test_a_rank_that_is_stopped_in_a_phase_hangs_as_soon_as_in_a_step(tmp_path: Path) -> None:
    """The first phase of a name has an hour, and the others named one another when they could not reach its store."""
    path = script(
        tmp_path,
        """
        import os, signal, sys, torch, lastgood
        with lastgood.Checkpointer(sys.argv[1], {"model": torch.nn.Linear(1, 1)}) as ckpt:
            ckpt.restore()
            with ckpt.phase("eval"):
                if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    os.kill(os.getpid(), signal.SIGSTOP)
        """,
    )
    done = supervised("--hang-timeout", 1, path, tmp_path / "run", timeout=120)
    assert done.returncode == 0, done.stderr
    assert 'attempt 1: rank 0 hangs in the phase "eval" after step 0' in done.stderr
    assert "it is stopped by a signal" in done.stderr


def test_an_evaluation_that_is_named_is_no_hang(tmp_path: Path, training: str) -> None:
    run = tmp_path / "run"
    done = supervised("--nproc-per-node", 2, "--hang-timeout", 3, training, run, 12, "evaluate:0:0:8", "evaluate:0:1:8")
    assert done.returncode == 0, done.stderr
    assert [one.cause for one in attempt_log.read(access.for_reading(run))] == [None]


POISON = """
import sys
import torch, torch.distributed as dist
import lastgood

run, last, poison = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, at):
        if at == poison:
            raise ValueError(f"sample {at} cannot be decoded")
        return torch.full((4,), float(at)), at

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
sampler = lastgood.ResumableSampler(160, global_batch=8, seed=3, rank=rank, world_size=size)
state = {"model": model, "optimizer": optimizer, "sampler": sampler, "audit": lastgood.Audit()}
with lastgood.Checkpointer(run, state, cadence=lastgood.Every(steps=3)) as ckpt:
    n = ckpt.restore().step
    while n < last:
        for x, ids in sampler.loader(Data()):
            state["audit"].observe(*sampler.position, ids)
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            n += 1
            save = ckpt.step(n)
            if save is not None:
                save.committed()
            if n == last:
                break
    audits = [None] * size
    dist.all_gather_object(audits, state["audit"])
    if rank == 0:
        report = lastgood.Audit.merge(audits).report(sampler)
        print("audit", report.exact, report.scheduled, len(report.skipped), poison in report.skipped, flush=True)
"""


def test_a_batch_that_fails_each_time_is_left_out_and_the_audit_balances(tmp_path: Path) -> None:
    run, path = tmp_path / "run", script(tmp_path, POISON)
    done = supervised("--nproc-per-node", 2, path, run, 20, 10)
    assert done.returncode == 0 and "audit True 160 8 True" in done.stdout, done.stderr
    tier = access.for_reading(run)
    acts = [one.answer.partition(":")[0] for one in attempt_log.read(tier)]
    assert acts == ["restart", "restart", "back", "skip", "end"]
    back, skip = advice.read(tier)
    assert back.suspect is not None and back.suspect.step == 6 and "sample 10 cannot be decoded" in back.why
    assert skip.skip is not None and (skip.skip.epoch, skip.skip.first, skip.skip.count) == (0, 8, 1)
    assert "from step 3, stepping over" in done.stderr, "the suspect generation was not restored again"


def test_a_typo_in_the_script_costs_no_samples_and_no_generation(tmp_path: Path) -> None:
    """It fails in the first step after each restore. That left out the batches of the step for good, and marked the
    newest generation as suspect, so that the mended script went on from an older one."""
    run, mended = tmp_path / "run", script(tmp_path, POISON)
    assert supervised(mended, run, 12, -1).returncode == 0
    typo = tmp_path / "typo.py"
    typo.write_text(POISON.replace("optimizer.zero_grad()", "optimizer.zero_gard()"))
    done = supervised(typo, run, 20, -1)
    assert done.returncode == GAVE_UP and "failed before a step was completed" in done.stderr, done.stderr
    acts = [one.answer.partition(":")[0] for one in attempt_log.read(access.for_reading(run))]
    assert acts == ["end", "restart", "restart", "back", "end"]
    done = supervised(mended, run, 20, -1)
    assert done.returncode == 0 and "audit True 160 0 False" in done.stdout, done.stderr
    assert attempt_log.read(access.for_reading(run))[-1].restored_step == 12


def test_a_job_whose_run_is_taken_away_does_not_begin_anew(tmp_path: Path, training: str) -> None:
    """The directory was moved, or its disk unmounted, and then a rank died: the job began a new run at step 0 in its
    place, and ended with 0."""
    run, away = tmp_path / "run", tmp_path / "away"
    path = script(tmp_path, TRAINING.replace("raise ValueError", f"os.rename(run, {str(away)!r}); raise ValueError"))
    done = supervised("--nproc-per-node", 1, path, run, 20, "raise:0:0:13")
    assert done.returncode == GAVE_UP and "the run is not in its place any more" in done.stderr, done.stderr
    assert f"saved or restored is 10. {run} is not in its place" in done.stderr and not run.exists()
    assert lastgood.open(away).generation().step == 10


def test_a_job_in_slots_of_several_ranks_goes_on(tmp_path: Path, training: str, capsys) -> None:
    """It was given up at its first failure, as one whose run is not in its place any more: the path of the run holds
    the slots of each rank, and is no run by itself."""
    run = f"slots://{tmp_path}/run"
    done = supervised("--nproc-per-node", 2, training, run, 20, "raise:0:0:13")
    assert done.returncode == 0, done.stderr
    assert app.main(["attempts", "--json", run]) == 0
    first, second = json.loads(capsys.readouterr().out)["attempts"]
    assert (first["saved_step"], second["restored_step"], second["last_step"]) == (10, 10, 20)


def test_a_run_without_a_good_generation_ends_with_one_report(tmp_path: Path, training: str) -> None:
    run, model = tmp_path / "run", torch.nn.Linear(4, 4)
    lastgood.save(run, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, step=5)
    files = [*run.glob("gen/*/*.safetensors")]
    for one in files:
        one.write_bytes(b"damaged")
    done = supervised("--nproc-per-node", 2, training, run, 12)
    assert done.returncode == GAVE_UP and done.stderr.count("lastgood: attempt") == 1
    assert "end: it would fail in the same way again" in done.stderr and all(one.exists() for one in files)
    assert f"it has restored no step. Every good save of {run} is still there" in done.stderr


def test_a_signal_ends_the_job_with_a_last_save(tmp_path: Path, training: str) -> None:
    run = tmp_path / "run"
    command = [*SUPERVISOR, "--nproc-per-node", "2", training, str(run), "100000", "wait:0:0:3"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        until((tmp_path / "run.waits").exists)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == PREEMPTED
    (only,) = attempt_log.read(access.for_reading(run))
    assert only.cause is None and only.answer == "end: the job was asked to end"


@STARTS
def test_the_text_of_an_exit_is_the_cause(tmp_path: Path, start: list[str]) -> None:
    """Of `raise SystemExit("text")` the report had the exit code only, and an exception without a text left a colon."""

    def found_by(text: str) -> str:
        command = [*start, "--max-restarts", "0", script(tmp_path, text)]
        return subprocess.run(command, capture_output=True, text=True).stderr

    report = found_by("import sys; sys.exit('the file of the vocabulary is missing')")
    assert "rank 0 failed first: SystemExit: the file of the vocabulary is missing, before a state" in report
    assert "\nthe file of the vocabulary is missing\n" in f"\n{report}", "Python prints it as ever"
    report = found_by("raise KeyboardInterrupt")
    assert "rank 0 failed first: KeyboardInterrupt, before a state was restored" in report
    assert "rank 0 failed first: exit code 7, before a state was restored" in found_by("raise SystemExit(7)")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_requested_end_names_no_rank_as_failed(tmp_path: Path, number: int) -> None:
    """SIGTERM to the job was reported as: rank 1 failed first: SIGTERM; SIGINT as: KeyboardInterrupt: , at step 96."""
    name = script(tmp_path, "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(600)")
    command = [*SUPERVISOR, "--spawn", name, str(tmp_path / "started")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        until((tmp_path / "started").exists)
        job.send_signal(number)
        errors = job.communicate(timeout=60)[1]
    assert job.returncode == 128 + number and "failed first" not in errors


@STARTS
def test_no_rank_outlives_a_killed_supervisor(tmp_path: Path, start: list[str]) -> None:
    name = script(
        tmp_path,
        "import os, time, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(600)",
    )
    job = subprocess.Popen([*start, "--nproc-per-node", "2", name, str(tmp_path / "pid")])
    pids = [tmp_path / "pid0", tmp_path / "pid1"]
    until(lambda: all(one.exists() and one.read_text() for one in pids))
    job.kill()
    job.wait()
    until(lambda: not any(os.path.exists(f"/proc/{one.read_text()}") for one in pids))


@STARTS
def test_a_script_that_fails_at_import_is_given_up_with_one_report(tmp_path: Path, start: list[str]) -> None:
    """It was tried three times, with pauses, although it could not get better."""
    found = subprocess.run([*start, script(tmp_path, "import no_such_module")], capture_output=True, text=True)
    assert found.returncode == GAVE_UP
    assert found.stderr.count("lastgood: attempt") == 1
    assert "given up. No run of lastgood was opened. Mend what the error says" in found.stderr
    assert "ModuleNotFoundError: No module named 'no_such_module', before a state was restored" in found.stderr
    assert "runpy" not in found.stderr, "frames that the user did not write are left out"


def test_a_module_that_cannot_be_imported_before_the_fork_is_refused(tmp_path: Path) -> None:
    command = [*FORKED, "--preload", "no_such_module", script(tmp_path, "print('started')")]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == Refused.exit_code and "no_such_module cannot be imported" in found.stderr
    assert "started" not in found.stdout


def test_a_rank_that_ignores_the_signal_is_ended_and_the_job_is_no_success(tmp_path: Path) -> None:
    """The code was 0: ranks that the supervisor had killed did not count."""
    text = f"""
        import os, signal, time
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        open({str(tmp_path)!r} + "/ready" + os.environ["RANK"], "w").close()
        time.sleep(600)
    """
    options = ["--spawn", "--nproc-per-node", "2", "--shutdown-timeout", "0.5"]
    with subprocess.Popen([*SUPERVISOR, *options, script(tmp_path, text)]) as job:
        until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 128 + signal.SIGTERM


def test_a_scheduler_that_announces_the_end_reaches_the_ranks(tmp_path: Path) -> None:
    """SIGUSR1 ended the supervisor, and with it the ranks within their last save."""
    text = f"""
        import os, signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit({PREEMPTED}))
        open({str(tmp_path)!r} + "/ready", "w").close()
        time.sleep(600)
    """
    with subprocess.Popen([*SUPERVISOR, "--spawn", script(tmp_path, text)]) as job:
        until((tmp_path / "ready").exists)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == PREEMPTED


def test_a_scheduler_that_announces_the_end_ends_no_rank_that_starts(tmp_path: Path) -> None:
    """A rank that was still importing ended by SIGUSR1. It was started again, trained on, and the warning was lost."""
    text = f"""
        import os, signal, sys, time
        at = {str(tmp_path)!r}
        open(at + "/begun" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w").close()
        while not os.path.exists(at + "/go"):
            time.sleep(0.01)
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit({PREEMPTED}))
        time.sleep(600)
    """
    with subprocess.Popen([*SUPERVISOR, "--spawn", script(tmp_path, text)]) as job:
        until((tmp_path / "begun0").exists)
        job.send_signal(signal.SIGUSR1)
        (tmp_path / "go").touch()
        assert job.wait(60) == PREEMPTED
    assert not (tmp_path / "begun1").exists()


def test_a_rank_that_has_its_handler_later_is_warned_too(tmp_path: Path) -> None:
    """SIGUSR1 that came while one of two ranks was still importing reached the other one only."""
    text = f"""
        import os, signal, sys, time
        at, rank = {str(tmp_path)!r}, os.environ["RANK"]

        def warned(*_):
            open(at + "/warned" + rank, "w").close()
            sys.exit({PREEMPTED})

        open(at + "/begun" + rank, "w").close()
        while rank == "1" and not os.path.exists(at + "/warned0"):
            time.sleep(0.01)
        signal.signal(signal.SIGUSR1, warned)
        open(at + "/ready" + rank, "w").close()
        time.sleep(600)
    """
    with subprocess.Popen([*SUPERVISOR, "--spawn", "--nproc-per-node", "2", script(tmp_path, text)]) as job:
        until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "begun1").exists())
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == PREEMPTED
    assert (tmp_path / "warned1").exists()


def test_a_command_ends_with_its_supervisor_too(tmp_path: Path) -> None:
    command = [
        "--no-python",
        "sh",
        "-c",
        f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 600",
    ]
    job = subprocess.Popen([*SUPERVISOR, *command])
    until((tmp_path / "pid").exists)
    job.kill()
    job.wait()
    until(lambda: not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text().strip()}"))


@pytest.mark.parametrize("option", ["--spawn", "--preload=json"])
def test_a_script_finds_what_it_finds_under_torchrun(tmp_path: Path, option: str) -> None:
    """Modules beside a script that is a link, its path after a change of folder, output that a killed rank has printed,
    bytes in the environment and in an argument that are no text, and one thread where several ranks share the
    processors. With such an argument, --spawn and --records ended with a UnicodeEncodeError of the supervisor."""
    real, work = tmp_path / "real", tmp_path / "work"
    real.mkdir()
    work.mkdir()
    (real / "beside.py").write_text("HERE = True")
    (work / "token.py").write_text("raise ImportError('not the token of the standard library')")
    text = """
        import os, signal, sys, time, torch, beside
        import token
        os.chdir("/")
        def annotated(x: int): pass
        assert annotated.__annotations__["x"] is int, "no future statement of ours"
        assert os.path.exists(__file__) and sys.argv == ["train.py", "\\udcff"]
        print(f"threads {torch.get_num_threads()} {os.environb[b'ODD']}")  # in one write: both ranks print
        if os.environ["RANK"] == "0":
            while not os.path.exists(os.environ["PRINTED"]):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        open(os.environ["PRINTED"], "w").close()
        time.sleep(600)
    """
    os.symlink(script(real, text), work / "train.py")
    arguments = ["--nproc-per-node", "2", "--max-restarts", "0", option, "--log-dir", "logs"]
    arguments += ["--records", "records", "train.py", b"\xff"]
    environment = {key: value for key, value in os.environb.items() if key != b"OMP_NUM_THREADS"}
    environment |= {b"ODD": b"\xff", b"PRINTED": os.fsencode(tmp_path / "printed")}
    found = subprocess.run([*SUPERVISOR, *arguments], cwd=work, env=environment, capture_output=True, text=True)
    assert found.returncode == GAVE_UP and "rank 0 failed first: SIGKILL" in found.stderr, found.stderr
    assert found.stdout.count("threads 1 b'\\xff'") == 2
    summary = json.loads((work / "records" / "supervisor.json").read_text())
    assert summary["attempts"][0]["command"][-1] == "\\udcff"


def test_what_a_rank_has_started_ends_with_its_attempt(tmp_path: Path) -> None:
    text = f"""
        import subprocess, sys
        child = subprocess.Popen(["sleep", "600"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        sys.exit(3)
    """
    assert supervised("--spawn", "--max-restarts", 0, script(tmp_path, text)).returncode == GAVE_UP
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text()}")


def test_ranks_have_torchruns_environment_and_a_new_port_each_attempt(tmp_path: Path) -> None:
    """All ranks of a node drew the same numbers from torch's generator, and again in each attempt. They did not have
    the variable with the signals of torchrun's option."""
    signals = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", signals]
    text = f"""
        import json, os, random, sys
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        import numpy, torch
        drawn = [random.random(), numpy.random.rand(), torch.rand(()).item()]
        seen = {{name: os.environ[name] for name in {names!r}}} | {{"drawn": drawn}}
        json.dump(seen, open({str(tmp_path)!r} + f"/seen{{attempt}}{{rank}}", "w"))
        sys.exit(attempt == "0")
    """
    options = ["--nproc-per-node", 2, "--rdzv-id", "job7", "--signals-to-handle", "SIGTERM,SIGUSR1"]
    found = supervised(*options, script(tmp_path, text))
    assert found.returncode == 0, found.stderr
    seen = {(a, rank): json.loads((tmp_path / f"seen{a}{rank}").read_text()) for a in "01" for rank in "01"}
    assert seen["0", "1"]["RANK"] == seen["0", "1"]["LOCAL_RANK"] == "1" and seen["0", "1"]["WORLD_SIZE"] == "2"
    assert seen["0", "0"]["TORCHELASTIC_RUN_ID"] == "job7" and seen["1", "1"][signals] == "SIGTERM,SIGUSR1"
    assert seen["0", "0"]["MASTER_PORT"] == seen["0", "1"]["MASTER_PORT"] != seen["1", "0"]["MASTER_PORT"]
    assert len({number for one in seen.values() for number in one["drawn"]}) == 12, "a fork draws numbers of its own"


@pytest.mark.long
def test_the_example_heals_itself_and_ends_with_the_same_losses() -> None:
    example = Path(__file__).resolve().parents[2] / "examples/self_healing.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("SIGKILL", "training has diverged", "rank 1 hangs", "the damaged one is among them"):
        assert part in done.stdout
    assert "the losses and samples are the same, bit for bit" in done.stdout
