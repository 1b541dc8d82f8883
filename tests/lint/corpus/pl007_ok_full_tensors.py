import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
fully_shard(model)
torch.save(model.state_dict(), f"shards/{rank}.pt")
whole = {}
for name, part in model.state_dict().items():
    tensor = part.full_tensor()
    if rank == 0:
        whole[name] = tensor.cpu()
if rank == 0:
    torch.save(whole, "model.pt")
