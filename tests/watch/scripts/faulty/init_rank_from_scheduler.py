import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def scheduler_rank():
    """The rank under Slurm; 0 on a workstation."""
    return int(os.environ.get("SLURM_PROCID", "0"))


def scheduler_size():
    return int(os.environ.get("SLURM_NTASKS", os.environ["WORLD_SIZE"]))


def init():
    rank, size = scheduler_rank(), scheduler_size()
    dist.init_process_group("gloo", rank=rank, world_size=size)  # WAITS
    print(f"rank {rank} of {size}", flush=True)
    return rank


class AutoEncoder(nn.Module):
    def __init__(self, features=16, code=4):
        super().__init__()
        self.encoder = nn.Linear(features, code)
        self.decoder = nn.Linear(code, features)

    def forward(self, x):
        return self.decoder(torch.relu(self.encoder(x)))


def main():
    rank = init()
    torch.manual_seed(rank)
    model = DistributedDataParallel(AutoEncoder())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(3):
        for _ in range(10):
            x = torch.randn(8, 16)
            loss = nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), f"autoencoder-{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
