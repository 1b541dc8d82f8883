"""Rank 0 writes checkpoints in small synced pieces; the others wait at the barrier."""

import io
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def write_synced(path, data, piece=4096, pause_s=0.02):
    """To a drive that takes no more than so much at a time."""
    with open(path + ".part", "wb") as file:
        for start in range(0, len(data), piece):
            file.write(data[start : start + piece])
            file.flush()
            os.fsync(file.fileno())
            time.sleep(pause_s)
    os.replace(path + ".part", path)


def save(model, optimizer, path):
    buffer = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    write_synced(path, buffer.getvalue())
    return len(buffer.getvalue())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for _ in range(20):
            x = torch.randn(8, 64)
            loss = (model(x) - x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            size = save(model, optimizer, "last.pt")
            print(f"epoch {epoch}: {loss.item():.4f}, {size} bytes", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
