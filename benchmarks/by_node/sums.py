"""Time sums of one vector over ranks on several nodes, in alternation; a rank of run.py's nodes.

python benchmarks/by_node/sums.py SIZES REPEATS INTERFACE       prints one JSON line on rank 0

- gloo: the library's all-reduce over all ranks, as the fast reduction uses it;
- by node: the exact reduction of these ranks;
- by rank: the exact reduction by messages between all ranks, without shared memory.

A call begins after a barrier and lasts until the last rank's end. Bytes are those that the node of rank 0
sends on the interface, headers included.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import paceline
from paceline.comm.exchange import Exchange, MessageExchange
from paceline.comm.shared_memory import SharedMemoryExchange
from paceline.comm.tree import plan_reduction

# Without the tail of a call, such as acknowledgements, its bytes would count for the next one.
_SETTLE_S = 0.05


def read_sent_bytes(interface: str) -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise SystemExit(f"no interface {interface}")


def measure(kinds: dict[str, Callable[[Tensor], None]], num_bytes: int, repeats: int, interface: str) -> dict:
    source = torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    sent: dict[str, list[float]] = {kind: [] for kind in kinds}
    sums: dict[str, Tensor] = {}
    for turn in range(repeats + 1):
        order = list(kinds) if turn % 2 else list(kinds)[::-1]
        for kind in order:
            vector = source.clone()
            dist.barrier()
            time.sleep(_SETTLE_S)
            before, start_s = read_sent_bytes(interface), time.perf_counter()
            kinds[kind](vector)
            took = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            time.sleep(_SETTLE_S)
            if turn:  # the first is a warm-up
                times[kind].append(took.item())
                sent[kind].append((read_sent_bytes(interface) - before) / num_bytes)
            sums[kind] = vector
    assert torch.equal(sums["by node"], sums["by rank"]), "other bits"
    return {"num_bytes": num_bytes, "times_s": times, "sent": sent}


def main(sizes: list[int], repeats: int, interface: str) -> None:
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        plan = plan_reduction((1,) * world.world_size)
        by_node, by_rank = SharedMemoryExchange(dist.new_group()), MessageExchange(dist.new_group())

        def exactly(exchange: Exchange) -> Callable[[Tensor], None]:
            return lambda vector: exchange.sum_subtrees([[vector]], plan, vector)

        def plainly(vector: Tensor) -> None:
            dist.all_reduce(vector)

        kinds = {"gloo": plainly, "by node": exactly(by_node), "by rank": exactly(by_rank)}
        rows = [measure(kinds, size, repeats, interface) for size in sizes]
        if world.is_main:
            print(json.dumps({"exchange": type(by_node._otherwise).__name__, "rows": rows}))


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1].split(",")], int(sys.argv[2]), sys.argv[3])
