"""One of two ranks: sums over both, or measures links to one that never answers."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

from paceline.comm.algorithms import Algorithms
from paceline.comm.exchange import Exchange
from paceline.comm.links import find_nodes, measure_links
from paceline.comm.segment import find_machines
from paceline.errors import PacelineError
from paceline.world import start
from tests.comm.test_exchange import draw_leaves, sum_alone, sum_on_ranks


def sum_over_both() -> None:
    """Print machines, nodes, bytes sent by the fixed rule, whether the bits are right, and a refusal."""
    with start(device="cpu", timeout_s=60, threads_per_rank=1) as world:
        group, cpu = dist.group.WORLD, torch.device("cpu")
        assert group is not None
        leaves = draw_leaves(2, 5000, torch.float32, 0)
        exchange: Exchange = Algorithms().build_exchange(group, cpu, [20_000])
        is_right = torch.equal(sum_on_ranks(exchange, (1, 1), leaves), sum_alone(leaves))
        try:
            Algorithms(exact_sum="shared-memory").build_exchange(group, cpu, [20_000])
            refused = ""
        except PacelineError as error:
            refused = str(error)
        found = [find_machines(group), find_nodes(world)[1], exchange.sent_bytes, is_right, refused]
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
