import torch
import torch.distributed as dist

dist.init_process_group("gloo")
half = dist.new_group([0, 1, 2, 3, 4, 5, 6, 7])
x = torch.ones(3)
if dist.get_rank() < 8:
    parts = [torch.empty_like(x) for _ in range(8)]
    dist.all_gather(parts, x, group=half)
