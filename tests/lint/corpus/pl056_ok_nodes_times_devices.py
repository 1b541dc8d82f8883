import os

import torch
import torch.distributed as dist

nodes = int(os.environ["SLURM_NNODES"])
world_size = nodes * torch.cuda.device_count()
dist.init_process_group("nccl", rank=int(os.environ["SLURM_PROCID"]), world_size=world_size)
