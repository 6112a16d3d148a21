"""Signs that a host may fail: what is found in the texts of its parts, and what follows."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agents import until
from lastgood.errors import Refused
from lastgood.io.oom_kills import OomKills, oom_kills
from lastgood.policy.blame import Ended
from lastgood.policy.health import Finding, leaves
from lastgood.policy.recovery import PREEMPTED
from lastgood.supervisor import host_signs, reported
from lastgood.supervisor.arguments import parsed
from lastgood.supervisor.attempt import Lived
from lastgood.supervisor.host_signs import MOST_FINDINGS, Command, HealthFile, HostSigns, collectors
from lastgood.supervisor.sign_texts import key, of_file, of_kernel, of_nvidia, of_smart

XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=1234, name=python, text"
RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open("started", "w").close()
while True:
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("line", "fatal"),
    [
        (XID.format(79), [True]),
        (XID.format(92), [False]),
        (XID.format(31), []),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0", [True]),
        ("mce: [Hardware Error]: Machine check events logged", [False]),
        ("blk_update_request: I/O error, dev sda, sector 123456 op 0x0:(READ) flags 0x0", [False]),
        ("blk_update_request: I/O error, dev loop3, sector 0 op 0x0:(READ) flags 0x0", []),
        ("EXT4-fs (sda1): Remounting filesystem read-only", [True]),
        ("Out of memory: Killed process 4242 (python) total-vm:9000kB", [False]),
        ("Memory cgroup out of memory: Killed process 4242 (python) total-vm:9000kB", []),
        ("eth0: link becomes ready", []),
    ],
)
def test_messages_of_the_kernel_about_broken_parts_are_findings(line: str, fatal: list[bool]) -> None:
    assert [one.fatal for one in of_kernel(line)] == fatal


def test_what_nvidia_smi_and_smartctl_report_of_broken_devices_is_found() -> None:
    text = "0, 0, No, Not Active\n1, 2, Yes, Active\n2, [N/A], [N/A], Not Active\n"
    assert [(one.what.split(":")[0], one.fatal) for one in of_nvidia(text)] == [
        ("GPU 1", True),
        ("GPU 1", False),
        ("GPU 1", False),
    ]
    lost = "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system"
    assert [one.fatal for one in of_nvidia(lost)] == [True]
    assert of_nvidia('Field "x" is not a valid field to query.') == [] == of_nvidia("No devices were found")
    failing = '{"device": {"name": "/dev/sda"}, "smart_status": {"passed": false}}'
    assert [(one.what.split(":")[0], one.fatal) for one in of_smart(failing)] == [("/dev/sda", True)]
    assert of_smart(failing.replace("false", "true")) == [] == of_smart("Permission denied") == of_smart("{}")


def test_a_line_of_a_health_file_is_a_finding_and_a_warning_is_not_fatal() -> None:
    found = of_file("\n fan 3 stands still \nWarning: 85 C\n")
    assert [(one.what, one.fatal) for one in found] == [("fan 3 stands still", True), ("Warning: 85 C", False)]
    assert leaves(found, "leave") and not leaves(found, "report") and not leaves(found[1:], "leave")


def test_a_finding_with_another_time_or_process_is_reported_once(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "health"
    signs = HostSigns([HealthFile(str(file))], 30.0, "a")
    assert signs.poll(0.0) == []
    file.write_text("at 1701010101: fan 3 stands still")
    assert signs.poll(29.0) == [] and len(signs.poll(30.0)) == 1
    file.write_text("at 1701010131: fan 3 stands still")
    assert signs.poll(60.0) == []
    file.write_text("at 1701010131: fan 4 stands still")
    assert [one.host for one in signs.poll(90.0)] == ["a"]
    assert key(of_kernel(XID.format(79))[0]) != key(of_kernel(XID.format(48))[0])


def test_a_fatal_finding_counts_after_any_number_of_others(tmp_path: Path) -> None:
    """After a hundred corrected errors, each with a bank of its own, a device that fell off the bus was ignored."""
    signs, file = HostSigns([HealthFile(str(tmp_path / "health"))], 30.0, "a"), tmp_path / "health"
    warnings = "\n".join(f"warning: fan {fan} is slow" for fan in range(MOST_FINDINGS + 1))
    file.write_text(warnings)
    assert len(signs.poll(0.0)) == MOST_FINDINGS
    file.write_text(f"{warnings}\nfan 3 stands still")
    assert [(one.what, one.fatal) for one in signs.poll(30.0)] == [("fan 3 stands still", True)]
    assert signs.poll(60.0) == []


def test_a_health_file_that_cannot_be_read_is_reported_and_not_fatal(tmp_path: Path) -> None:
    assert [one.fatal for one in HealthFile(str(tmp_path)).collected(0.0)] == [False]


def test_a_health_file_whose_read_stands_still_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file on a network mount whose server was down kept the supervisor from watching the ranks."""
    monkeypatch.setattr(host_signs, "READ_SECONDS", 0.1)
    os.mkfifo(tmp_path / "health")
    file = HealthFile(str(tmp_path / "health"))
    assert file.collected(0.0) == []
    (found,) = file.collected(100.0)
    assert found.source == f"reading {tmp_path}/health" and "not answered" in found.what and not found.fatal
    (tmp_path / "health").write_text("fan 3 stands still")
    until(lambda: [one.what for one in file.collected(0.0)] == ["fan 3 stands still"])
    file.close()


def test_a_health_file_on_a_slow_mount_delays_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor waited three seconds for each reading, and passed a SIGTERM on after that: a rank that had
    received it at once took it for a second one, and ended before its last save."""
    waits, wait = list[float](), subprocess.Popen.wait

    def noted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waits.append(timeout or 0.0)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", noted)
    (tmp_path / "health").write_text("fan 3 stands still")
    file = HealthFile(str(tmp_path / "health"))
    until(lambda: file.collected(0.0))
    until(lambda: file.collected(0.0))
    assert waits[0] == host_signs.READ_SECONDS and max(waits[1:]) <= 0.2
    file.close()


def test_only_errors_since_the_supervisor_began_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error of a device that was counted long ago would have taken its node out of each new job."""
    tool, report, runs = (tmp_path / name for name in ("nvidia-smi", "report", "runs"))
    tool.write_text(f"#!/bin/sh\necho -n x >> {runs}\ncat {report}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = next(one for one in collectors(None) if isinstance(one, Command))
    found = list[Finding]()

    def ran_twice() -> bool:
        """Whether the tool has run twice, so that what it wrote first was collected."""
        found.extend(command.collected(0.0))
        return len(runs.read_text()) > 1 if runs.exists() else False

    report.write_text("0, 3, No, Not Active")
    until(ran_twice)
    assert found == []
    report.write_text("0, 4, No, Not Active")
    until(lambda: ran_twice() and bool(found))
    assert {one.what for one in found} == {"GPU 0: 4 ECC errors that were not corrected"}
    command.close()


def test_the_kernel_counts_whom_it_has_killed_for_memory(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    assert oom_kills(str(tmp_path)) is None
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 5\n")
    assert oom_kills(str(tmp_path)) == OomKills(5, "somewhere on this machine")
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/job/memory.events").write_text("oom 1\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(str(tmp_path)) == OomKills(2, "control group /job")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/hidden\n0::/job\n")
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory/memory.oom_control").write_text("under_oom 0\noom_kill 3\n")
    assert oom_kills(str(tmp_path)) == OomKills(3, "control group /")


def test_a_rank_that_was_killed_for_memory_is_reported_so() -> None:
    lived = Lived(0.0, ended=[Ended(1, 1.0, -9)], out_of_memory={1: "control group /job"})
    found = reported.cause(lived)
    assert found is not None and found.what == "SIGKILL: the kernel killed it for memory (control group /job)"
    assert found.key == "signal SIGKILL: the kernel killed it for memory"


@pytest.mark.parametrize(
    "options",
    [["--health-seconds", "0"], ["--health-file", "nowhere/health"], ["--health-file", "."], ["--unhealthy", "go"]],
)
def test_options_about_health_that_cannot_be_meant_are_refused(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "rank.py").touch()
    with pytest.raises(Refused):
        parsed(["--unhealthy", "leave", *options, str(tmp_path / "rank.py")], {})


@pytest.mark.slow
def test_a_node_that_is_about_to_fail_saves_and_ends_before_it_does(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    options = [
        "--spawn",
        "--unhealthy",
        "leave",
        "--health-file",
        "health",
        "--health-seconds",
        "0.1",
        "--records",
        "log",
    ]
    command = [str(Path(sys.executable).with_name("lastgood")), "run", *options, "rank.py"]
    started = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "started").exists())
    (tmp_path / "health").write_text("fan 3 stands still\n")
    reports = started.communicate(timeout=60)[1]
    assert started.returncode == PREEMPTED
    assert reports.count("health file: fan 3 stands still") == 1
    assert "fan 3 stands still" in (tmp_path / "log/supervisor.json").read_text()
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert again.returncode == PREEMPTED and "no rank was started" in again.stderr
