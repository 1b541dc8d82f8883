import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["RANK"])
    device = torch.device(f"cuda:{rank}")  # PL055
    model = DDP(torch.nn.Linear(4, 4).to(device), device_ids=[rank])
    model(torch.randn(4, 4).to(device)).mean().backward()


main()
