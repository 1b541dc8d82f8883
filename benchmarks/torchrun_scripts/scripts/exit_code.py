"""Rank 1 ends with an exit code of its own, rank 0 with 0."""

import sys

import torch
import torch.distributed as dist


def main() -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    flag = torch.tensor([rank])
    dist.all_reduce(flag)
    print(f"[{rank}] flag {flag.item()}")
    dist.barrier()
    dist.destroy_process_group()
    return 3 if rank == 1 else 0


if __name__ == "__main__":
    sys.exit(main())
