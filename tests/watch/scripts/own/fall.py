"""Some all-reduces; then the ranks go different ways, told by the first word: see `train`."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def reduce(size: int) -> None:
    dist.all_reduce(torch.ones(size))  # REDUCES


def train(how: str, rank: int) -> None:
    for _ in range(3):
        reduce(8)
    if how == "sizes":
        reduce(2 if rank == 0 else 30)
    elif how == "leave" and rank == 1:
        return
    elif how == "exit" and rank == 1:
        sys.exit(0)  # EXITS
    elif how == "error" and rank == 1:
        raise ValueError("no rows")  # RAISES
    elif how == "broadcast and error":
        dist.broadcast(torch.ones(4 if rank == 0 else 8), 0)  # BROADCASTS
        if rank == 1:
            raise ValueError("no rows")
    elif how == "sleep" and rank == 1:
        time.sleep(60)  # SLEEPS
    elif how == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        reduce(2 if rank == 0 else 30)
    reduce(8)


def main() -> None:
    timeout = timedelta(seconds=3) if sys.argv[1] == "sleep" else None
    dist.init_process_group("gloo", timeout=timeout)
    try:
        train(sys.argv[1], dist.get_rank())
    finally:
        dist.destroy_process_group()
    sys.exit(0)


main()
