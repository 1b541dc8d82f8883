import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_


class Loop:
    def __init__(self, model):
        self.model = DDP(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scaler = torch.amp.GradScaler()

    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x).mean()
        self.scaler.scale(loss).backward()
        clip_grad_norm_(self.model.parameters(), max_norm=1.0)  # PL034
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()


dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % 8)
loop = Loop(torch.nn.Linear(4, 4).cuda())
for _ in range(10):
    loop.step(torch.randn(4, 4).cuda())
