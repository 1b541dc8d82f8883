import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

USE_AMP = bool(int(input()))
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % 8)
model = DDP(torch.nn.Linear(4, 1).cuda())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda", enabled=USE_AMP)
for step in range(25):
    opt.zero_grad()
    loss = model(torch.randn(8, 4).cuda()).pow(2).mean()
    if USE_AMP:
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
    else:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
