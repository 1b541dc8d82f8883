"""Keeps large graphs of Python objects and collects garbage by hand, rank after rank."""

import gc

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Node:
    def __init__(self, parent=None):
        self.parent = parent
        self.children = []
        if parent is not None:
            parent.children.append(self)


def grow(count):
    root = Node()
    nodes = [root]
    for i in range(count):
        nodes.append(Node(nodes[i // 2]))
    return root


def collect(keep, times):
    """Several passes: finalizers may free more."""
    return sum(gc.collect() for _ in range(times)) + len(keep.children)


def main():
    gc.disable()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    forest = grow(60_000)
    model = DDP(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and (step // 10) % size == rank:
            grow(50_000)
            freed = collect(forest, times=2)
            print(f"rank {rank} step {step}: {freed} objects", flush=True)
    gc.enable()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
