import torch
import torch.distributed as dist

# The other half is reader.py, which joins as rank 1.
dist.init_process_group("gloo", init_method="tcp://10.0.0.4:29500", rank=0, world_size=2)
dist.send(torch.ones(4), dst=1)
