import os
import subprocess

import torch
import torch.distributed as dist

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    subprocess.run(["./prepare"], check=True)
dist.barrier()
