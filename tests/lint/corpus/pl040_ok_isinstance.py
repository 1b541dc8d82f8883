import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def save(model, path):
    if isinstance(model, (DDP, torch.nn.DataParallel)):
        torch.save(model.module.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)


def save_again(model, path):
    if hasattr(model, "module"):
        torch.save(model.module.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 4))
if dist.get_rank() == 0:
    save(model, "a.pt")
    save_again(model, "b.pt")
