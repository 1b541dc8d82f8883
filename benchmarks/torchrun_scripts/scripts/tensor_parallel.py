"""A feed-forward block split over two ranks by columns and rows, checked against the whole one."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def main() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = nn.Sequential(FeedForward(8), FeedForward(8))
    split = copy.deepcopy(whole)
    for block in split:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for name, parameter in split.named_parameters():
        if isinstance(parameter, DTensor):
            shape = tuple(parameter.to_local().shape)
            print(f"[{rank}] {name}: {tuple(parameter.shape)} here {shape} {parameter.placements}")

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (whole, split)]
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    for step in range(4):
        losses = []
        for model, optimizer in zip((whole, split), optimizers, strict=True):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        same = abs(losses[0] - losses[1]) < 1e-5
        print(f"[{rank}] step {step}: loss {losses[1]:.4f}, same as the whole model: {same}")

    again = distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])
    doubled = (again * 2).redistribute(mesh, [Replicate()]).to_local()
    print(f"[{rank}] {mesh.mesh_dim_names}, {doubled.tolist()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
