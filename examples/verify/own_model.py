"""Shows that a model of one's own trains the same on two and on four ranks as in one process.

python examples/verify/own_model.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline


# region verify
def build():
    return nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 5))


def make_batch(step):  # the global batch of a step: any nest of tensors
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 20, generator=generator), torch.randint(0, 5, (32,), generator=generator)


def forward(model, batch):
    return model(batch[0])


def loss(output, batch):
    return cross_entropy(output, batch[1])


def main():
    layouts = ["dp_replicate=2", "dp_replicate=4"]
    verified = paceline.verify(build, make_batch, loss, forward=forward, layouts=layouts)
    for result in verified.results:
        print(result.layout, result.status, f"at {result.worst:.3f} of its tolerance")
    for finding in verified.findings:
        print(finding)


if __name__ == "__main__":
    main()
# endregion
