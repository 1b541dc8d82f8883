import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x):
        return self.bn(self.conv(x)).mean(dim=(1, 2, 3))


def validate(model):
    model.eval()
    with torch.no_grad():
        return model(torch.randn(4, 3, 8, 8)).mean().item()  # PL008


def main():
    dist.init_process_group("gloo")
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(3):
        model.train()
        for _ in range(10):
            opt.zero_grad()
            model(torch.randn(4, 3, 8, 8)).mean().backward()
            opt.step()
        if dist.get_rank() == 0:
            print(epoch, validate(model))


main()
