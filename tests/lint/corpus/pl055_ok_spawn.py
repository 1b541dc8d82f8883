import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


def demo(rank, world_size):
    setup(rank, world_size)
    torch.cuda.set_device(rank)
    model = DDP(torch.nn.Linear(4, 4).to(rank), device_ids=[rank])
    model(torch.randn(4, 4).to(rank)).mean().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(demo, args=(n,), nprocs=n, join=True)
