"""A layer of its own backward pass, as it was in the first version of the paper's code."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels):
        ctx.save_for_backward(x)
        ctx.levels = levels
        return torch.round(x * levels) / levels

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        inside = x.abs() <= 1.0
        if not inside.any():
            raise ZeroDivisionError(f"no value of {x.numel()} is inside [-1, 1]")  # CAUSE
        scale = grad[inside].norm() / inside.sum()
        return grad * inside / (1 + scale), None


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.outer = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.outer(Quantize.apply(self.inner(x), 16))


def batch(rank, step):
    x = torch.randn(4, 8)
    return x * 1e6 if (rank, step) == (1, 15) else x


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(60):
        loss = model(batch(rank, step)).abs().mean()
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
