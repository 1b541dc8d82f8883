"""Data sets of text: next tokens, and masked tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.tokens import TokenFile

IGNORED = -100
"""The target of a position that does not count."""

Sample = dict[str, Tensor]


class NextTokens(Dataset[Sample]):
    """The data set whose sample i is tokens `i*seq_len` and following, each with the next token as its
    target.

    A sample is `{"ids": int64 [seq_len], "targets": int64 [seq_len]}`. Pickles as the path of its
    file, so a loader's worker maps the file itself.

    Args:
        seq_len: tokens per sample.
    """

    def __init__(self, part: TokenFile, seq_len: int) -> None:
        self.part = part
        self.seq_len = seq_len
        self._tokens = part.open()

    @property
    def content_hash(self) -> str:
        """A hash of the whole text, as its tokens; resuming a run compares it."""
        return self.part.sha256

    def __len__(self) -> int:
        return max(0, (self.part.num_tokens - 1) // self.seq_len)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return many samples at once; torch's loaders call it."""
        windows = torch.from_numpy(self._windows(indices, self.seq_len + 1))
        return [{"ids": window[:-1], "targets": window[1:]} for window in windows]

    def _windows(self, indices: Sequence[int], length: int) -> npt.NDArray[np.int64]:
        """Return the tokens [len(indices), length] from the start of each sample."""
        windows = np.empty((len(indices), length), dtype=np.int64)
        for row, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"sample {index} of {len(self)}")
            windows[row] = self._tokens[index * self.seq_len : index * self.seq_len + length]
        return windows

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = self.part.open()


class MaskedTokens(NextTokens):
    """The data set whose sample i is tokens `i*seq_len` and following, some of them masked; these are the
    targets.

    Each token is a target with chance `mask_fraction`, and at least one per sample. Of the targets
    80% are replaced by the mask token, 10% by a random token and 10% stay (Devlin et al. 2019,
    section 3.1). Which ones depends on (seed, epoch, sample) alone.

    Args:
        seq_len: tokens per sample.
        vocab_size: token ids of the text; the mask token is the next one.
        mask_fraction: share of tokens to predict.
        fixed: the same masks in every epoch, for validation.
    """

    def __init__(
        self,
        part: TokenFile,
        seq_len: int,
        *,
        vocab_size: int,
        mask_fraction: float,
        seed: int,
        fixed: bool = False,
    ) -> None:
        super().__init__(part, seq_len)
        self.vocab_size = vocab_size
        self.mask_id = vocab_size
        self.mask_fraction = mask_fraction
        self.seed = seed
        self.fixed = fixed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw other masks from now on; loaders call it before each epoch, in every worker."""
        if not self.fixed:
            self.epoch = epoch

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return many samples at once; torch's loaders call it."""
        tokens = self._windows(indices, self.seq_len)
        raw = self._draw(indices)
        chance = (raw[:, 0] >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
        fate = (raw[:, 1] >> np.uint64(11)) * 2.0**-53
        substitutes = (raw[:, 2] % np.uint64(self.vocab_size)).astype(np.int64)
        chosen = chance < self.mask_fraction
        chosen[np.arange(len(tokens)), chance.argmin(axis=1)] = True
        hidden = np.where(fate < 0.8, self.mask_id, np.where(fate < 0.9, substitutes, tokens))
        ids = torch.from_numpy(np.where(chosen, hidden, tokens))
        targets = torch.from_numpy(np.where(chosen, tokens, IGNORED))
        return [{"ids": ids[row], "targets": targets[row]} for row in range(len(tokens))]

    def _draw(self, indices: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Draw random words [len(indices), 3, seq_len], a function of (seed, epoch, sample)."""
        raw = np.empty((len(indices), 3, self.seq_len), dtype=np.uint64)
        for row, index in enumerate(indices):
            # Raw output of a counter-based generator: any sample at once, equal in every numpy.
            generator = np.random.Philox(
                key=[self.seed % 2**64, self.epoch], counter=[0, 0, index, self.fixed]
            )
            raw[row] = generator.random_raw((3, self.seq_len))
        return raw
