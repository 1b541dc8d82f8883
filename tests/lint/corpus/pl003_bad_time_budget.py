import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
start = time.time()
total = torch.zeros(1)
while time.time() - start < 3600:  # PL003
    dist.all_reduce(total)
