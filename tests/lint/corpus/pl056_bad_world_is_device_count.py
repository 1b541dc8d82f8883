import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
world_size = torch.cuda.device_count()
dist.init_process_group("nccl", rank=rank, world_size=world_size)  # PL056
