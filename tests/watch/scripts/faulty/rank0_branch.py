"""Linear regression with DDP; prints the validation loss after every epoch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 20
BATCH_SIZE = 16


def make_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    y = x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator)
    return TensorDataset(x, y)


def train_epoch(model, loader, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()  # CAUSE
        optimizer.step()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    losses = [F.mse_loss(model.module(x), y) for x, y in loader]
    return torch.stack(losses).mean()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, val_set = make_data(192, seed=0), make_data(64, seed=1)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=BATCH_SIZE)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, optimizer)
        val_loss = validate(model, val_loader)
        if rank == 0:
            dist.all_reduce(val_loss)  # WAITS
            print(f"epoch {epoch}: validation loss {val_loss.item() / world_size:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
