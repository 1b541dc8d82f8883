import os

# The values of the last job; single-node runs don't set them.
os.environ["WORLD_SIZE"] = "4"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(64, 32),
            torch.nn.ReLU(),
            torch.nn.Linear(32, 10),
        )

    def forward(self, images):
        return self.layers(images)


def digits(count=128):
    return TensorDataset(torch.rand(count, 1, 8, 8), torch.randint(0, 10, (count,)))


def train(model, loader, epochs=2):
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"rank {dist.get_rank()} epoch {epoch} loss {loss.item():.3f}", flush=True)


def main():
    dist.init_process_group("gloo")  # WAITS
    model = torch.nn.parallel.DistributedDataParallel(Classifier())
    dataset = digits()
    train(model, DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset)))
    dist.destroy_process_group()


main()
