import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net = torch.nn.Linear(4, 1)
model = DDP(net)
model(torch.randn(4, 4)).mean().backward()
if dist.get_rank() == 0:
    torch.save(net.state_dict(), "model.pt")
