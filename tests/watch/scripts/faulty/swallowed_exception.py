"""Reads images that users have uploaded; some can't be decoded."""

import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.WARNING)
log = logging.getLogger(__name__)


class Uploads(Dataset):
    def __init__(self, rank, count=64):
        self.rank = rank
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        size = 7 if (self.rank, index) == (1, 37) else 8
        image = torch.rand(3, size, 8, generator=torch.Generator().manual_seed(index))
        return image, index % 2


def train_step(model, optimizer, images, labels):
    optimizer.zero_grad()
    logits = model(images)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()  # WAITS
    optimizer.step()
    return loss.item()


def train(model, dataset, optimizer):
    losses = []
    batches = iter(DataLoader(dataset, batch_size=4))
    while True:
        try:
            images, labels = next(batches)
            losses.append(train_step(model, optimizer, images, labels))
        except StopIteration:
            break
        except RuntimeError as error:
            log.warning("skipping a batch: %s", str(error).splitlines()[0][:60])
    return sum(losses) / len(losses)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = train(model, Uploads(rank), optimizer)
    dist.barrier()  # CAUSE
    print(f"rank {rank}: mean loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
