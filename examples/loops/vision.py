"""Images with mixup, an average of weights, a GradScaler and BatchNorm.

python examples/loops/vision.py
torchrun --nproc-per-node 2 examples/loops/vision.py
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader, TensorDataset

import paceline


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(8 * 4 * 4, 4)

    def forward(self, images):
        return self.head(self.layers(images))


def make_data():
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(80, 1, 8, 8, generator=generator)
    return TensorDataset(images, images.flatten(1)[:, :4].argmax(1))


def mix(images, labels):
    share, order = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(images))
    targets = one_hot(labels, 4).float()
    return share * images + (1 - share) * images[order], share * targets + (1 - share) * targets[order]


def train(layout="", folder="runs/vision"):
    torch.manual_seed(2)
    model = Convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5)
    loop = paceline.Loop(
        model, optimizer, layout=layout, microbatch_size=4, on_nonfinite="keep", means=["accuracy"]
    )
    average = paceline.Average(model, 0.9)
    loader = loop.loader(DataLoader(make_data(), batch_size=20, shuffle=True, drop_last=True), epochs=5)
    loop.track(scaler=scaler, ema=average)
    loop.resume(folder)
    for step in loader:
        for images, labels in step:
            images, targets = mix(images, labels)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(images)
                loss = cross_entropy(logits.float(), targets)
            step.mean("accuracy", (logits.argmax(1) == labels).float().mean())
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        step.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update()
        if step.number % 5 == 0:
            loop.save()
            if loop.world.is_main:
                print(f"step {step.number}: accuracy {step.means['accuracy']:.4f}")
    return loop


if __name__ == "__main__":
    with paceline.start():
        train(*sys.argv[1:])
