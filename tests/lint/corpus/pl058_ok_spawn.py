import os

import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("gloo", rank=rank, world_size=size)


if __name__ == "__main__":
    mp.spawn(run, args=(2,), nprocs=2)
