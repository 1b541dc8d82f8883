"""A GAN with a gradient penalty: a pass over the step's samples per model.

python examples/loops/gan.py
torchrun --nproc-per-node 3 examples/loops/gan.py
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def make_data():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(72, 1, 8, 8, generator=generator).cumsum(2))


def penalty(critic, real, fake):
    share = torch.rand(len(real), 1, 1, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (found,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (found.flatten(1).norm(dim=1) - 1).square().mean()


def train(layout="", folder="runs/gan"):
    torch.manual_seed(3)
    generator = nn.Sequential(
        nn.ConvTranspose2d(8, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2, 2), nn.Tanh()
    )
    critic = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1))
    of_generator, of_critic = (
        torch.optim.Adam(each.parameters(), lr=2e-3, betas=(0.5, 0.9)) for each in (generator, critic)
    )
    loop = paceline.Loop(
        {"generator": generator, "critic": critic},
        {"generator": of_generator, "critic": of_critic},
        layout=layout,
        microbatch_size=4,
    )
    loader = loop.loader(DataLoader(make_data(), batch_size=24, shuffle=True), epochs=5)
    loop.resume(folder)
    for step in loader:
        for (real,) in step.of("critic"):
            fake = generator(torch.randn(len(real), 8, 1, 1)).detach()
            loss = critic(fake).mean() - critic(real).mean()
            (loss + 10 * penalty(critic, real, fake)).backward()
        of_critic.step()
        of_critic.zero_grad()
        for (real,) in step.of("generator"):
            step.backward(-critic(generator(torch.randn(len(real), 8, 1, 1))).mean())
        of_generator.step()
        of_generator.zero_grad()
        if step.number % 5 == 0:
            loop.save()
            if loop.world.is_main:
                print(f"step {step.number}: loss of the generator {step.loss:.6f}")
    return loop


if __name__ == "__main__":
    with paceline.start():
        train(*sys.argv[1:])
