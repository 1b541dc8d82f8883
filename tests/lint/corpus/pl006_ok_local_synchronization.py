import torch
import torch.distributed as dist

dist.init_process_group("nccl")
if dist.get_rank() < 2:
    pair = dist.new_group([0, 1], use_local_synchronization=True)
    x = torch.ones(1, device="cuda")
    dist.all_reduce(x, group=pair)
