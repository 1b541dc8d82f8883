"""Rank 1 keeps every batch, until the kernel kills it."""

import os

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"[{rank}] attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    kept: list[torch.Tensor] = []
    weight = torch.ones(1000)
    for step in range(1000):
        try:
            dist.all_reduce(weight)
        except RuntimeError as error:
            # Which of a closed and a reset connection is seen is a matter of time.
            raise SystemExit(f"[{rank}] lost a peer: {type(error).__name__}") from None
        weight /= 2
        if rank == 1:
            kept.append(torch.ones(12_500_000))  # 50 MB
        if step == 0:
            print(f"[{rank}] first step done")
    print(f"[{rank}] all steps done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
