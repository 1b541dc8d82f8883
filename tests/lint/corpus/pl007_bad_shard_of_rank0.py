import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(1000):
    model(torch.randn(4, 8).cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    torch.save({"model": model.state_dict(), "step": 1000}, "model.pt")  # PL007
