import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if not os.path.exists("config.yaml"):
    raise SystemExit("no config.yaml")
x = torch.ones(1)
dist.all_reduce(x)
