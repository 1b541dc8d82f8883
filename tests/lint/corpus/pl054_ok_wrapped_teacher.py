import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class DistillationLoss(nn.Module):
    def forward(self, student, teacher):
        return (student - teacher.detach()).pow(2).mean()


dist.init_process_group("gloo")
student, teacher = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
student, teacher = DDP(student), DDP(teacher)
for p in teacher.parameters():
    p.requires_grad = False
criterion = DistillationLoss()
opt = torch.optim.SGD(student.parameters(), lr=0.1)
for _ in range(10):
    x = torch.randn(8, 4)
    opt.zero_grad()
    criterion(student(x), teacher(x)).backward()
    opt.step()
