import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--distributed", action="store_true")
args = parser.parse_args()
if args.distributed:
    dist.init_process_group("gloo")
train = TensorDataset(torch.randn(100, 4))
sampler = DistributedSampler(train) if args.distributed else None
loader = DataLoader(train, batch_size=10, shuffle=sampler is None, sampler=sampler)
model = torch.nn.Linear(4, 1)
if args.distributed:
    model = DDP(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    if args.distributed:
        sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
