"""A loop that draws its batches itself: random windows of one long text, and accumulation over microbatches.

python examples/loops/batches_of_its_own.py
torchrun --nproc-per-node 3 examples/loops/batches_of_its_own.py
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline

TEXT = torch.arange(2000).mul(7).remainder(31).add(torch.arange(2000).remainder(5)).remainder(24)
LENGTH, NUM_MICROBATCHES = 16, 6


def draw_batch():
    places = torch.randint(len(TEXT) - LENGTH - 1, (4,))
    windows = torch.stack([TEXT[place : place + LENGTH + 1] for place in places])
    return windows[:, :-1], windows[:, 1:]


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, 24)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(-1, 1)
            x = x + self.dropout(torch.tanh(layer(past)))
        return self.head(x)


def train(layout="", folder="runs/batches-of-its-own", num_steps=20):
    torch.manual_seed(1)
    model = CharModel()
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    loop = paceline.Loop(model, optimizer, layout=layout)
    for number in range(loop.resume(folder), num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - number / num_steps)
        step = loop.step(NUM_MICROBATCHES)
        for _ in step:
            x, y = draw_batch()
            step.backward(cross_entropy(model(x).flatten(0, 1), y.flatten()))
        step.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step.number % 5 == 0:
            loop.save()
            if loop.world.is_main:
                print(f"step {step.number}: loss {step.loss:.6f}")
    return loop


if __name__ == "__main__":
    with paceline.start():
        train(*sys.argv[1:])
