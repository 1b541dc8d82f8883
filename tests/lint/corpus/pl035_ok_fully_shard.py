import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(100):
    model(torch.randn(4, 64)).pow(2).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of DTensors: the norm of the whole
    optimizer.step()
    optimizer.zero_grad()
