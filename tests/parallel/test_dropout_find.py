"""Random draws that are not ours are named, by module and operation; those that are ours are not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.dropout.random_draws import find_random
from paceline.parallel.dropout.replacements import apply_dropout


class DropPath(nn.Module):
    """As in timm and transformers."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (0.9 + torch.rand(len(x), 1, 1)).floor()


class StochasticDepth(nn.Module):
    """As in torchvision."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(len(x), 1, 1).bernoulli_(0.8) if self.training else x


class Gumbel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gumbel_softmax(x) if self.training else x


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x).uniform_() if self.training else x


class Sampled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.multinomial(x[0].softmax(-1), 1).sum() * 0 if self.training else x


class Host(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() * np.random.rand() if self.training else x


class Foreign(nn.Module):
    """A kernel of another library, that asks for numbers behind torch's back."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.utils._python_dispatch._disable_current_modes():
                torch.rand(3)
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


EXPECTED = {
    DropPath: [],  # one number per sample
    StochasticDepth: [],
    Gumbel: [("PL450", "1.0", "aten::exponential_")],
    Noise: [("PL450", "1.0", "aten::randn_like"), ("PL450", "1.0", "aten::uniform_")],
    Sampled: [("PL450", "1.0", "aten::multinomial")],
    nn.RReLU: [("PL450", "1.0", "aten::rrelu_with_noise")],
    Recurrent: [("PL450", "1.0.lstm", "aten::bernoulli_.float")],
    Host: [("PL453", "the model", "from random"), ("PL453", "the model", "from numpy.random")],
    Foreign: [("PL453", "the model", "from torch")],
    nn.Identity: [],
}


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_other_draws_are_named(kind: type[nn.Module]) -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(encoder, nn.Sequential(kind()), nn.Dropout(0.1))
    masks = apply_dropout(model)
    x = torch.randn(2, 5, 8)

    def run() -> None:
        with masks.drawing(1, range(2)):
            model(x)

    found = find_random(model, run)
    assert [(f.code, f.where) for f in found] == [(code, where) for code, where, _ in EXPECTED[kind]]
    for finding, (_, _, operation) in zip(found, EXPECTED[kind], strict=True):
        assert operation in finding.saw
    native = {f.where for f in find_random(model, lambda: model(x)) if f.code == "PL450"}
    assert native >= {"0.self_attn", "0.dropout", "2"}
    model.eval()
    assert find_random(model, run) == []


def test_a_run_that_raises_leaves_no_hook() -> None:
    def run() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        find_random(nn.Identity(), run)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks
