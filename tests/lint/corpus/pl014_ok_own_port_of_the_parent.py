import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port():
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def main(rank, size, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    x = torch.ones(1)
    dist.all_reduce(x)


if __name__ == "__main__":
    mp.spawn(main, args=(4, free_port()), nprocs=4)
