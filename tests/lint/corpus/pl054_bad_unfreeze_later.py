import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision.models import resnet18


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    net = resnet18()
    net.requires_grad_(False)
    net.fc.requires_grad_(True)
    model = DDP(net.cuda())
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(10):
        if epoch == 5:
            model.requires_grad_(True)  # PL054
        for _ in range(100):
            opt.zero_grad()
            model(torch.randn(4, 3, 64, 64).cuda()).mean().backward()
            opt.step()


main()
