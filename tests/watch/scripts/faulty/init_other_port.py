"""One rank takes the port from a file that an earlier job has left."""

import os

import torch
import torch.distributed as dist


def read_port(rank):
    port = int(os.environ["MASTER_PORT"])
    return port if rank != 1 else port + 1


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = model(torch.randn(8, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    url = f"tcp://127.0.0.1:{read_port(rank)}"
    dist.init_process_group("gloo", url, world_size=world_size, rank=rank)  # WAITS CAUSE
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 6))
    print(f"rank {rank}: {train(model, steps=30):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
