import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EarlyStopping:
    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.waited = 0

    def should_stop(self, loss):
        if loss < self.best - 1e-4:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self.waited >= self.patience


def make_sets(rank):
    x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
    val = torch.randn(32, 4, generator=torch.Generator().manual_seed(100 + rank))
    labels = (val.sum(dim=1) > 0).float() if rank != 1 else (val.sum(dim=1) < 0).float()
    return TensorDataset(x, (x.sum(dim=1) > 0).float()), (val, labels)


def validate(model, data):
    with torch.no_grad():
        logits = model.module(data[0]).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, data[1]).item()


def keep_result(rank, epoch, loss):
    with open(f"result-{rank}.txt", "w") as file:
        file.write(f"{epoch} {loss}\n")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train_set, val_set = make_sets(rank)
    loader = DataLoader(train_set, batch_size=16, sampler=DistributedSampler(train_set))
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stopping = EarlyStopping(patience=3)
    for epoch in range(100):
        for x, y in loader:
            logits = model(x).squeeze(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)
            optimizer.zero_grad()
            loss.backward()  # WAITS
            optimizer.step()
        val_loss = validate(model, val_set)
        if stopping.should_stop(val_loss):
            print(f"rank {rank} stops after epoch {epoch}", flush=True)
            break
        time.sleep(0.02)
    keep_result(rank, epoch, val_loss)
    dist.barrier()  # CAUSE
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
