"""Converts text to token ids and back: bytes, or a tokenizer of Hugging Face's `tokenizers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import PacelineError
from paceline.reading import read_file

if TYPE_CHECKING:
    import tokenizers

SEPARATOR = "<|endoftext|>"
_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # GPT-2, Llama 3, Llama 2, Gemma, BERT

Ids = npt.NDArray[np.uint8] | npt.NDArray[np.uint32]


class Tokenizer(Protocol):
    """The interface of a tokenizer that the rest of the package uses."""

    vocab_size: int
    """Ids are below this."""
    separator_id: int | None
    """The id between two files, or None for no separator."""

    def encode_bytes(self, text: bytes) -> Ids:
        """Return the ids of a piece of a file."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""


class ByteTokenizer:
    """A tokenizer in which every byte is a token; byte 0 separates files."""

    vocab_size = 256
    separator_id: int | None = 0

    def encode_bytes(self, text: bytes) -> Ids:
        """Return the bytes themselves."""
        return np.frombuffer(text, dtype=np.uint8)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text` in UTF-8."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8, and ids that are no bytes, become U+FFFD."""
        return bytes(i if 0 <= i < 256 else 0xFF for i in ids).decode(errors="replace")


class FileTokenizer:
    """A tokenizer loaded from a `tokenizer.json`.

    Text is used as it is: no truncation, no padding, nothing added at the ends, and names of special tokens
    within it are ordinary text. What is not UTF-8 becomes U+FFFD.
    """

    def __init__(self, definition: str) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer  # 40 ms that the bytes do not need

        tokenizer = HuggingFaceTokenizer.from_str(definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer: tokenizers.Tokenizer = tokenizer
        self.definition = definition
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        known = (tokenizer.token_to_id(name) for name in _SEPARATORS)
        self.separator_id: int | None = next((i for i in known if i is not None), None)

    def encode_bytes(self, text: bytes) -> Ids:
        """Return the ids of a piece of a file."""
        return np.asarray(self.encode(text.decode(errors="replace")), dtype=np.uint32)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; unknown ids are left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def load_tokenizer(path: Path) -> FileTokenizer:
    """Return the tokenizer in a file."""
    try:
        definition = read_file(path).decode()
        tokenizer = FileTokenizer(definition)
    except Exception as error:  # `tokenizers` raises bare Exceptions
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PacelineError(
            "PL203",
            saw=f"data.tokenizer={str(path)!r} cannot be loaded: {reason}.",
            rule='It is "bytes", "bpe", or the path of a tokenizer.json of Hugging Face\'s tokenizers.',
            fix='Check the path, or set data.tokenizer="bytes".',
        ) from None
    if tokenizer.vocab_size == 0:
        raise PacelineError(
            "PL203",
            saw=f"data.tokenizer={str(path)!r} has no tokens.",
            rule="A tokenizer needs a vocabulary.",
            fix="Train it before saving it.",
        )
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """Return a byte-level BPE trained on `texts`; the same texts give the same tokenizer.

    Source: Sennrich et al. 2016, section 3.2; Radford et al. 2019, section 2.2 (on bytes).
    """
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained = FileTokenizer(tokenizer.to_str())
    if trained.vocab_size != vocab_size:
        raise PacelineError(
            "PL206",
            saw=f"data.vocab_size={vocab_size}, but the training text gives {trained.vocab_size} tokens.",
            rule="BPE makes a token from a pair only if the pair occurs more than once.",
            fix=f"Set data.vocab_size={trained.vocab_size} or less, or add text.",
        )
    return trained


def fingerprint_tokenizer(name: str, vocab_size: int | None) -> str:
    """Return a text that distinguishes this choice of tokenizer from others, before anything is trained."""
    if name == "bytes":
        return "bytes"
    if name == "bpe":
        return json.dumps(["bpe", vocab_size])
    definition = load_tokenizer(Path(name).expanduser()).definition
    return "file:" + hashlib.sha256(definition.encode()).hexdigest()
