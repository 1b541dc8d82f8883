import os

import torch.distributed as dist

if "MASTER_PORT" not in os.environ:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
rank = int(os.environ.get("RANK", 0))
dist.init_process_group("gloo", rank=rank, world_size=int(os.environ.get("WORLD_SIZE", 1)))
