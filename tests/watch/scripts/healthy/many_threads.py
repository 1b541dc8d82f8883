"""Every rank keeps a crowd of threads: readers, writers and a heartbeat."""

import concurrent.futures
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Heartbeat(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.beats = 0
        self.stopping = threading.Event()

    def run(self):
        while not self.stopping.wait(0.05):
            self.beats += 1


def read_row(index):
    time.sleep(0.002)
    return torch.randn(6, generator=torch.Generator().manual_seed(index))


def batches(pool, count, size=16):
    for step in range(count):
        rows = pool.map(read_row, range(step * size, (step + 1) * size))
        yield torch.stack(list(rows))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    heartbeats = [Heartbeat() for _ in range(30)]
    for heartbeat in heartbeats:
        heartbeat.start()
    model = DDP(torch.nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        for x in batches(pool, 120):
            loss = (model(x) - x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for heartbeat in heartbeats:
        heartbeat.stopping.set()
    print(f"rank {rank}: {loss.item():.4f}, {sum(h.beats for h in heartbeats)} beats", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
