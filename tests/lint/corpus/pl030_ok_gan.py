"""A GAN under DDP: each network's gradients are cleared before its own backward."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


dist.init_process_group("gloo")
generator = DDP(nn.Linear(16, 64), broadcast_buffers=False)
discriminator = DDP(nn.Linear(64, 1), broadcast_buffers=False)
g_optim = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0, 0.99))
d_optim = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0, 0.99))
for i in range(1000):
    real = torch.randn(8, 64)
    requires_grad(generator, False)
    requires_grad(discriminator, True)
    fake = generator(torch.randn(8, 16))
    d_loss = nn.functional.softplus(discriminator(fake)).mean()
    d_loss = d_loss + nn.functional.softplus(-discriminator(real)).mean()
    discriminator.zero_grad()
    d_loss.backward()
    d_optim.step()
    requires_grad(generator, True)
    requires_grad(discriminator, False)
    g_loss = nn.functional.softplus(-discriminator(generator(torch.randn(8, 16)))).mean()
    generator.zero_grad()
    g_loss.backward()
    g_optim.step()
