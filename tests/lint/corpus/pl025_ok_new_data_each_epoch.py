import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for part in range(20):
    dataset = TensorDataset(torch.load(f"part{part}.pt", map_location="cpu"))
    loader = DataLoader(dataset, batch_size=10, sampler=DistributedSampler(dataset), num_workers=2)
    for (x,) in loader:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
