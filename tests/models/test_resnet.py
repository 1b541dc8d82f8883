"""The ResNet for small images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.models.resnet import BasicBlock, Resnet
from paceline.recipe.schema import ResnetModel


def build(blocks: list[int], width: int = 16, channels: int = 3) -> Resnet:
    torch.manual_seed(0)
    return Resnet(ResnetModel(kind="resnet", blocks=blocks, width=width), channels, 10)


def test_resnet_20_has_the_papers_size() -> None:
    # He et al. 2016, table 6: 0.27M parameters; by hand 3*9*16 + 6*9*16*16 + ... + 10*64 + 10
    model = build([3, 3, 3])
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == 269_722
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 19
    assert all(convolution.bias is None for convolution in convolutions)


@pytest.mark.parametrize(
    ("blocks", "size", "channels"), [([1], 8, 1), ([1, 1, 1], 8, 1), ([1, 2, 1, 1], 8, 3), ([1, 1, 1], 33, 3)]
)
def test_stages_halve_the_image(blocks: list[int], size: int, channels: int) -> None:
    model = build(blocks, width=4, channels=channels)
    seen = []
    model.blocks.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape))
    assert model(torch.randn(2, channels, size, size)).shape == (2, 10)
    smaller = size
    for _ in blocks[1:]:
        smaller = -(-smaller // 2)
    assert seen == [(2, 4 * 2 ** (len(blocks) - 1), smaller, smaller)]


def test_the_shortcut_is_the_input() -> None:
    block = BasicBlock(2, 4)
    nn.init.zeros_(block.norm2.weight)  # the branch gives nothing
    x = torch.randn(1, 2, 6, 6)
    out = block(x)
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2].relu())
    assert torch.equal(out[:, 2:], torch.zeros(1, 2, 3, 3))


def test_batch_norm_learns_statistics_in_train_mode_only() -> None:
    model = build([1, 1])
    images = torch.randn(4, 3, 8, 8) * 3 + 1
    before = model.stem_norm.running_mean.clone()
    model.eval()(images)
    assert torch.equal(model.stem_norm.running_mean, before)
    model.train()(images)
    assert not torch.equal(model.stem_norm.running_mean, before)


def test_it_learns() -> None:
    model = build([1, 1], width=8, channels=1)
    images, labels = torch.randn(16, 1, 8, 8), torch.arange(16) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
