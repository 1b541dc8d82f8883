"""A training script as users write them, in several kinds; it writes its own clock after each step."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KINDS = ("loader", "no-loader", "by-hand", "accumulating", "shards", "short", "workers")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="loader")
    parser.add_argument("--clock", default="")
    parser.add_argument("--port", default="")
    parser.add_argument("--pause-s", type=float, default=0.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.port:
        os.environ["MASTER_PORT"] = args.port
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model: nn.Module = plain
    if args.kind == "shards":
        from torch.distributed.fsdp import fully_shard

        fully_shard(plain)  # type: ignore[call-overload]
    elif args.kind != "by-hand":
        model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(96 if args.kind == "short" else 4000, 64))
    # The last batch of an epoch of "short" has fewer samples.
    num_workers = 1 if args.kind == "workers" else 0
    loader = DataLoader(data, batch_size=10, sampler=DistributedSampler(data), num_workers=num_workers)
    valid = DataLoader(data, batch_size=50)
    clock: list[float] = []

    def batches() -> Iterator[tuple[torch.Tensor]]:
        if args.kind in ("no-loader", "by-hand"):
            while True:
                yield (torch.randn(7, 64),)
        for _ in range(1 if args.kind == "short" else 3):
            yield from loader

    for number, (x,) in enumerate(batches(), start=1):
        time.sleep(args.pause_s)
        model(x).square().mean().backward()
        if args.kind == "accumulating" and number % 3:
            continue
        if args.kind == "by-hand":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        clock.append(time.perf_counter())
        if args.kind == "loader" and number % 4 == 0:
            model.eval()
            with torch.no_grad():
                for count, (batch,) in enumerate(valid):
                    model(batch)
                    if count:
                        break
            model.train()
        if args.clock:
            with open(f"{args.clock}-{rank}", "a") as file:
                file.write(f"{clock[-1]!r}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"rank {os.environ.get('RANK', '0')} begins")
    main()
