"""Handlers of signals, functions for the end of the process, and threads."""

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

logging.basicConfig(stream=sys.stdout, format="%(message)s, %(levelname)s %(processName)s %(threadName)s")
log = logging.getLogger("job")
log.setLevel(logging.INFO)
caught: list[str] = []


def handle(number: int, frame: object) -> None:
    caught.append(signal.Signals(number).name)


def describe_handlers() -> str:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1)
    handlers = ((number.name, signal.getsignal(number)) for number in numbers)
    return ", ".join(f"{name} {getattr(handler, '__name__', handler)!s}" for name, handler in handlers)


def main() -> None:
    rank = int(os.environ["RANK"])
    print(f"[{rank}] handlers at start: {describe_handlers()}")
    print(f"[{rank}] blocked {sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))}")
    print(f"[{rank}] threads at start {[thread.name for thread in threading.enumerate()]}")
    print(f"[{rank}] children at start {multiprocessing.active_children()}")
    atexit.register(print, f"[{rank}] atexit, registered first, runs last")
    atexit.register(lambda: print(f"[{rank}] atexit, group up: {dist.is_initialized()}"))
    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGUSR1, handle)

    dist.init_process_group("gloo")
    results: list[float] = []
    work = [threading.Thread(target=lambda n=n: results.append(torch.ones(n).sum().item())) for n in (3, 4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    total = torch.tensor(results).sum()
    dist.all_reduce(total)
    log.info("[%d] of %d: total %.0f", rank, dist.get_world_size(), total)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(os.getpid(), number)
    print(f"[{rank}] caught {caught}, thread {threading.current_thread() is threading.main_thread()}")

    def leave() -> None:
        threading.Event().wait(0.3)
        print(f"[{rank}] a thread that outlives main")

    threading.Thread(target=leave).start()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
