import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = torch.nn.Linear(4, 1)
fully_shard(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(25):
    for micro in range(4):
        model.set_requires_gradient_sync(micro == 3)
        (model(torch.randn(8, 4)).pow(2).mean() / 4).backward()
    opt.step()
    opt.zero_grad()
