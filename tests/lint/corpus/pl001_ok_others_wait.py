import os

import torch.distributed as dist
from huggingface_hub import snapshot_download

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
if local_rank != 0:
    dist.barrier()
path = snapshot_download("gpt2")
if local_rank == 0:
    dist.barrier()
