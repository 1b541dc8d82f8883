import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)  # PL055
x = torch.ones(1, device="cuda")
dist.all_reduce(x)
