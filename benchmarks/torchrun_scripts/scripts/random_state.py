"""Which generators start alike on all ranks where a script seeds nothing, and what seeding gives."""

import os
import random
import uuid

import numpy as np
import torch
import torch.distributed as dist


def same_on_all(value: object) -> bool:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(each == values[0] for each in values)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    unseeded = {
        "torch.initial_seed": torch.initial_seed(),
        "torch.rand": torch.rand(3).tolist(),
        "random.random": random.random(),
        "numpy.random.rand": float(np.random.rand()),
        "numpy.random.default_rng": float(np.random.default_rng().random()),
        "uuid4": str(uuid.uuid4()),
        "os.urandom": os.urandom(8),
        "process id": os.getpid(),
    }
    for name, value in unseeded.items():
        print(f"[{rank}] {name}: same on all ranks {same_on_all(value)}")
    print(f"[{rank}] threads {torch.get_num_threads()}, dtype {torch.get_default_dtype()}")
    print(f"[{rank}] deterministic {torch.are_deterministic_algorithms_enabled()}, {torch.is_grad_enabled()}")

    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    np.random.seed(1 + rank)
    print(f"[{rank}] seeded {torch.rand(1).item():.6f} {random.random():.6f} {np.random.rand():.6f}")
    dropped = torch.nn.functional.dropout(torch.ones(8), 0.5)
    print(f"[{rank}] dropout {dropped.tolist()}, permutation {torch.randperm(6).tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
