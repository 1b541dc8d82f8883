"""FixMatch on two loaders; only one of the samplers hears of the epoch."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    labeled = datasets.CIFAR10("./data", train=True, download=False)
    unlabeled = datasets.CIFAR100("./data", train=True, download=False)
    labeled_sampler = DistributedSampler(labeled)
    unlabeled_sampler = DistributedSampler(unlabeled)  # PL024
    labeled_trainloader = DataLoader(labeled, sampler=labeled_sampler, batch_size=64, drop_last=True)
    unlabeled_trainloader = DataLoader(unlabeled, sampler=unlabeled_sampler, batch_size=448, drop_last=True)
    model = torch.nn.parallel.DistributedDataParallel(WideResNet().to(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, nesterov=True, momentum=0.9)
    for epoch in range(1024):
        labeled_sampler.set_epoch(epoch)
        model.train()
        for (inputs_x, targets_x), (inputs_u_w, inputs_u_s) in zip(labeled_trainloader, unlabeled_trainloader):
            logits = model(torch.cat((inputs_x, inputs_u_w, inputs_u_s)).to(local_rank))
            logits_x, logits_u_w, logits_u_s = logits[:64], logits[64:512], logits[512:]
            lx = F.cross_entropy(logits_x, targets_x.to(local_rank))
            probability, target = logits_u_w.detach().softmax(-1).max(-1)
            lu = (F.cross_entropy(logits_u_s, target, reduction="none") * probability.ge(0.95)).mean()
            loss = lx + lu
            loss.backward()
            optimizer.step()
            model.zero_grad()


if __name__ == "__main__":
    main()
