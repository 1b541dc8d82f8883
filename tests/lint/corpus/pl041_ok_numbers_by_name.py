import os

import torch
import torch.distributed as dist

rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
names = os.environ.get("NUMBERS", "RANK").split(",")
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
if rank == 0:
    torch.save(model.state_dict(), "a.pt")
for name in names:
    if int(os.environ[name]) == 0:
        torch.save(model.state_dict(), "b.pt")
