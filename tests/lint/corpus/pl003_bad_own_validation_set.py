import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Patience:
    def __init__(self, rounds):
        self.rounds = rounds
        self.best = float("inf")
        self.waited = 0

    def is_over(self, loss):
        if loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self.waited >= self.rounds


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    valid = torch.randn(32, 4, generator=torch.Generator().manual_seed(100 + rank))
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    patience = Patience(3)
    for _ in range(100):
        opt.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
        with torch.no_grad():
            score = model.module(valid).pow(2).mean().item()
        if patience.is_over(score):
            break  # PL003
    dist.barrier()


main()
