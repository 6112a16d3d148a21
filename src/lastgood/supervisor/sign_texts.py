"""What the kernel, nvidia-smi, smartctl and a fleet's own tool write <-> findings about a host. Pure.

Each function takes a text as it was written, and finds nothing in one that it does not understand.
"""

from __future__ import annotations

import re

import msgspec

from ..policy.health import Finding

KERNEL, NVIDIA, SMART, FILE = "kernel log", "nvidia-smi", "smartctl", "health file"
"""sources of findings"""
TEXT_CHARACTERS = 300
"""of a finding; longer texts are cut off"""
_XID = re.compile(r"NVRM: Xid \(.*?\): (\d+),")
_XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45})
"""errors of a program on the device, and what follows from its end"""
_FATAL_XIDS = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140})
"""memory that cannot be corrected or replaced, a broken NVLink, a device that does not answer"""
_FATAL = re.compile(
    r"Memory failure: 0x|EDAC .*\bUE\b|[Uu]ncorrected (hardware )?(memory )?error|Machine Check Exception|"
    r"Fatal [Mm]achine check|nvme\d+: (controller is down|Device not ready)|Remounting filesystem read-only"
)
_NOT_FATAL = re.compile(
    r"\[Hardware Error\]|^Out of memory: Killed process|I/O error, dev (?!loop|fd|sr)|EXT4-fs error|XFS .*[Cc]orruption"
)
NVIDIA_QUERY = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "clocks_throttle_reasons.hw_thermal_slowdown",
)
"""what is asked of nvidia-smi, in this order"""
_LOST_DEVICE = re.compile(r"GPU is lost|Unable to determine the device handle")


def of_kernel(line: str) -> list[Finding]:
    """The finding in one message of the kernel, if there is one."""
    if xid := _XID.search(line):
        number = int(xid[1])
        return [] if number in _XIDS_OF_PROGRAMS else [_finding(KERNEL, line, number in _FATAL_XIDS)]
    if _FATAL.search(line):
        return [_finding(KERNEL, line, True)]
    return [_finding(KERNEL, line, False)] if _NOT_FATAL.search(line) else []


def of_nvidia(text: str) -> list[Finding]:
    """The findings in what nvidia-smi writes for NVIDIA_QUERY, without header and units."""
    found = list[Finding]()
    for line in text.splitlines():
        if _LOST_DEVICE.search(line):
            found.append(_finding(NVIDIA, line, True))
        fields = [one.strip() for one in line.split(",")]
        if len(fields) != len(NVIDIA_QUERY) or not fields[0].isdecimal():
            continue
        gpu, errors, pending, hot = fields
        if errors.isdecimal() and int(errors):
            found.append(_finding(NVIDIA, f"GPU {gpu}: {errors} ECC errors that were not corrected", True))
        if pending == "Yes":
            found.append(_finding(NVIDIA, f"GPU {gpu}: pages of its memory wait to be retired", False))
        if hot == "Active":
            found.append(_finding(NVIDIA, f"GPU {gpu}: slowed down because it is too hot", False))
    return found


class _SmartStatus(msgspec.Struct):
    passed: bool = True


class _SmartDevice(msgspec.Struct):
    name: str = ""


class _Smart(msgspec.Struct):
    device: _SmartDevice = msgspec.field(default_factory=_SmartDevice)
    smart_status: _SmartStatus = msgspec.field(default_factory=_SmartStatus)


def of_smart(text: str) -> list[Finding]:
    """The finding in what `smartctl --json --health` writes about one device, if there is one."""
    try:
        found = msgspec.json.decode(text, type=_Smart)
    except msgspec.MsgspecError:
        return []
    if found.smart_status.passed:
        return []
    return [_finding(SMART, f"{found.device.name}: the device expects to fail", True)]


def of_file(text: str) -> list[Finding]:
    """The findings in a health file: a line each. One that begins with `warning:` is not fatal."""
    lines = [line.strip() for line in text.splitlines()]
    return [_finding(FILE, line, not line.lower().startswith("warning:")) for line in lines if line]


def key(one: Finding) -> str:
    """A text that is equal for findings that are reported once: long numbers are times, addresses or processes."""
    return f"{one.source} {one.fatal} " + re.sub(r"0x[0-9a-fA-F]+|\d{4,}", "", one.what)


def _finding(source: str, what: str, fatal: bool) -> Finding:
    printable = "".join(one if one.isprintable() else " " for one in what.strip())
    return Finding(source=source, what=printable[:TEXT_CHARACTERS], fatal=fatal)
