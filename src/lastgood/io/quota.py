"""Disk quotas of this user and group, asked of the kernel: `statvfs` shows the limits of projects only.

quotactl_fd(2) takes a file descriptor, so no block device has to be found, which a container may not have. Linux 5.14
or later. The quotas of a network file system are kept by its server, and are not seen here.
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
"""a command; the kind of quota is in its lowest byte"""
BLOCK_BYTES = 1024
"""unit of the limits"""

Ask = Callable[[int, int, int, "Quota"], int]
"""(descriptor, command, id, where to put the answer) -> 0, or -1 where there is no answer"""


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
    """quotactl_fd(2). -1 also where this is not Linux; an error counts as no answer."""
    if not sys.platform.startswith("linux"):
        return -1
    call = ctypes.CDLL(None).syscall
    return int(call(QUOTACTL_FD, fd, ctypes.c_uint(command), ctypes.c_uint(ident), ctypes.byref(answer)))


def free_bytes(folder: str, ask: Ask = ask_kernel) -> list[int]:
    """What the quota of this user, and that of the group of new files in `folder`, leave: one number for each.

    Nothing for a quota that is not set, is not enforced here (root), or may not be asked for. Raises OSError where
    `folder` cannot be opened.
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
                found.append(max(0, answer.hard_limit_blocks * BLOCK_BYTES - answer.used_bytes))
        return found
    finally:
        os.close(fd)
