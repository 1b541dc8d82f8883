"""Tensor parallelism in two halves, replicated twice; a regularizer on the first half's weights."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


class RowParallel(torch.nn.Module):
    def __init__(self, features, out, group):
        super().__init__()
        self.group = group
        self.part = features // dist.get_world_size(group)
        self.start = dist.get_rank(group) * self.part
        self.weight = torch.nn.Parameter(torch.randn(self.part, out) * 0.1)

    def forward(self, x):
        return x[:, self.start : self.start + self.part] @ self.weight


def global_norm(weight, group):
    square = weight.detach().pow(2).sum()
    dist.all_reduce(square, group=group)  # WAITS
    return square.sqrt()


def penalty(layer, mesh):
    if mesh.get_local_rank("tp") == 0:
        return 1e-3 * global_norm(layer.weight, mesh.get_group("tp"))
    return torch.zeros(())


def sync(layer, mesh):
    group = mesh.get_group("dp")
    dist.all_reduce(layer.weight.grad, group=group)
    layer.weight.grad /= dist.get_world_size(group)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(mesh.get_local_rank("tp"))
    layer = RowParallel(12, 3, mesh.get_group("tp"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    for step in range(60):
        extra = penalty(layer, mesh) if step >= 30 else 0.0
        loss = layer(torch.randn(8, 12)).pow(2).mean() + extra
        optimizer.zero_grad()
        loss.backward()
        sync(layer, mesh)
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    dist.barrier()  # CAUSE
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
