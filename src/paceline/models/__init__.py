"""The models that recipes name: plain modules for one process, unaware of ranks."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from paceline.models.encoder import Encoder
from paceline.models.gpt import Decoder, Gpt
from paceline.models.moe import MoeGpt
from paceline.models.resnet import Resnet
from paceline.recipe.schema import EncoderModel, GptModel, MoeModel, Recipe, ResnetModel

__all__ = ["Decoder", "Encoder", "Gpt", "MoeGpt", "Resnet", "build_model"]


class TaskShape(Protocol):
    """The properties of data that a model needs; `paceline.data.TaskData` has them."""

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids of text, the mask token included."""

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a sample of text."""

    @property
    def num_classes(self) -> int | None:
        """Number of classes of images."""

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of images."""


def build_model(recipe: Recipe, data: TaskShape) -> nn.Module:
    """Return the recipe's model with fresh weights, in fp32 on the CPU.

    Weights come from torch's default generator, which the caller seeds.

    Args:
        data: the data it trains on (`build_data(recipe)`), which gives vocabulary and shapes.
    """
    section = recipe.model
    if isinstance(section, GptModel | MoeModel | EncoderModel):
        assert data.vocab_size is not None, "the recipe pairs this model with text"
        assert data.tokens_per_sample is not None, "the recipe pairs this model with text"
        if isinstance(section, GptModel):
            return Gpt(section, data.vocab_size, data.tokens_per_sample)
        if isinstance(section, MoeModel):
            return MoeGpt(section, data.vocab_size, data.tokens_per_sample)
        return Encoder(section, data.vocab_size, data.tokens_per_sample)
    assert isinstance(section, ResnetModel)
    assert data.image_shape is not None, "the recipe pairs this model with images"
    assert data.num_classes is not None, "the recipe pairs this model with images"
    return Resnet(section, data.image_shape[0], data.num_classes)
