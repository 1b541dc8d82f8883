import os

import torch.distributed as dist

os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "1"
dist.init_process_group("gloo", rank=0, world_size=1)
dist.barrier()
