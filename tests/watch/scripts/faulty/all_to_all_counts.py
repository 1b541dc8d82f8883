"""Exchanges rows between ranks; one rank sends a row more than the receiver's table says."""

import torch
import torch.distributed as dist


def exchange(step, rank, size):
    send, receive = [2] * size, [2] * size
    if step == 4 and rank == 1:
        send[2] = 3
    rows = torch.ones(sum(send))
    found = torch.empty(sum(receive))
    dist.all_to_all_single(found, rows, receive, send)  # WAITS CAUSE
    return found.sum()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    total = torch.zeros(())
    for step in range(10):
        total += exchange(step, rank, size)
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: {total.item():g} rows arrived")
    dist.destroy_process_group()


main()
