"""One of two ranks: sums over both, or measures links to one that never answers."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

from paceline.bench.link_times import find_nodes, measure_links
from paceline.comm.segment import find_machines
from paceline.comm.shared_memory import build_exchange
from paceline.errors import PacelineError
from paceline.world import start
from tests.comm.test_exchange import draw_leaves, sum_alone, sum_on_ranks


def sum_over_both() -> None:
    """Print machines, nodes, bytes sent, and whether the bits are right."""
    with start(device="cpu", timeout_s=60, threads_per_rank=1) as world:
        group = dist.group.WORLD
        assert group is not None
        leaves = draw_leaves(2, 5000, torch.float32, 0)
        exchange = build_exchange(group, torch.device("cpu"))
        is_right = torch.equal(sum_on_ranks(exchange, (1, 1), leaves), sum_alone(leaves))
        found = [find_machines(group), find_nodes(world)[1], exchange.sent_bytes, is_right]
        if world.is_main:
            print(json.dumps(found))


def measure_alone() -> None:
    """Measure links on rank 0, while rank 1 never answers."""
    with start(device="cpu", timeout_s=4, threads_per_rank=1) as world:
        if world.rank == 1:
            time.sleep(60)
        try:
            measure_links(world)
        except PacelineError as error:
            print(json.dumps([error.code, str(error)]), flush=True)


if __name__ == "__main__":
    {"sum": sum_over_both, "measure": measure_alone}[sys.argv[1]]()
