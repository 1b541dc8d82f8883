import itertools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def stream():
    while True:
        yield torch.randn(1, 4)


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank, size = dist.get_rank(), dist.get_world_size()
for step, row in enumerate(itertools.islice(stream(), rank, None, size)):
    model(row).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 100:
        break
for row in itertools.islice(itertools.cycle([torch.ones(1, 4)] * 3), rank, None, size):
    model(row).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
