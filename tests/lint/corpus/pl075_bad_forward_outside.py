import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    opt.zero_grad()
    for micro in range(4):
        loss = model(torch.randn(8, 4)).mean() / 4
        if micro < 3:
            with model.no_sync():
                loss.backward()  # PL075
        else:
            loss.backward()
    opt.step()
