"""All-reduces in steps; what happens at one of them on one rank comes from the command line."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def compute_for(seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        sum(range(1000))


def disturb(how: str) -> None:
    if how == "sleep":
        time.sleep(600)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fail-then-sleep":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("the first attempt")
        time.sleep(600)
    if how == "compute":
        compute_for(float(sys.argv[4]))


def main() -> None:
    how, at, who = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(1, 2 * at):
        if step == at and rank == who:
            disturb(how)
        elif step == at and how == "die":
            time.sleep(5)  # so that the others don't lose their peer at once
        total = torch.ones(8)
        dist.all_reduce(total)  # WAITS
        print(f"rank {rank} step {step}", flush=True)
        time.sleep(0.2)
    dist.destroy_process_group()


main()
