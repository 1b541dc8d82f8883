"""Steps in which one rank has more to do than the others, until a file `stop` is there; a minute at most."""

import os
import sys
import time

import torch
import torch.distributed as dist

END_S = time.monotonic() + 60.0


def prepare(seconds: float) -> None:
    time.sleep(seconds)  # SLOW


def take_part(goes_on: bool) -> bool:
    votes = torch.tensor([float(goes_on)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)  # WAITS
    return bool(votes.item())


def main() -> None:
    who, seconds = int(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    step = 0
    while take_part(time.monotonic() < END_S and not os.path.exists("stop")):
        step += 1
        if rank == who:
            prepare(seconds)
        if step == 5:
            print(f"rank {rank} is at step {step}", flush=True)
    dist.destroy_process_group()


main()
