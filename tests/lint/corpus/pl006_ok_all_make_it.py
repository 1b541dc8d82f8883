import torch
import torch.distributed as dist

dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
if dist.get_rank() in (0, 1):
    x = torch.ones(1)
    dist.all_reduce(x, group=pair)
