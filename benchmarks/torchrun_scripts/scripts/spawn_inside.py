"""Starts its own two processes with torch.multiprocessing.spawn, as scripts from before torchrun do."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE = 2


def find_free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def worker(rank: int, port: int, results: "mp.SimpleQueue[tuple[int, list[float]]]") -> None:
    store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(rank)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(5):
        loss = (weight - torch.arange(3.0) * (rank + 1)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM)
        weight.grad /= WORLD_SIZE
        optimizer.step()
    print(f"[{rank}] worker in {__name__}, {mp.current_process().name}: loss {loss.item():.4f}")
    results.put((rank, weight.detach().tolist()))
    dist.destroy_process_group()


def main() -> None:
    results = mp.get_context("spawn").SimpleQueue()
    print(f"start method {mp.get_start_method(allow_none=True)}, RANK {os.environ.get('RANK')}")
    mp.spawn(worker, args=(find_free_port(), results), nprocs=WORLD_SIZE, join=True)
    for rank, weight in sorted(results.get() for _ in range(WORLD_SIZE)):
        print(f"result of {rank}:", " ".join(f"{value:.4f}" for value in weight))


if __name__ == "__main__":
    main()
