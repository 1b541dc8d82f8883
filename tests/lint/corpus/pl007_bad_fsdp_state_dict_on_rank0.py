import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank % torch.cuda.device_count())
model = FSDP(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(10):
    optimizer.zero_grad()
    model(torch.randn(4, 64).cuda()).sum().backward()
    optimizer.step()
if rank == 0:
    torch.save(model.state_dict(), "model.pt")  # PL007
