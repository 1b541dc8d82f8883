import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(100):
    x = torch.randn(8, 4)
    try:
        opt.zero_grad()
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        opt.step()
    except RuntimeError as error:  # PL005
        print("skipped", step, error)
        continue
