"""Training with Lightning Fabric, which finds that its processes were started already."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def make_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    x = torch.rand(192, 6, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(2, verbose=False)
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(make_dataset(), batch_size=16, shuffle=True))
    print(f"[{fabric.global_rank}] of {fabric.world_size}, {len(loader)} batches")

    for epoch in range(4):
        for step, (x, y) in enumerate(loader):
            accumulating = step % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = F.mse_loss(model(x), y)
                fabric.backward(loss / 2)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        fabric.print(f"[0] epoch {epoch}: loss {mean.item():.4f}")

    fabric.save("fabric.ckpt", {"model": model, "epoch": epoch})
    rest = fabric.load("fabric.ckpt", {"model": model})
    print(f"[{fabric.global_rank}] loaded, rest {rest}")


if __name__ == "__main__":
    main()
