"""Records an account when memory has run out, or is about to. Nothing here raises: the first error counts."""

from __future__ import annotations

import pickle
import sys
from contextlib import suppress
from pathlib import Path

from paceline.memory.account import Account
from paceline.memory.holders import list_frames
from paceline.memory.limits import Use, read_machine
from paceline.memory.live_objects import MemoryWalk, find_main_frames
from paceline.memory.torch_errors import find_request, is_of_device, is_out_of_memory


def account_for(error: BaseException, rank: int) -> Account | None:
    """Return an account of this process's memory for an error that reports that it is exhausted.

    Call it where the error was caught, before its traceback is dropped: the tensors are in its frames.

    Args:
        error: any exception.
        rank: global.

    Returns:
        None for another error, without torch, or if there is not even memory for the account.
    """
    torch = sys.modules.get("torch")
    if torch is None or not is_out_of_memory(error):
        return None
    with suppress(Exception):
        frames = list_frames(sys._getframe(1), error.__traceback__)
        is_device = is_of_device(error) and torch.cuda.is_available()
        walk = MemoryWalk(torch, frames, "cuda" if is_device else "cpu")
        request = find_request(error)
        use = _read_device() if is_device else read_machine()
        if use is not None and use.kind == "machine" and use.used + request < 0.9 * use.limit:
            use = None  # another limit, such as one of the address space
        return walk.take(rank, use, request, _count_ranks())
    return None


def account_of_thread(thread: int, rank: int, use: Use) -> Account | None:
    """Return an account of this process's memory while one of its threads goes on.

    Args:
        rank: global.
        use: the limit that is nearly reached.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    frames = list_frames(find_main_frames(thread))
    return MemoryWalk(torch, frames, is_running=True).take(rank, use, 0, _count_ranks())


def write_account(path: Path, account: Account) -> None:
    """Write an account for this node's launcher, completely or not at all."""
    with suppress(OSError):
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(account))
        part.replace(path)


def read_account(path: Path) -> Account | None:
    """Return the account in a file, `None` if there is none."""
    with suppress(OSError):
        account: Account = pickle.loads(path.read_bytes())
        return account
    return None


def _read_device() -> Use | None:
    torch = sys.modules["torch"]
    with suppress(Exception):
        free, total = torch.cuda.mem_get_info()
        return Use("device", int(total), int(total - free))
    return None


def _count_ranks() -> int:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    with suppress(Exception):  # a build without it
        if distributed is not None and distributed.is_initialized():
            return int(distributed.get_world_size())
    return 1
