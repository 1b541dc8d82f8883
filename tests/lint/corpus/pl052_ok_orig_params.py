import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8)
probe = torch.optim.SGD(model.parameters(), lr=0.1)
print(len(probe.param_groups))
model = FSDP(model, use_orig_params=True, device_id=dist.get_rank() % 8)
opt = torch.optim.Adam(model.parameters())
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(4, 8).cuda()).mean().backward()
    opt.step()
