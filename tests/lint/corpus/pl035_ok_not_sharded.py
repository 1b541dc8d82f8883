import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

dist.init_process_group("gloo")
model = FSDP(nn.Linear(64, 64), sharding_strategy=ShardingStrategy.NO_SHARD)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(100):
    model(torch.randn(4, 64)).pow(2).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
