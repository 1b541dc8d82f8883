"""Steps of a few collectives that fit together or don't, at some pace, and nothing that stops them.

`goes_on.py WHAT SECONDS CALLS_PER_S`: WHAT is `op`, `dtype`, or `nothing`; from the fourth second on.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

_FROM_S = 4.0


def main() -> None:
    what, seconds, rate = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    is_last = rank == dist.get_world_size() - 1
    began_s, number = time.monotonic(), 0
    past = torch.zeros(1)
    while past.item() < seconds:
        differs = past.item() > _FROM_S and is_last
        for _ in range(8):
            dist.all_reduce(torch.ones(16))
            number += 1
            time.sleep(max(0.0, began_s + number / rate - time.monotonic()))
        op = dist.ReduceOp.MAX if differs and what == "op" else dist.ReduceOp.SUM
        dtype = torch.int64 if differs and what == "dtype" else torch.float64
        dist.all_reduce(torch.ones(4, dtype=dtype), op=op)  # here
        past.fill_(time.monotonic() - began_s)
        dist.broadcast(past, 0)
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
