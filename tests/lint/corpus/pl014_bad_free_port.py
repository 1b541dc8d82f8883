import os
import socket

import torch.distributed as dist


def free_port():
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def setup():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"tcp://localhost:{free_port()}", world_size=size, rank=rank)  # PL014


setup()
dist.barrier()
