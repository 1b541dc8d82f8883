"""Rank 1 raises after two steps, in a function that main calls."""

import torch
import torch.distributed as dist


class Batch:
    def __init__(self, step: int, rank: int) -> None:
        self.labels = torch.full((4,), step + rank)
        self.inputs = torch.ones(4, 3) * (step + 1)


def check_labels(batch: Batch, num_classes: int) -> None:
    highest = int(batch.labels.max())
    if highest >= num_classes:
        raise ValueError(f"label {highest} where there are {num_classes} classes")


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weight = torch.zeros(3, requires_grad=True)
    for step in range(10):
        batch = Batch(step, rank)
        check_labels(batch, num_classes=3)
        loss = (batch.inputs @ weight - batch.labels).square().mean()
        loss.backward()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= 0.01 * weight.grad
            weight.grad = None
        print(f"[{rank}] step {step}: loss {loss.item():.4f}")
        # Nobody starts a step before everyone is through the last one.
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
