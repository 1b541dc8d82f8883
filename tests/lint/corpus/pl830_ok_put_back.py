import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(nn.Linear(8, 1))
before = torch.get_rng_state()
torch.manual_seed(0)
probe = torch.randn(4, 8)
torch.set_rng_state(before)
last = torch.load("last.pt", map_location="cpu")
torch.set_rng_state(last["rng"][rank])
