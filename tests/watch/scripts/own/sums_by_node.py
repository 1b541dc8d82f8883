"""Exact sums over two nodes, until a rank stops itself or sleeps in one: `sums_by_node.py HOW RANK`.

The ranks claim their nodes: two ranks each. They share memory within a node alone, as on real ones.
"""

import os
import signal
import sys
import time

import paceline
import torch
import torch.distributed as dist
from paceline.comm import segment
from paceline.comm.by_node import NodeExchange
from paceline.comm.shared_memory import SharedMemoryExchange
from paceline.comm.tree import plan_reduction


def main() -> None:
    how, who = sys.argv[1], int(sys.argv[2])
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        segment._identify_machine = lambda: ("host", "boot", world.rank // 2)
        exchange = SharedMemoryExchange(dist.new_group())
        plan = plan_reduction((1,) * world.world_size)
        add_arrived = NodeExchange._add_arrived
        for step in range(1000):
            if step == 5 and world.rank == who:

                def disturb(*args: object, **kwargs: object) -> None:
                    if how == "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    time.sleep(600)  # SLEEPS
                    add_arrived(*args, **kwargs)

                NodeExchange._add_arrived = disturb
            vector = torch.ones(1 << 20)
            exchange.sum_subtrees([[vector]], plan, vector)
            time.sleep(0.1)


main()
