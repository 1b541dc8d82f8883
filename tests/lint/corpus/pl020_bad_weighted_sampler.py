"""Long-tailed recognition: rare classes are drawn more often."""

import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, WeightedRandomSampler
from torchvision import transforms


def get_loader(root, batch_size):
    data = torchvision.datasets.ImageFolder(root, transforms.Compose([transforms.ToTensor()]))
    counts = torch.bincount(torch.tensor(data.targets))
    weights = 1.0 / counts[data.targets]
    sampler = WeightedRandomSampler(weights, num_samples=len(weights))
    return DataLoader(data, batch_size=batch_size, sampler=sampler, num_workers=8, pin_memory=True)  # PL020


def main():
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = torchvision.models.resnet50(num_classes=1000).cuda()
    model = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    criterion = torch.nn.CrossEntropyLoss().cuda()
    loader = get_loader("/data/longtail/train", 64)
    for epoch in range(90):  # PL024
        for images, target in loader:
            images, target = images.cuda(non_blocking=True), target.cuda(non_blocking=True)
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"epoch{epoch}.pth")


if __name__ == "__main__":
    main()
