"""Checks data and builds caches without torch, so that errors appear before ranks start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.data.corpus import CorpusSplit, find_text_files, split_files
from paceline.data.digits import Digits, load_digits
from paceline.data.tokens import Corpus, TokenFile, build_corpus
from paceline.errors import PacelineError
from paceline.recipe.own_sections import OwnData
from paceline.recipe.schema import DigitsData, MaskedTextData, Recipe, TextData


@dataclass(frozen=True)
class PreparedText:
    """A tokenized text that is long enough.

    Attributes:
        seq_len: tokens per sample.
    """

    corpus: Corpus
    seq_len: int

    def num_samples(self, part: TokenFile) -> int:
        """Return the number of samples in a split; its end that does not fill one is dropped."""
        return max(0, (part.num_tokens - 1) // self.seq_len)


@dataclass(frozen=True)
class PreparedDigits:
    """The digits, split. `valid` is None without validation images."""

    train: Digits
    valid: Digits | None


def prepare_data(recipe: Recipe) -> PreparedText | PreparedDigits | None:
    """Check the recipe's data and build its caches; imports no torch.

    Cheap if the cache exists (one stat per file), else one pass over the text. Any number of processes may
    call it at once. Data of the user's own give None: only ranks build these.
    """
    section = recipe.data
    prepared: PreparedText | PreparedDigits
    if isinstance(section, OwnData):
        return None
    if isinstance(section, DigitsData):
        prepared = PreparedDigits(*load_digits(section.valid_fraction))
    else:
        prepared = _prepare_text(section)
    if isinstance(prepared, PreparedText):
        num_samples = prepared.num_samples(prepared.corpus.train)
    else:
        num_samples = len(prepared.train.labels)
    check_batch(recipe.train.global_batch_size, num_samples)
    return prepared


def check_batch(global_batch_size: int, num_samples: int) -> None:
    """Raise PL214 for a global batch of more samples than the training data have."""
    if global_batch_size > num_samples:
        raise PacelineError(
            "PL214",
            saw=f"train.global_batch_size={global_batch_size} is more than the {num_samples} samples of the "
            "training data.",
            rule="A global batch is part of one epoch, which has each sample once.",
            fix=f"Set global_batch_size to {num_samples} or less, or add data."
            if num_samples
            else "Add data.",
        )


def _prepare_text(section: TextData | MaskedTextData) -> PreparedText:
    split = split_files(find_text_files(section.files), section.valid_fraction)
    corpus = build_corpus(split, section.tokenizer, section.vocab_size, Path(section.cache_dir).expanduser())
    prepared = PreparedText(corpus, section.seq_len)
    if prepared.num_samples(corpus.train) == 0:
        raise _too_short("training", corpus.train, section, split)
    if section.valid_fraction > 0 and prepared.num_samples(corpus.valid) == 0:
        raise _too_short("validation", corpus.valid, section, split)
    return prepared


def _too_short(
    name: str, part: TokenFile, section: TextData | MaskedTextData, split: CorpusSplit
) -> PacelineError:
    most = part.num_tokens - 1
    shorter = f"set data.seq_len={most} or less, or " if most > 0 else ""
    share = "a larger valid_fraction, 0 for none" if name == "validation" else "a smaller valid_fraction"
    num_files = len({piece.file.path for piece in (*split.train, *split.valid)})
    fix = f"{shorter}add text, or set {share}."
    return PacelineError(
        "PL202",
        saw=f"the {name} part of data.files={section.files} ({num_files} file{'s' * (num_files > 1)}, "
        f"valid_fraction={section.valid_fraction}) has {part.num_tokens} tokens.",
        rule=f"A sample of data.seq_len={section.seq_len} needs {section.seq_len + 1}, for the last "
        "token's target.",
        fix=fix[0].upper() + fix[1:],
    )
