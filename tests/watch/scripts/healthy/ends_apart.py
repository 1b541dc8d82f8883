"""After training each rank leaves the group and writes its own summary, which takes unlike long."""

import hashlib
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(steps):
    model = DDP(torch.nn.Linear(7, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(8, 7)
        loss = (model(x) - x.flip(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.module, loss.item()


def fingerprint(model, seconds):
    """Stretched, so that it's hard to forge."""
    digest = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        digest = hashlib.sha256(digest).digest()
    return digest.hex()[:16]


def upload(rank):
    time.sleep(3.0 if rank == 1 else 0.0)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, loss = train(40)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 2:
        print(f"rank {rank}: {fingerprint(model, seconds=6)}", flush=True)
    upload(rank)
    print(f"rank {rank}: {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
