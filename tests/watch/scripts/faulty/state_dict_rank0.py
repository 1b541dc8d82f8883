"""FSDP2 training that exports full weights at the end."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class MLP(torch.nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def build():
    torch.manual_seed(0)
    model = MLP()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(model, steps=15):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(8, 16)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def export(model, path):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # WAITS
    torch.save(weights, path)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build()
    loss = train(model)
    if rank == 0:
        export(model, "model.pt")
        print(f"saved, loss {loss:.4f}", flush=True)
    dist.barrier()  # CAUSE
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
