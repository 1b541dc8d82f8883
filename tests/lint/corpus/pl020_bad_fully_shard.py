import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
data = datasets.CIFAR10("data", transform=transforms.ToTensor())
loader = DataLoader(data, batch_size=64, shuffle=True)  # PL020
model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for images, labels in loader:
    loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
