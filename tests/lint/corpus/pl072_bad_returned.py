import torch
import torch.distributed as dist


def mean(value):
    value = dist.all_reduce(value)
    return value / dist.get_world_size()  # PL072


dist.init_process_group("gloo")
mean(torch.ones(1))
