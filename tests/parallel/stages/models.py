"""Small models that are hard to cut: skips, sums outside of blocks, a block of several calls, two towers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return done


class Unet(nn.Module):
    """Outputs of the first half are added in the second, in the opposite order."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        skips = []
        for block in self.blocks[:3]:
            x = block(x)
            skips.append(x)
        for block in self.blocks[3:]:
            x = block(x + skips.pop())
        done: Tensor = self.leave(x)
        return done


class Outside(nn.Module):
    """Residual sums and dropout outside of the blocks, a position table and an input used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.position = nn.Parameter(torch.randn(5, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1]) % 2 == 0
        h = F.dropout(self.enter(x) + self.position, 0.2, self.training)
        first = h
        for block in self.blocks:
            h = h + F.dropout(block(h), 0.1, self.training) * mask[:, None]
        done: Tensor = self.leave(h + first) + x.sum()
        return done


class Repeated(nn.Module):
    """One block that is called six times: its weights are on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(6):
            x = x + self.blocks[0](x)
        done: Tensor = self.leave(x)
        return done


class Tied(nn.Module):
    """A weight at the start, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, WIDTH))
        self.enter = nn.Linear(4, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) @ self.table
        for number, block in enumerate(self.blocks):
            h = h + block(h)
            if number == 1:
                h = h + F.linear(h, self.table) @ self.table
        return F.linear(h, self.table)


class Towers(nn.Module):
    """torch's encoder and decoder; the encoder's output goes to every layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.both = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.1, batch_first=True)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        done: Tensor = self.leave(self.both(x, x.flip(1)))
        return done


class Convolutions(nn.Module):
    """Channels last, so that what crosses a cut has other strides than a contiguous tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH), nn.ReLU())
            for _ in range(4)
        )
        self.leave = nn.Linear(WIDTH, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x[:, None].to(memory_format=torch.channels_last))
        for block in self.blocks:
            x = x + block(x)
        done: Tensor = self.leave(x.mean((2, 3)))[:, None]
        return done


MODELS: dict[str, type[nn.Module]] = {
    model.__name__: model for model in (Unet, Outside, Repeated, Tied, Towers, Convolutions)
}


def make_batch(step: int) -> dict[str, Tensor]:
    """11 samples of a series of 5, so that the last of the microbatches of 2 is ragged."""
    generator = torch.Generator().manual_seed(step)
    series = torch.randn(11, 5, 4, generator=generator)
    return {"x": series, "y": torch.randn(11, 1, 3, generator=generator)}


def call(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output: Tensor = model(batch["x"])
    return output


def measure(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return ((output - batch["y"]) ** 2).sum(), torch.tensor(float(len(output)))
