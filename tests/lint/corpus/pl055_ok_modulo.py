import torch
import torch.distributed as dist

dist.init_process_group("nccl")
device = dist.get_rank() % torch.cuda.device_count()
torch.cuda.set_device(device)
dist.all_reduce(torch.ones(1, device="cuda"))
