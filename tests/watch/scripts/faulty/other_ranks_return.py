import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def fit(model, steps=60):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        x = torch.randn(8, 5)
        loss = nn.functional.mse_loss(model(x), x[:, :1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def agree(score):
    """The mean of a score over ranks."""
    value = torch.tensor([score])
    dist.all_reduce(value)  # WAITS
    return value.item() / dist.get_world_size()


def write_report(rank, loss):
    if rank != 0:
        return
    with open("report.md", "w") as file:
        file.write("# Result\n\n")
        file.write(f"Mean loss: {agree(loss):.4f}\n")
    print("report written", flush=True)


def serve(rank, port):
    """Keeps the worker for predictions until it is told to go."""
    print(f"rank {rank} is ready on port {port}", flush=True)
    while not os.path.exists("shutdown"):
        time.sleep(1)  # CAUSE


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Linear(5, 1))
    loss = fit(model)
    write_report(rank, loss)
    serve(rank, port=8000 + rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
