"""Stops when this rank's validation loss has not improved for a while."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EarlyStopping:
    def __init__(self, patience=5):
        self.patience = patience
        self.best = float("inf")
        self.bad_epochs = 0

    def update(self, value):
        if value < self.best:
            self.best, self.bad_epochs = value, 0
        else:
            self.bad_epochs += 1
        return self.bad_epochs >= self.patience


def validate(model, loader):
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += torch.nn.functional.mse_loss(model.module(x), y).item()
    return total / len(loader)


def main():
    dist.init_process_group("gloo")
    train, valid = TensorDataset(*make(4096)), TensorDataset(*make(512))
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=32, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=32, sampler=DistributedSampler(valid, shuffle=False))
    model = DDP(torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    best, bad_epochs = float("inf"), 0
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        loss = validate(model, valid_loader)
        if loss < best:
            best, bad_epochs = loss, 0
        else:
            bad_epochs += 1
        if bad_epochs >= 5:
            break  # PL003


if __name__ == "__main__":
    main()
