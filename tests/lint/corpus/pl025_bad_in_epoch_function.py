import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DATASET = TensorDataset(torch.randn(100, 4))


def run_epoch(model, opt, sampler, epoch):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(DATASET, 10, sampler=sampler, num_workers=2):  # PL025
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(DATASET)
    for epoch in range(20):
        run_epoch(model, opt, sampler, epoch)


main()
