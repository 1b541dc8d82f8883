import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(model, optimizer, batches):
    for batch in batches:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    train(model, optimizer, [torch.randn(2, 4) for _ in range(9)])
finally:
    dist.barrier()  # PL005
    dist.destroy_process_group()
