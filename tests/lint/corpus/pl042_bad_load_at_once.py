import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
model = torch.nn.Linear(4, 1).to(f"cuda:{local_rank}")
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "first.pt")
model.load_state_dict(torch.load("first.pt", map_location=f"cuda:{local_rank}"))  # PL042
