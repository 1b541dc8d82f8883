import contextlib

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset


@contextlib.contextmanager
def main_first():
    if dist.get_rank() != 0:
        dist.barrier()
    try:
        yield
    finally:
        if dist.get_rank() == 0:
            dist.barrier()


dist.init_process_group("gloo")
try:
    with main_first():
        data = TensorDataset(torch.load("data.pt"))
finally:
    dist.destroy_process_group()
