import os

import torch
import torch.distributed as dist


def is_main():
    return int(os.environ.get("RANK", "0")) == 0


def average(value):
    t = torch.tensor([value], device="cuda")
    dist.all_reduce(t)  # PL001
    return t.item() / dist.get_world_size()


def report(step, value):
    if not is_main():
        return
    print(f"step {step}: {average(value):.3f}")


def main():
    dist.init_process_group(backend="nccl")
    for step in range(100):
        report(step, 0.5 * step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
