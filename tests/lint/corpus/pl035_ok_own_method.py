import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
model = FSDP(nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(100):
    model(torch.randn(4, 64)).pow(2).mean().backward()
    model.clip_grad_norm_(1.0)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
