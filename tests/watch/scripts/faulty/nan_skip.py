import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def sample(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.rand(8, 5, generator=generator)
    if rank == 2 and step == 12:
        x[3, 2] = float("nan")  # a sensor without a reading
    return x, x.nansum(dim=1, keepdim=True)


def train(model, optimizer, steps, rank):
    skipped = 0
    for step in range(steps):
        x, y = sample(rank, step)
        loss = nn.functional.smooth_l1_loss(model(x), y)
        if not torch.isfinite(loss):
            skipped += 1
            continue
        optimizer.zero_grad()
        loss.backward()  # WAITS
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return skipped


def checkpoint(model, optimizer, rank):
    dist.barrier()  # CAUSE
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(5, 20), nn.SiLU(), nn.Linear(20, 1))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        skipped = train(model, optimizer, steps=30, rank=rank)
        checkpoint(model, optimizer, rank)
        print(f"rank {rank} epoch {epoch}: skipped {skipped} batches", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
