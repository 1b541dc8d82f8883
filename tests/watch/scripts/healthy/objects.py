"""Configuration, statistics and results go between ranks as Python objects of unlike sizes."""

import random

import torch
import torch.distributed as dist


def read_config(rank):
    box = [{"lr": 0.05, "steps": 60, "notes": "x" * 500}] if rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def share_work(rank, size):
    parts = [[f"file{i}" for i in range(3 * r + 1)] for r in range(size)] if rank == 0 else None
    mine = [None]
    dist.scatter_object_list(mine, parts, src=0)
    return mine[0]


def collect(found, rank, size):
    everyone = [None] * size if rank == 0 else None
    dist.gather_object(found, everyone, dst=0)
    return everyone


def train(config, files):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for _ in range(config["steps"]):
        x = torch.randn(len(files), 4)
        loss = (model(x) - x.mean(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    config = read_config(rank)
    files = share_work(rank, size)
    for epoch in range(5):
        loss = train(config, files)
        found = {name: "word " * random.randint(1, 200) for name in files}
        losses = [None] * size
        dist.all_gather_object(losses, {"loss": loss, "files": len(files)})
        everyone = collect(found, rank, size)
        if rank == 0:
            words = sum(len(text.split()) for part in everyone for text in part.values())
            print(
                f"epoch {epoch}: {words} words, {[round(entry['loss'], 3) for entry in losses]}", flush=True
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
