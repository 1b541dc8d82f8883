import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank % 8)
model = DDP(torch.nn.Linear(4, 4).cuda())
opt = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda")
for step in range(10):
    opt.zero_grad()
    with torch.autocast("cuda"):
        loss = model(torch.randn(4, 4).cuda()).sum()
    scaler.scale(loss).backward()
    if rank == 0:
        scaler.step(opt)  # PL013
        scaler.update()
