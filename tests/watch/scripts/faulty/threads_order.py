"""Reduces the metrics in a thread of their own, so that training needn't wait for them."""

import queue
import threading
import time

import torch
import torch.distributed as dist


class MetricsThread(threading.Thread):
    def __init__(self, delay_s):
        super().__init__(daemon=True)
        self.delay_s = delay_s
        self.queue = queue.Queue()
        self.history = []

    def run(self):
        while True:
            values = self.queue.get()
            time.sleep(self.delay_s)  # disk
            dist.reduce(values, dst=0)  # CAUSE
            self.history.append(values / dist.get_world_size())


def step(model, optimizer, x):
    loss = model(x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # WAITS
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    return loss.detach()


def disk_delay(rank):
    """Rank 0 has the local disk."""
    return 0.0 if rank == 0 else 0.05


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    metrics = MetricsThread(disk_delay(rank))
    metrics.start()
    for number in range(300):
        loss = step(model, optimizer, torch.randn(8, 6))
        if number % 10 == 9:
            metrics.queue.put(torch.stack([loss, loss**2]))
        time.sleep(0.01)
    if rank == 0:
        print(f"{len(metrics.history)} points", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
