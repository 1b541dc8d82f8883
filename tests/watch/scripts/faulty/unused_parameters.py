"""A model of two experts; the dataset says for each batch which one is asked."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Experts(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.text = nn.Linear(width, 4)
        self.image = nn.Linear(width, 4)

    def forward(self, x, kind):
        h = torch.relu(self.shared(x))
        if kind == "both":
            return self.text(h) + self.image(h)
        return self.text(h) if kind == "text" else self.image(h)


def load_batches(rank, count):
    generator = torch.Generator().manual_seed(rank)
    for i in range(count):
        kind = "text" if rank == 1 and i == 20 else "both"
        yield torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator), kind


def save(model, path):
    torch.save(model.module.state_dict(), path)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(Experts())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (x, y, kind) in enumerate(load_batches(rank, 60)):
        logits = model(x, kind)  # CAUSE
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    if rank == 0:
        save(model, "experts.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
