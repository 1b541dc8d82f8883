"""Rank 0 asks again for what all ranks have computed: the function is not run a second time."""

from functools import cache, lru_cache

import torch
import torch.distributed as dist

dist.init_process_group("gloo")


@cache
def total(number):
    x = torch.tensor(float(number))
    dist.all_reduce(x)
    return x.item()


@lru_cache(maxsize=100)
def largest(number):
    x = torch.tensor(float(number))
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x.item()


best = min(range(10), key=total)
print(total(best), largest(best))
if dist.get_rank() == 0:
    print(best, total(best), largest(best))
