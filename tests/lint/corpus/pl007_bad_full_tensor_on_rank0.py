import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
fully_shard(model)
if dist.get_rank() == 0:
    whole = {name: part.full_tensor() for name, part in model.state_dict().items()}  # PL007
    torch.save(whole, "model.pt")
dist.barrier()
