"""Functions that the launched ranks of the tests run; as a script, it launches one: `jobs.py NAME NPROC`."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.launching.ending.endings import RankFailed
from paceline.launching.local import launch
from paceline.world import start


def ranks_and_sum(start_at):
    with start(device="cpu", timeout_s=60) as world:
        x = torch.tensor(start_at + world.rank)
        dist.all_reduce(x)
        return world.rank, x.item(), torch.get_num_threads()


def large_result():
    return torch.ones(1_000_000)


def print_a_line():
    rank = os.environ["RANK"]
    sys.stdout.write(f"out of {rank}\n")
    os.write(2, f"raw err of {rank}\n".encode())


def die_talking():
    sys.stdout.write(f"last words of {os.environ['RANK']}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def raise_on_one():
    with start(device="cpu", timeout_s=60) as world:
        if world.rank == 1:
            raise ValueError("boo")
        dist.barrier()


def raise_ours_on_one():
    with start(device="cpu", timeout_s=60) as world:
        if world.rank == 1:
            raise PacelineError("PL999", saw="The wheel is flat.", rule="It must be round.", fix="Pump.")
        dist.barrier()


def tell_where_sockets_go(then_sleep_s):
    from multiprocessing import util

    print(util.get_temp_dir(), flush=True)
    time.sleep(then_sleep_s)


def tell_start_method():
    import multiprocessing

    return multiprocessing.get_start_method()


def leave_workers_running(method):
    import builtins

    from torch.utils.data import DataLoader

    loader = DataLoader(
        list(range(8)), num_workers=2, persistent_workers=True, multiprocessing_context=method
    )
    builtins.held = iter(loader)  # as a cycle of references or a traceback would
    return next(builtins.held).item()


def kill_keeper():
    parent = psutil.Process(os.getppid())
    assert any("keeper" in word for word in parent.cmdline()), "or it would be the launcher"
    os.kill(os.getppid(), signal.SIGKILL)
    while True:
        time.sleep(1)


def killed_on_one():
    with start(device="cpu", timeout_s=60) as world:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def exit_seven_on_one():
    if os.environ["RANK"] == "1":
        os._exit(7)
    time.sleep(0.2)


def exit_seven_while_another_waits():
    """Rank 1 leaves no record; rank 0 fails of it, and leaves one."""
    world = start(device="cpu", timeout_s=60)
    if world.rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def sys_exit_on_one():
    if os.environ["RANK"] == "1":
        sys.exit("no more road")
    time.sleep(30)


def fail_while_another_sleeps():
    """Rank 0 ignores SIGTERM and is in no collective: it must be ended all the same."""
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)
    raise ValueError("boo")


def stop_by_themselves():
    with start(device="cpu", timeout_s=60):
        dist.barrier()
        raise SystemExit(75)


def stop_when_asked():
    """Stop as the trainer does: note the signal, finish the step, exit with 128 + its number."""
    asked = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda got, frame: asked.append(got))
    with start(device="cpu", timeout_s=60) as world:
        dist.barrier()
        os.write(1, f"running {world.rank} {os.getpid()}\n".encode())
        while not asked:
            time.sleep(0.02)
        time.sleep(0.3)
        dist.barrier()
        os.write(1, f"saved {world.rank} after {len(asked)}\n".encode())
    raise SystemExit(128 + asked[0])


def save_for_long():
    """Take longer to leave than a rank may be stuck after another's failure."""
    asked = []
    signal.signal(signal.SIGINT, lambda got, frame: asked.append(got))
    os.write(1, f"running {os.environ['RANK']} {os.getpid()}\n".encode())
    while not asked:
        time.sleep(0.02)
    time.sleep(6.5)
    os.write(1, f"saved {os.environ['RANK']}\n".encode())
    raise SystemExit(130)


def never_stop():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, f"running {os.environ['RANK']} {os.getpid()}\n".encode())
    time.sleep(100)


def launched_inside():
    return launch(large_result, nproc=1)


def sees(name):
    return os.environ.get(name)


if __name__ == "__main__":
    try:
        print(launch(globals()[sys.argv[1]], nproc=int(sys.argv[2])))
    except (PacelineError, RankFailed) as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)
