"""Makes the default group again and again, each time for other collectives; one rank is slow to begin."""

import os
import time

import torch
import torch.distributed as dist


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = os.environ["TORCHELASTIC_RUN_ID"]
    for phase in range(4):
        # A file for each: torch's store would give the addresses of the time before.
        place = os.path.abspath(f"meet-{folder}-{phase}")
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
        if rank == 1:
            time.sleep(3.0 if phase == 2 else 0.5)
        value = torch.ones(phase + 2)
        for _ in range(10):
            if phase % 2:
                dist.broadcast(value, 0)
            else:
                dist.all_reduce(value, op=dist.ReduceOp.MAX if phase else dist.ReduceOp.SUM)
            time.sleep(0.1)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
