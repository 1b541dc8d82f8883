import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def reduce_mean(tensor, nprocs):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= nprocs
    return rt


dist.init_process_group("gloo")
model = DDP(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(0, 3, (4,)))
    shown = reduce_mean(loss, dist.get_world_size())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(step, shown.item())
