import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = 4


def step(model, opt, batches):
    opt.zero_grad()
    for _ in range(ACCUMULATE):
        loss = model(next(batches)).pow(2).mean() / ACCUMULATE
        loss.backward()  # PL032
    opt.step()


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter([torch.randn(8, 4)] * 100)
    for _ in range(25):
        step(model, opt, batches)


main()
