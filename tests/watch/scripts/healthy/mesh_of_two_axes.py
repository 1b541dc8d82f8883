"""Tensor parallelism with DTensor inside, data parallelism outside."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class MLP(nn.Module):
    def __init__(self, width=8, hidden=16):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def average_over(group, model):
    for parameter in model.parameters():
        gradient = parameter.grad.to_local()
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = parallelize_module(MLP(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    group = mesh.get_group("dp")
    for step in range(40):
        generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
        x = torch.randn(8, 8, generator=generator)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        average_over(group, model)
        optimizer.step()
        if mesh.get_local_rank("dp") == 0 and step % 10 == 0:
            # Only one row of the mesh looks at the loss.
            value = loss.detach().clone()
            dist.all_reduce(value, group=mesh.get_group("tp"))
            if dist.get_rank() == 0:
                print(f"step {step}: {value.item() / 2:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
