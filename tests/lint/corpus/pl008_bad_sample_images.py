"""A diffusion model that draws samples on rank 0 through the wrapper."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class UNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.inp = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, t):
        return self.out(torch.relu(self.norm(self.inp(x)) + t.view(-1, 1, 1, 1)))


@torch.no_grad()
def sample(model, steps=50):
    x = torch.randn(16, 3, 32, 32, device="cuda")
    for t in reversed(range(steps)):
        noise = model(x, torch.full((16,), t / steps, device="cuda"))  # PL008
        x = x - noise / steps
    return x


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = DDP(UNet().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step, images in enumerate(image_stream(dist.get_rank())):
        images = images.cuda()
        t = torch.rand(len(images), device="cuda")
        noise = torch.randn_like(images)
        loss = (model(images + noise * t.view(-1, 1, 1, 1), t) - noise).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 1000 == 0 and dist.get_rank() == 0:
            save_grid(sample(model), f"samples/{step}.png")


if __name__ == "__main__":
    main()
