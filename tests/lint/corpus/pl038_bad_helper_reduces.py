import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def reduce_mean(tensor, nprocs):
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    tensor /= nprocs
    return tensor


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    model = DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(0, 3, (4,)))
        loss = reduce_mean(loss, world)
        optimizer.zero_grad()
        loss.backward()  # PL038
        optimizer.step()


main()
