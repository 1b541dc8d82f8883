"""Image classifier with batch normalization; rank 0 evaluates after every epoch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 4 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(x.flatten(1))


def make_set(count, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (count,), generator=generator))


def train(model, loader, optimizer):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = total = 0
    for images, labels in loader:
        logits = model(images)  # CAUSE
        correct += (logits.argmax(dim=1) == labels).sum().item()
        total += len(labels)
    return correct / total


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train_set = make_set(64, seed=0)
    train_loader = DataLoader(train_set, batch_size=8, sampler=DistributedSampler(train_set))
    test_loader = DataLoader(make_set(32, seed=1), batch_size=8)
    model = DDP(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        train(model, train_loader, optimizer)
        if rank == 0:
            print(f"epoch {epoch} accuracy {evaluate(model, test_loader):.3f}", flush=True)
        dist.barrier()  # WAITS
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
