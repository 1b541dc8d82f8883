import torch.distributed as dist
from torchvision import datasets

dist.init_process_group("nccl")
if dist.get_rank() == 0:
    datasets.CIFAR10("data", download=True)
dist.barrier()
train = datasets.CIFAR10("data")
