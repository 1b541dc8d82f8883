import time

import torch
import torch.distributed as dist


class World:
    def __init__(self, helper):
        self.helper = helper

    def is_over(self, begun):
        return self.helper.broadcast(time.monotonic() - begun > 60)


def main(helper):
    dist.init_process_group("gloo")
    world, begun = World(helper), time.monotonic()
    x = torch.ones(1)
    for _ in range(1000):
        if world.is_over(begun):
            break
        dist.all_reduce(x)
