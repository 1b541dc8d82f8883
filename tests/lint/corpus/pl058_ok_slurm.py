import os

import torch.distributed as dist

os.environ["MASTER_PORT"] = "29500"
os.environ["MASTER_ADDR"] = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("nccl", rank=rank, world_size=world)
