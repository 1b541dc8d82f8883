"""Dispatches tokens to experts; a rank over its capacity drops a token that the sender still sends."""

import torch
import torch.distributed as dist

CAPACITY = 9


def dispatch(counts, width=16):
    expected = torch.empty_like(counts)
    dist.all_to_all_single(expected, counts)
    if dist.get_rank() == 0 and expected.sum() > CAPACITY:
        expected[1] -= expected.sum() - CAPACITY
    tokens = torch.randn(int(counts.sum()), width)
    received = torch.empty(int(expected.sum()), width)
    dist.all_to_all_single(received, tokens, expected.tolist(), counts.tolist())  # WAITS CAUSE
    return received


def main():
    dist.init_process_group("gloo")
    expert = torch.nn.Linear(16, 16)
    for step in range(8):
        tokens = dispatch(torch.full((dist.get_world_size(),), 4 + step // 4))
        output = expert(tokens)
        print(f"step {step}: {len(output)} tokens")
    dist.destroy_process_group()


main()
