"""Samples come from an average of the weights, which no wrapper holds."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def update_ema(ema, model, decay=0.999):
    for average, value in zip(ema.parameters(), model.parameters()):
        average.mul_(decay).add_(value, alpha=1 - decay)


def main():
    dist.init_process_group("nccl")
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 3, 3, padding=1)).to(device)
    ema = copy.deepcopy(model).eval()
    for p in ema.parameters():
        p.requires_grad = False
    model = DDP(model, device_ids=[device])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step, images in enumerate(image_stream(dist.get_rank())):
        loss = (model(images.to(device)) - images.to(device)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_ema(ema, model.module)
        if step % 1000 == 0 and dist.get_rank() == 0:
            with torch.no_grad():
                save_grid(ema(torch.randn(16, 3, 32, 32, device=device)), f"samples/{step}.png")


main()
