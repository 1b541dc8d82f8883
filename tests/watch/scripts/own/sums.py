"""Exact sums on one machine or over two nodes, until a rank stops or sleeps in one: `sums.py WHERE HOW RANK`.

WHERE is `memory` or `nodes`. For `nodes` the ranks claim their nodes: two ranks each. They share memory
within a node alone, as on real ones.
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
from paceline.comm.meeting import MeetingPlace
from paceline.comm.shared_memory import SharedMemoryExchange
from paceline.comm.tree import plan_reduction

# What the rank that hangs has reached: a meeting, before it has counted itself; or the end of a block.
PLACES = {"memory": (MeetingPlace, "_meet_in_memory"), "nodes": (NodeExchange, "_add_arrived")}


def main() -> None:
    where, how, who = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        if where == "nodes":
            segment._identify_machine = lambda: ("host", "boot", world.rank // 2)
        exchange = SharedMemoryExchange(dist.new_group())
        plan = plan_reduction((1,) * world.world_size)
        owner, name = PLACES[where]
        original = getattr(owner, name)
        for step in range(1000):
            if step == 5 and world.rank == who:

                def disturb(*args: object, **kwargs: object) -> object:
                    if how == "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    if how == "die":
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(600)  # SLEEPS
                    return original(*args, **kwargs)

                setattr(owner, name, disturb)
            vector = torch.ones(1 << 20)
            exchange.sum_subtrees([[vector]], plan, vector)
            time.sleep(0.1)


main()
