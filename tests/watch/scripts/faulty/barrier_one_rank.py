"""Saves a checkpoint every epoch and waits until it is written."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


def save_checkpoint(model, optimizer, epoch, folder="checkpoints"):
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{epoch:03d}.pt")
    torch.save(
        {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path
    )
    dist.barrier()  # WAITS
    return path


def train_epoch(model, loader, optimizer):
    total = 0.0
    for (x,) in loader:
        loss = (model(x) - x.mean(dim=1, keepdim=True)).abs().mean()
        optimizer.zero_grad()
        loss.backward()  # CAUSE
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def main():
    dist.init_process_group("gloo")
    dataset = TensorDataset(torch.randn(200, 10, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    model = DDP(torch.nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer)
        if is_main():
            path = save_checkpoint(model, optimizer, epoch)
            print(f"epoch {epoch}: loss {loss:.4f}, saved to {path}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
