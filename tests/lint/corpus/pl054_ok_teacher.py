import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
student = DDP(nn.Linear(4, 4))
teacher = nn.Linear(4, 4)
teacher.requires_grad_(False)
teacher.load_state_dict(student.module.state_dict())
opt = torch.optim.SGD(student.parameters(), lr=0.1)
for _ in range(10):
    x = torch.randn(4, 4)
    opt.zero_grad()
    (student(x) - teacher(x)).pow(2).mean().backward()
    opt.step()
