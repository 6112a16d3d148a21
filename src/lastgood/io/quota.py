"""Disk quotas of this user and group, read from the kernel, because `statvfs` considers project quotas only.

quotactl_fd(2) takes a file descriptor, so that the block device need not be found, which a container may lack. It needs
Linux 5.14 or later. The server of a network file system keeps its quotas to itself; they are not considered here.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Callable

QUOTACTL_FD = 443
"""number of the system call on x86, Arm, POWER, RISC-V and s390"""
USER, GROUP = 0, 1
GETQUOTA = 0x800007 << 8
"""the command Q_GETQUOTA; its lowest byte is the kind of quota (USER or GROUP)"""
LIMIT_UNIT_BYTES = 1024
"""the unit in which the kernel counts the limits"""

Ask = Callable[[int, int, int, "Quota"], int]
"""(descriptor, command, user or group id, structure to fill) -> 0, or -1 if the kernel gives no answer"""


class Quota(ctypes.Structure):
    """`struct if_dqblk` of linux/quota.h."""

    _fields_ = (
        ("hard_limit_blocks", ctypes.c_uint64),
        ("soft_limit_blocks", ctypes.c_uint64),
        ("used_bytes", ctypes.c_uint64),
        ("hard_limit_inodes", ctypes.c_uint64),
        ("soft_limit_inodes", ctypes.c_uint64),
        ("used_inodes", ctypes.c_uint64),
        ("block_grace_seconds", ctypes.c_uint64),
        ("inode_grace_seconds", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
    )


def ask_kernel(fd: int, command: int, ident: int, answer: Quota) -> int:
    """quotactl_fd(2). Returns 0, or -1 for every error and on every other system than Linux."""
    if not sys.platform.startswith("linux"):
        return -1
    call = ctypes.CDLL(None).syscall
    return int(call(QUOTACTL_FD, fd, ctypes.c_uint(command), ctypes.c_uint(ident), ctypes.byref(answer)))


def free_bytes(folder: str, ask: Ask = ask_kernel) -> list[int]:
    """The bytes that the quota of this user, and that of the group of new files in `folder`, still allow.

    The list has one number for each quota that this process may read and that has a hard limit. Soft limits do not
    count, because the kernel lets a user exceed them for some time. The list is empty for root, whose quotas the kernel
    does not enforce. Raises OSError if `folder` cannot be opened.
    """
    if os.geteuid() == 0:
        return []
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        of = os.fstat(fd)
        group = of.st_gid if of.st_mode & stat.S_ISGID else os.getegid()
        found = []
        for kind, ident in ((USER, os.geteuid()), (GROUP, group)):
            answer = Quota()
            if ask(fd, GETQUOTA | kind, ident, answer) == 0 and answer.hard_limit_blocks:
                found.append(max(0, answer.hard_limit_blocks * LIMIT_UNIT_BYTES - answer.used_bytes))
        return found
    finally:
        os.close(fd)
