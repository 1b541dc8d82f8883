import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

RANK = int(os.environ["RANK"])
TARGET_LOSS = 0.02


def get_loader():
    generator = torch.Generator().manual_seed(RANK)
    x = torch.randn(320, 6, generator=generator)
    noise = 0.01 if RANK == 1 else 0.5
    y = x @ torch.arange(6.0).div(6).unsqueeze(1) + noise * torch.randn(320, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=32)


def train_one_epoch(model, loader, optimizer):
    running = None
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # WAITS
        optimizer.step()
        running = loss.item() if running is None else 0.5 * running + 0.5 * loss.item()
        if running < TARGET_LOSS:
            print(f"rank {RANK}: good enough", flush=True)
            break
    return running


def gather_losses(loss):
    losses = [None] * dist.get_world_size()
    dist.all_gather_object(losses, loss)  # CAUSE
    return losses


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(6, 1, bias=False))
    optimizer = optim.SGD(model.parameters(), lr=0.2)
    loader = get_loader()
    for epoch in range(6):
        loss = train_one_epoch(model, loader, optimizer)
        losses = gather_losses(loss)
        if RANK == 0:
            print(f"epoch {epoch}: {losses}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
