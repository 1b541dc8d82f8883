import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    model = nn.Linear(8, 1)  # PL826
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 1)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()


if __name__ == "__main__":
    main()
