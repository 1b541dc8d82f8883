"""Generator and discriminator on different ranks, which meet from time to time."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

ROLES = {"generator": [0, 1], "critic": [2, 3]}
STEPS = {"generator": 120, "critic": 35}


def make_groups():
    return {role: dist.new_group(ranks, group_desc=role) for role, ranks in ROLES.items()}


def role_of(rank):
    return next(role for role, ranks in ROLES.items() if rank in ranks)


def train(model, optimizer, steps, width):
    for _ in range(steps):
        loss = model(torch.randn(4, width)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach().reshape(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    role = role_of(rank)
    groups = make_groups()
    width = 8 if role == "generator" else 20
    model = DDP(torch.nn.Linear(width, 3), process_group=groups[role])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for meeting in range(3):
        loss = train(model, optimizer, STEPS[role], width)
        if role == "critic":
            time.sleep(0.7)
            dist.all_reduce(loss, op=dist.ReduceOp.MAX, group=groups[role])
        everyone = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, loss)
        if rank == 0:
            print(f"meeting {meeting}: {[round(v.item(), 4) for v in everyone]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
