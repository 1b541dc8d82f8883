"""Sends files from disk to disk through the process group, block by block, and checks their hashes.

The first rank of each disk sends or receives for it. A transfer always moves as many bytes as the manifest
states. A rank that cannot read sends zeros, and one that cannot write drops the bytes that arrive, so that no
rank waits for another. Errors are reported when all transfers are over.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.checkpoint.copies import FileTransfer
from paceline.checkpoint.hashed import FileRecord, HashedFile
from paceline.train.state.disks import Disks
from paceline.train.state.transfer import gather
from paceline.world import World

log = logging.getLogger(__name__)

BLOCK_BYTES = 4 << 20


def exchange(
    world: World,
    disks: Disks,
    transfers: Sequence[FileTransfer],
    files: Mapping[str, FileRecord],
    source: Callable[[str], Path],
    target: Callable[[str], Path],
) -> dict[FileTransfer, str]:
    """Carry out transfers; collective. A file that does not arrive as it was is removed again.

    Args:
        world: the ranks.
        disks: of the run's folder.
        transfers: in the order of `plan_transfers`, the same on all ranks.
        files: sizes and hashes.
        source: from a file's name to where this disk has it.
        target: from a file's name to where this disk is to have it.

    Returns:
        What went wrong, by transfer; the same on every rank.
    """
    failed: dict[FileTransfer, str] = {}
    if disks.leads:
        leaders = disks.leaders
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        for each in transfers:
            problem = None
            if each.source == disks.own:
                problem = _send(world, source(each.name), files[each.name], leaders[each.target], buffer)
            elif each.target == disks.own:
                problem = _receive(world, target(each.name), files[each.name], leaders[each.source], buffer)
            if problem is not None:
                failed[each] = f"{problem} on {socket.gethostname()}"
    found: dict[FileTransfer, str] = {}
    for each_failed in gather(world, failed):
        found |= each_failed
    return found


def _send(world: World, path: Path, record: FileRecord, to: int, buffer: torch.Tensor) -> str | None:
    """Send a file's bytes; return what went wrong."""
    problem = None
    view: memoryview = buffer.numpy().data
    with contextlib.ExitStack() as held:
        stream = None
        try:
            stream = held.enter_context(open(path, "rb", buffering=0))
        except OSError as error:
            problem = f"{path} cannot be read ({error.strerror})"
        for block in _blocks(buffer, record.num_bytes):
            filled = 0
            while stream is not None and filled < len(block):
                try:
                    num_bytes = stream.readinto(view[filled : len(block)])
                except OSError as error:
                    num_bytes, problem = 0, f"{path} cannot be read ({error.strerror})"
                if not num_bytes:
                    problem = problem or f"{path} has fewer than {record.num_bytes} bytes"
                    stream = None
                    break
                filled += num_bytes
            block[filled:].zero_()
            dist.send(_through(world, block), to)
    return problem


def _receive(world: World, path: Path, record: FileRecord, source: int, buffer: torch.Tensor) -> str | None:
    """Receive a file's bytes, write and check them; return what went wrong."""
    view: memoryview = buffer.numpy().data
    problem = None
    blocks = _blocks(buffer, record.num_bytes)
    file = HashedFile(path)
    try:
        with file:
            for block in blocks:
                _fill(world, block, source)
                file.write(view[: len(block)])
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror})"
        for block in blocks:
            _fill(world, block, source)
    if problem is None and file.record != record:
        problem = f"{path} arrived with another hash than the manifest has"
    if problem is not None:
        with contextlib.suppress(OSError):
            path.unlink()
    return problem


def _blocks(buffer: torch.Tensor, num_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the buffer as often as the bytes need it, the last time only a part."""
    for begin in range(0, num_bytes, len(buffer)):
        yield buffer[: min(len(buffer), num_bytes - begin)]


def _fill(world: World, block: torch.Tensor, source: int) -> None:
    through = _through(world, block)
    dist.recv(through, source)
    if through is not block:
        block.copy_(through)


def _through(world: World, block: torch.Tensor) -> torch.Tensor:
    """Return a block where the backend can send it: NCCL alone carries nothing from CPU memory."""
    return block.to(world.device) if world.backend == "nccl" else block
