"""Exact sums, until a rank stops, dies or sleeps in one: `sums.py HOW RANK`."""

import os
import signal
import sys
import time

import paceline
import torch
import torch.distributed as dist
from paceline.comm import tree_exchange
from paceline.comm.tree import plan_reduction


def main() -> None:
    how, who = sys.argv[1], int(sys.argv[2])
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        sums = tree_exchange.Exchange(dist.new_group())
        plan = plan_reduction((1,) * world.world_size)
        original = tree_exchange.pass_on
        for step in range(1000):
            if step == 5 and world.rank == who:

                def disturb(*args: object, **kwargs: object) -> object:
                    if how == "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    if how == "die":
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(600)  # SLEEPS
                    return original(*args, **kwargs)

                tree_exchange.pass_on = disturb
            vector = torch.ones(1 << 20)
            sums.sum_subtrees([vector], plan, vector)
            time.sleep(0.1)


main()
