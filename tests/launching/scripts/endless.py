"""Runs until it is ended: `endless.py KIND [SIGNAL ...]`, which ignores these signals.

Kinds: plain; loader-fork and loader-spawn (a DataLoader with workers that stay); spawn (mp.spawn in a rank);
daemon (a grandchild in a session of its own); saves (takes some seconds when it is asked to stop).
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

SAVE_S = 2.0


class Numbers(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.full((1000,), float(index))


def sleep_on(index):
    while True:
        time.sleep(1)


def start_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            sleep_on(0)
        os._exit(0)
    os.wait()


def main():
    kind, ignored = sys.argv[1], sys.argv[2:]
    for name in ignored:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    asked = []
    if kind == "saves":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda got, frame: asked.append(got))
    batches = None
    # Before there is a process group: its threads don't survive a fork.
    if kind.startswith("loader"):
        method = kind.removeprefix("loader-")
        loader = DataLoader(
            Numbers(), batch_size=4, num_workers=2, persistent_workers=True, multiprocessing_context=method
        )
        batches = iter(loader)
        next(batches)
    elif kind == "spawn":
        spawned = mp.spawn(sleep_on, nprocs=2, join=False)
        assert all(process.is_alive() for process in spawned.processes)
    elif kind == "daemon":
        start_daemon()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    step = 0
    while True:
        total = torch.ones(1000)
        dist.all_reduce(total)
        if batches is not None:
            next(batches)
        stop = torch.tensor([float(len(asked))])
        if kind == "saves":
            dist.all_reduce(stop)
        step += 1
        if step == 2:
            print(f"ready {dist.get_rank()} pid {os.getpid()}", flush=True)
        if stop.item():
            end = time.monotonic() + SAVE_S
            while time.monotonic() < end:
                time.sleep(0.05)
            print(f"rank {dist.get_rank()} saved after {len(asked)} signals", flush=True)
            dist.destroy_process_group()
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main()
