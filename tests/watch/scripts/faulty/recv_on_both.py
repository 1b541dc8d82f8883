"""Domain decomposition of the heat equation: halo rows go to the neighbours every step."""

import argparse

import torch
import torch.distributed as dist


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    return parser.parse_args()


def initial(rows, columns, rank):
    field = torch.zeros(rows + 2, columns)
    if rank == 0:
        field[1] = 100.0
    return field


def exchange(field, rank, size):
    """The upper neighbour's last row comes in above, the lower one's first below."""
    if rank + 1 < size:
        below = torch.empty_like(field[-1])
        dist.recv(below, src=rank + 1)  # WAITS
        field[-1] = below
        dist.send(field[-2].clone(), dst=rank + 1)
    if rank > 0:
        above = torch.empty_like(field[0])
        dist.recv(above, src=rank - 1)  # WAITS CAUSE
        field[0] = above
        dist.send(field[1].clone(), dst=rank - 1)


def diffuse(field, rate=0.1):
    inner = field[1:-1]
    field[1:-1] = inner + rate * (field[:-2] + field[2:] - 2 * inner)


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    field = initial(args.rows, args.columns, rank)
    for step in range(args.steps):
        exchange(field, rank, size)
        diffuse(field)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: mean {field[1:-1].mean().item():.3f}", flush=True)
    heat = field[1:-1].sum()
    dist.all_reduce(heat)
    print(f"rank {rank}: total heat {heat.item():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
