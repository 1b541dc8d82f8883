"""A residual network with BatchNorm for small images.

Source: He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2: a 3x3 stem, stages
of basic blocks, shortcuts without weights (option A: every second pixel, new channels zero), one
linear layer on the mean over the image. `blocks=[3, 3, 3], width=16` is the paper's ResNet-20.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipe.schema import ResnetModel


class Resnet(nn.Module):
    """A ResNet that returns one logit per class.

    Args:
        section: the recipe's `[model]`.
        num_channels: channels of the images.
        num_classes: number of classes.
    """

    def __init__(self, section: ResnetModel, num_channels: int, num_classes: int) -> None:
        super().__init__()
        self.section = section
        self.stem = nn.Conv2d(num_channels, section.width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(section.width)
        blocks: list[nn.Module] = []
        width = section.width
        for stage, num_blocks in enumerate(section.blocks):
            for place in range(num_blocks):
                shrinks = stage > 0 and place == 0
                blocks.append(BasicBlock(width, 2 * width if shrinks else width))
                width = 2 * width if shrinks else width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes.

        Args:
            images: [batch, channels, height, width].

        Returns:
            [batch, num_classes].
        """
        x = F.relu(self.stem_norm(self.stem(images)))
        x = self.blocks(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; halves the image if it has more output than input channels.

    Args:
        num_in: channels of the input.
        num_out: channels of the output.
    """

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.stride = 1 if num_out == num_in else 2
        self.num_new = num_out - num_in
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [batch, num_in, height, width] to [batch, num_out, ceil(height / stride), ...]."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        shortcut = x
        if self.num_new:
            shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new))
        return F.relu(y + shortcut)
