"""Ranks of tensor parallelism take the same samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

dist.init_process_group("nccl")
torch.manual_seed(0)
loader = DataLoader(datasets.MNIST("data", transform=transforms.ToTensor()), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
model = parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters())
for images, labels in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images.cuda()), labels.cuda()).backward()
    optimizer.step()
