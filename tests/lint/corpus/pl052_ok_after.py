import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(4, 8).cuda()).mean().backward()
    opt.step()
