import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
threads = os.cpu_count() // torch.cuda.device_count()
torch.set_num_threads(threads)
loss = torch.ones(1, device="cuda")
dist.all_reduce(loss)
loss /= dist.get_world_size()
