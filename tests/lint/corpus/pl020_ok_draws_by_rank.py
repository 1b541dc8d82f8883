import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
own = torch.Generator().manual_seed(dist.get_rank())
loader = DataLoader(TensorDataset(torch.randn(320, 6, generator=own)), batch_size=32)
model = DDP(torch.nn.Linear(6, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in loader:
    opt.zero_grad()
    model(x).mean().backward()
    opt.step()
