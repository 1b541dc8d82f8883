"""Sends tokens to experts by functional collectives; one rank rounds the capacity of its expert down."""

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

TOKENS = 10


def dispatch(tokens, sends, expects):
    received = all_to_all_single_autograd(tokens, expects, sends, dist.group.WORLD)  # WAITS CAUSE
    return wait_tensor(received)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expert = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(expert.parameters(), lr=0.1)
    for step in range(6):
        each = TOKENS + step
        capacity = each // 4 * 4 if rank == 1 else each
        tokens = torch.randn(each * world_size, 16)
        expects = [each if source == rank else capacity for source in range(world_size)]
        received = dispatch(tokens, [each] * world_size, expects)
        loss = expert(received).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: {loss:.4f}")
    dist.destroy_process_group()


main()
