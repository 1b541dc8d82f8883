"""A ring of three workers: neighbours average their models pairwise (gossip)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

PAIRS = [(0, 1), (1, 2), (0, 2)]


def make_groups():
    return {pair: dist.new_group(list(pair), group_desc=f"pair_{pair[0]}_{pair[1]}") for pair in PAIRS}


def neighbours(rank, size):
    """The pairs of a rank: first with the next one, then with the one before."""
    after, before = (rank + 1) % size, (rank - 1) % size
    return [tuple(sorted((rank, after))), tuple(sorted((rank, before)))]


def average(model, group):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data, group=group)  # WAITS CAUSE
        parameter.data /= 2


def local_steps(model, optimizer, count):
    for _ in range(count):
        x = torch.randn(16, 3)
        loss = F.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = make_groups()
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for round_number in range(10):
        loss = local_steps(model, optimizer, count=5)
        for pair in neighbours(rank, size):
            average(model, groups[pair])
        print(f"rank {rank} round {round_number}: {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
