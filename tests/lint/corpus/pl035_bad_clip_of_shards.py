import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = FSDP(nn.Linear(64, 64).cuda())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(100):
    loss = model(torch.randn(4, 64).cuda()).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # PL035
    optimizer.step()
    optimizer.zero_grad()
