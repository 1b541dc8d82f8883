import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.linear(self.norm(x)))


def build(mesh, width=16, depth=2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(width) for _ in range(depth)))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def load_labels(rank):
    """The last rank keeps the labels of the held-out set."""
    return torch.randint(0, 2, (32,)) if rank == dist.get_world_size() - 1 else None


def train(model, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = model(torch.randn(4, 16)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    labels = load_labels(dist.get_rank())
    if labels is None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))  # WAITS
        loss = train(build(mesh), steps=20)
        print(f"rank {dist.get_rank()}: {loss:.4f}", flush=True)
    dist.barrier()  # CAUSE
    if labels is not None:
        print(f"{labels.float().mean().item():.2f} of the labels are 1", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
