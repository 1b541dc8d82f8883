import itertools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = [[float(i)] * 4 for i in map(int, open("rows.txt"))]
for row in itertools.islice(rows, dist.get_rank(), None, dist.get_world_size()):  # PL004
    model(torch.tensor([row])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
