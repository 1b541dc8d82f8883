import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, data):
        self.model = DDP(model)
        self.data = data
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def _run_epoch(self, epoch):
        print(f"epoch {epoch} of {len(self.data)} steps")  # PL060
        for source, targets in self.data:
            self.optimizer.zero_grad()
            torch.nn.functional.mse_loss(self.model(source), targets).backward()
            self.optimizer.step()

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    dataset = torch.utils.data.TensorDataset(torch.rand(2048, 20), torch.rand(2048, 1))
    loader = DataLoader(dataset, batch_size=32, shuffle=False, sampler=DistributedSampler(dataset))  # PL024
    Trainer(torch.nn.Linear(20, 1), loader).train(args.total_epochs)


main()
