import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    opt.zero_grad()
    model(torch.randn(4, 4)).mean().backward()
    opt.step()
    torch.save(model.module.state_dict(), f"epoch{epoch}.pt")  # PL041
