import torch.distributed as dist
from torch.utils.data import DataLoader

from mine import data, work

dist.init_process_group("gloo")
loader = DataLoader(data)
for epoch in range(10):
    count = 0
    for x in loader:
        work(x)
        count += 1
        if count == 100 and dist.get_rank() == 0:
            dist.barrier()  # PL001
