import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
work = dist.all_reduce(x, async_op=True)
work.wait()
