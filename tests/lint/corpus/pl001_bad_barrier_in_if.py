import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
data = None
if rank == 0:
    data = torch.load("tokens.pt")
    dist.barrier()  # PL001
print("ready", rank)
dist.destroy_process_group()
