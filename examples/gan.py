"""A GAN on handwritten digits: two models, two optimizers, two losses per step.

torchrun --nproc-per-node 2 examples/gan.py
"""

import torch
from torch import nn

import paceline
from paceline.data.digits import load_digits

NOISE = 16


def build_generator():
    return nn.Sequential(nn.Linear(NOISE, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())


def build_discriminator():
    return nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(64, 1))


def real_or_fake(logits, is_real):
    return nn.functional.binary_cross_entropy_with_logits(
        logits, torch.full_like(logits, float(is_real)), reduction="sum"
    )


def discriminator_loss(models, images):
    with torch.no_grad():  # noise is drawn from generators seeded per microbatch: the same on any layout
        fakes = models["generator"](torch.randn(len(images), NOISE, device=images.device))
    real = real_or_fake(models["discriminator"](images), True)
    fake = real_or_fake(models["discriminator"](fakes), False)
    return real + fake, 2 * len(images)


def generator_loss(models, images):
    fakes = models["generator"](torch.randn(len(images), NOISE, device=images.device))
    return real_or_fake(models["discriminator"](fakes), True), len(images)


def train_gan(update):
    update("discriminator", discriminator_loss)
    update("generator", generator_loss)


def adam(named):
    return torch.optim.Adam([p for _, p in named], lr=2e-4, betas=(0.5, 0.999))


def main():
    digits, _ = load_digits(valid_fraction=0)
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1
    with paceline.start() as world:
        trainer = paceline.Trainer(
            {"generator": build_generator, "discriminator": build_discriminator},
            optimizer={"generator": adam, "discriminator": adam},
            step=train_gan,
            microbatch_size=32,
        )
        loader = trainer.loader(images, global_batch_size=128, epochs=2)
        for batch in loader:
            step = trainer.step(batch)
            if world.is_main and step.number % 10 == 0:
                losses = {name: round(update.loss, 6) for name, update in step.updates.items()}
                print(f"step {step.number}: {losses}")


if __name__ == "__main__":
    main()
