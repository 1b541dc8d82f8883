"""Sets variables that torch reads when it is imported or first used, before it imports torch."""

import os

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"

import torch
import torch.distributed as dist


def find_error() -> str:
    try:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    message = find_error()
    print(f"[{rank}] debug level {dist.get_debug_level()}")
    print(f"[{rank}] threads {torch.get_num_threads()}, OMP_NUM_THREADS {os.environ['OMP_NUM_THREADS']}")
    report = torch.__config__.parallel_info()
    for line in report.splitlines():
        if "omp_get_max_threads" in line or "OMP_NUM_THREADS" in line:
            print(f"[{rank}] {line.strip()}")
    print(
        f"[{rank}] {message.splitlines()[0]}; C++ frames in the message: {'C++ CapturedTraceback' in message}"
    )

    # With DETAIL a group compares the shapes of its ranks' collectives.
    try:
        dist.all_reduce(torch.ones(2 + rank))
    except RuntimeError as error:
        print(f"[{rank}] {type(error).__name__}: {str(error).split(',')[0].splitlines()[0]}")
    total = torch.ones(3)
    dist.all_reduce(total)
    print(f"[{rank}] {total.tolist()}, group {type(dist.distributed_c10d._get_default_group()).__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
