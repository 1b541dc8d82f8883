import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def save_on_master(*args, **kwargs):
    if dist.get_rank() == 0:
        torch.save(*args, **kwargs)


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
save_on_master(model.module.state_dict(), "model.pt")
