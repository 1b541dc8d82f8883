"""A plain PyTorch DDP script, without a line of Paceline, for launchers to run.

paceline run --nproc-per-node 2 examples/ddp.py --epochs 3
torchrun --nproc-per-node 2 examples/ddp.py --epochs 3
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_spirals(num_points, generator):
    """Points of two spirals that turn around each other, and the number of each point's spiral."""
    labels = torch.randint(2, (num_points,), generator=generator)
    radius = torch.rand(num_points, generator=generator) * 3 + 0.2
    angle = 2 * radius + labels * torch.pi
    noise = torch.randn(num_points, 2, generator=generator) * 0.05
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) + noise, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    data = TensorDataset(*make_spirals(4096, torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=128 // world_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        totals = torch.zeros(2, device=device)
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals += torch.stack([loss.detach() * len(points), torch.tensor(len(points), device=device)])
        dist.all_reduce(totals)
        if rank == 0:
            print(f"epoch {epoch}: loss {totals[0] / totals[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
