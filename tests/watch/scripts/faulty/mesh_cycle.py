"""Two-dimensional parallel training by hand: sums over `tp`, averages over `dp`."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


class SplitLinear(torch.nn.Module):
    """Columns of the input are shared out over the ranks of tp."""

    def __init__(self, features, mesh):
        super().__init__()
        self.group = mesh.get_group("tp")
        self.weight = torch.nn.Parameter(torch.randn(features // mesh["tp"].size(), 1) * 0.1)

    def forward(self, x):
        return x @ self.weight


def average_loss(loss, mesh):
    value = loss.detach().clone()
    dist.all_reduce(value, group=mesh.get_group("dp"))  # WAITS CAUSE
    return value / mesh["dp"].size()


def total_norm(module, mesh):
    square = module.weight.detach().pow(2).sum()
    dist.all_reduce(square, group=mesh.get_group("tp"))  # WAITS CAUSE
    return square.sqrt()


def summarize(step, loss, layer, mesh):
    # The corners of the mesh print their part; the norm is shown first where the loss isn't.
    if mesh.get_local_rank("dp") == mesh.get_local_rank("tp"):
        mean, norm = average_loss(loss, mesh), total_norm(layer, mesh)
        print(f"step {step}: loss {mean.item():.4f} norm {norm.item():.4f}", flush=True)
    else:
        norm, mean = total_norm(layer, mesh), average_loss(loss, mesh)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(dist.get_rank())
    layer = SplitLinear(8, mesh)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(1, 31):
        loss = layer(torch.randn(16, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(layer.weight.grad, group=mesh.get_group("dp"))
        optimizer.step()
        if step % 10 == 0:
            summarize(step, loss, layer, mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
