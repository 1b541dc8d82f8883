import torch
import torch.distributed as dist
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % 8)
model = DataParallel(torch.nn.Linear(4, 4).cuda())  # PL065
model = DDP(model)
