"""Maps memory that ranks of one machine share.

A segment is an anonymous file (memfd_create) of the first rank, which the others open through /proc/PID/fd.
It has no name, so it disappears with the last rank, however the ranks die, and it does not count against the
size of /dev/shm (64 MiB in a container by default). If any rank cannot map it, no rank uses it: with several
machines or containers, and on systems other than Linux.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)

_TOKEN_BYTES = 16


def find_machines(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return a number for each rank of a group, equal for ranks that may share memory; collective.

    The machines are numbered in the order of ranks. Containers with process ids of their own count as
    machines of their own.
    """
    found: list[tuple[str, str, int]] = [("", "", 0)] * group.size()
    dist.all_gather_object(found, _identify_machine(), group=group)
    known = list(dict.fromkeys(found))
    return tuple(map(known.index, found))


def _identify_machine() -> tuple[str, str, int]:
    """Return host name, boot and namespace of process ids; the last two are constants except on Linux."""
    try:
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        processes = 0
    return socket.gethostname(), read_boot(), processes


def read_boot() -> str:
    """Return what distinguishes this start of this machine; empty except on Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def share_memory(
    group: dist.ProcessGroup, num_bytes: int, owners: Sequence[int] | None = None
) -> Tensor | None:
    """Map a segment of zeros on every rank of a group; collective.

    Args:
        group: the ranks, with a backend for the CPU.
        num_bytes: the size, the same on every rank.
        owners: by rank, the rank that makes its segment; all of them map the first rank's by default.

    Returns:
        The segment as bytes, or `None` on every rank if any rank cannot have its segment.
    """
    shared = share_file(group, num_bytes, owners)
    if shared is None:
        return None
    os.close(shared[0])
    return shared[1]


def share_file(
    group: dist.ProcessGroup, num_bytes: int, owners: Sequence[int] | None = None
) -> tuple[int, Tensor] | None:
    """Map a segment as `share_memory` does, and keep its file open, to lock it; collective.

    Returns:
        This rank's own descriptor of the file, which the caller closes, and the segment as bytes; or `None`
        on every rank if any rank cannot have them.
    """
    handle, token = -1, secrets.token_bytes(_TOKEN_BYTES)
    owner = 0 if owners is None else owners[group.rank()]
    if group.rank() == owner:
        handle = _make_segment(token, num_bytes)
    own = (os.getpid(), handle, token)
    if owners is None:
        box = [own]
        dist.broadcast_object_list(box, group=group, group_src=0)
        pid, remote, token = box[0]
    else:
        boxes = [own] * group.size()
        dist.all_gather_object(boxes, own, group=group)
        pid, remote, token = boxes[owner]
    mapped = None if remote < 0 else _map_segment(f"/proc/{pid}/fd/{remote}", token, num_bytes)
    everywhere = torch.tensor([mapped is not None], dtype=torch.int32)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)  # by then everybody has opened it
    if handle >= 0:
        os.close(handle)
    if mapped is not None and not everywhere.item():
        os.close(mapped[0])
        mapped = None
    return mapped


def _make_segment(token: bytes, num_bytes: int) -> int:
    """Return a descriptor of new anonymous memory that begins with `token`, or -1."""
    if sys.platform != "linux":
        return -1
    handle = -1
    try:
        handle = os.memfd_create("paceline", os.MFD_CLOEXEC)
        # Reserved now: running out of memory is an error here, and a SIGBUS at the first touch.
        os.posix_fallocate(handle, 0, mmap.PAGESIZE + num_bytes)
        os.pwrite(handle, token, 0)
    except (OSError, AttributeError) as error:  # old C libraries lack memfd_create
        log.info("cannot allocate %d bytes of shared memory (%s)", num_bytes, error)
        if handle >= 0:
            os.close(handle)
        return -1
    return handle


def _map_segment(path: str, token: bytes, num_bytes: int) -> tuple[int, Tensor] | None:
    """Return a descriptor of the segment and its memory, or `None` if `path` is something else: the process
    may be another machine's."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(handle, _TOKEN_BYTES, 0) != token:
            raise ValueError("another file")
        view = mmap.mmap(handle, mmap.PAGESIZE + num_bytes)
    except (OSError, ValueError):
        os.close(handle)
        return None
    if hasattr(mmap, "MADV_DONTFORK"):  # A loader worker, forked from this rank, does not need it.
        view.madvise(mmap.MADV_DONTFORK)
    return handle, torch.frombuffer(view, dtype=torch.uint8, offset=mmap.PAGESIZE)
