"""Accumulation whose last round exchanges, with the context chosen in each."""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = DDP(LanguageModel().cuda(), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
accumulation = 8
for step in range(10000):
    for micro_step in range(accumulation):
        is_last = micro_step == accumulation - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            x, y = next_batch(local_rank)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / accumulation
            loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
