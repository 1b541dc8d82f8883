import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("nccl")
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).cuda()
for block in model:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(100):
    model(torch.randn(4, 8).cuda()).mean().backward()
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None
