import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group(backend="nccl")
    device = torch.device("cuda")
    model = torch.nn.Linear(4, 4).to(device)
    model = DistributedDataParallel(model)  # PL057
    model(torch.randn(4, 4, device=device)).mean().backward()


main()
