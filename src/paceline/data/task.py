"""Builds the data sets of a recipe, ready for models and loaders."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import Dataset, Subset

from paceline.data import digits
from paceline.data.images import DigitImages
from paceline.data.prepare import PreparedText, check_batch, prepare_data
from paceline.data.text import MaskedTokens, NextTokens, Sample
from paceline.data.tokenizer import Tokenizer
from paceline.data.tokens import TokenFile
from paceline.recipe.own_sections import OwnData, call_named, named_error
from paceline.recipe.schema import MaskedTextData, Recipe, TextData


@dataclass(frozen=True)
class TaskData:
    """The data sets and what a model must know of them; None for what does not apply.

    Attributes:
        train: training samples.
        valid: validation samples; None where the recipe holds none out.
        vocab_size: number of token ids, the mask token included.
        tokens_per_sample: tokens of a sample of text.
        num_classes: number of classes of images.
        image_shape: channels, height and width of images.
        tokenizer: between text and ids: `tokenizer.encode(text)`, `tokenizer.decode(ids)`.
        functions: `loss`, and where they are given `forward` and `metrics`, of data of the user's own.
    """

    train: Dataset[Sample]
    valid: Dataset[Sample] | None
    vocab_size: int | None = None
    tokens_per_sample: int | None = None
    num_classes: int | None = None
    image_shape: tuple[int, int, int] | None = None
    tokenizer: Tokenizer | None = None
    functions: dict[str, Any] = field(default_factory=dict)


def build_data(recipe: Recipe) -> TaskData:
    """Return the recipe's data, checked, with its caches built; any number of ranks may call it at once."""
    data, size = _build(recipe), recipe.train.overfit_batches * recipe.train.global_batch_size
    if 0 < size < len(data.train):  # type: ignore[arg-type]
        data = replace(data, train=Subset(data.train, range(size)))
    return data


def _build(recipe: Recipe) -> TaskData:
    if isinstance(recipe.data, OwnData):
        return _build_own(recipe.data, recipe.train.global_batch_size)
    prepared = prepare_data(recipe)
    assert prepared is not None, "the case before"
    if isinstance(prepared, PreparedText):
        assert isinstance(recipe.data, TextData | MaskedTextData)
        return _build_text(prepared, recipe.data, recipe.train.seed)
    return TaskData(
        train=DigitImages(prepared.train),
        valid=None if prepared.valid is None else DigitImages(prepared.valid),
        num_classes=digits.NUM_CLASSES,
        image_shape=digits.IMAGE_SHAPE,
    )


def _build_text(prepared: PreparedText, section: TextData | MaskedTextData, seed: int) -> TaskData:
    corpus = prepared.corpus
    vocab_size = corpus.tokenizer.vocab_size
    masked = isinstance(section, MaskedTextData)

    def samples(part: TokenFile, *, fixed: bool) -> NextTokens:
        if not isinstance(section, MaskedTextData):
            return NextTokens(part, section.seq_len)
        return MaskedTokens(
            part,
            section.seq_len,
            vocab_size=vocab_size,
            mask_fraction=section.mask_fraction,
            seed=seed,
            fixed=fixed,
        )

    has_valid = section.valid_fraction > 0
    return TaskData(
        train=samples(corpus.train, fixed=False),
        valid=samples(corpus.valid, fixed=True) if has_valid else None,
        vocab_size=vocab_size + 1 if masked else vocab_size,
        tokens_per_sample=section.seq_len,
        tokenizer=corpus.tokenizer,
    )


def _build_own(section: OwnData, global_batch_size: int) -> TaskData:
    given = call_named("data", section.build, section.args)
    has_train = isinstance(given, dict) and hasattr(given.get("train"), "__len__")
    if not has_train or not hasattr(given.get("valid") or (), "__len__"):
        raise named_error("data", f"{section.build} returned no dict with data sets that have a length.")
    if not callable(given.get("loss")):
        raise named_error("data", f"{section.build} returned no function `loss`.")
    functions = {name: value for name, value in given.items() if name not in ("train", "valid")}
    if unknown := sorted(set(functions) - {"loss", "forward", "metrics"}):
        raise named_error("data", f"{section.build} returned {unknown[0]!r}, which is no part of it.")
    check_batch(global_batch_size, len(given["train"]))
    return TaskData(given["train"], given.get("valid"), functions=functions)
