"""Data-parallel training of a small classifier, started with torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_dataset(num_samples: int = 512) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_samples, 20, generator=generator)
    y = (x[:, :4].argmax(dim=1) + (x.sum(dim=1) > 0)) % 4
    return TensorDataset(x, y)


def evaluate(model: torch.nn.Module, dataset: TensorDataset) -> float:
    model.eval()
    with torch.no_grad():
        x, y = dataset.tensors
        accuracy = (model(x).argmax(dim=1) == y).float().mean()
    model.train()
    return accuracy.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    print(f"[{rank}] of {world_size} (local rank {local_rank}): {len(loader)} batches per epoch")

    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = F.cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"[{rank}] epoch {epoch}: loss {total.item() / len(loader) / world_size:.4f}")

    if rank == 0:
        torch.save(ddp.module.state_dict(), "model.pt")
    dist.barrier()
    model.load_state_dict(torch.load("model.pt"))
    print(f"[{rank}] accuracy {evaluate(model, dataset):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
