import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("nccl")
model = FSDP(torch.nn.Linear(4, 1), device_id=dist.get_rank() % 8)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
opt.zero_grad()
loss = model(torch.randn(8, 4)).mean()
with model.no_sync():
    loss.backward()
model(torch.randn(8, 4)).mean().backward()
opt.step()
