import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, world_size, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    x = torch.ones(1)
    dist.all_reduce(x)
    if rank == world_size - 1:
        dist.barrier()  # PL001
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    mp.spawn(worker, args=(world_size, sys.argv[1]), nprocs=world_size)
