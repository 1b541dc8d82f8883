"""A bidirectional transformer built from torch's own layers, for predicting masked tokens.

Sources: Vaswani et al. 2017, "Attention Is All You Need", section 3; Devlin et al. 2019, "BERT",
section 3 (learned positions, GELU).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.models.gpt import check_seq_len
from paceline.recipe.schema import EncoderModel


class Encoder(nn.Module):
    """An encoder that returns logits over the vocabulary at every position.

    Args:
        section: the recipe's `[model]`.
        vocab_size: number of token ids, the mask token included.
        max_seq_len: number of positions.
    """

    def __init__(self, section: EncoderModel, vocab_size: int, max_seq_len: int) -> None:
        super().__init__()
        self.section = section
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.tokens = nn.Embedding(vocab_size, section.hidden)
        self.positions = nn.Embedding(max_seq_len, section.hidden)
        self.dropout = nn.Dropout(section.dropout)
        layer = nn.TransformerEncoderLayer(
            section.hidden,
            section.heads,
            section.ffn_hidden or 4 * section.hidden,
            dropout=section.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=section.norm_first,
        )
        # Nested tensors are for padded batches, which do not occur here; requesting them with norm_first
        # warns.
        self.encoder = nn.TransformerEncoder(layer, section.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(section.hidden)
        self.head = nn.Linear(section.hidden, vocab_size)
        self._init_weights()

    def _init_weights(self) -> None:
        # TransformerEncoder copies one layer with its weights, so all layers start equal unless they are
        # drawn again (as nn.Transformer does).
        for parameter in self.encoder.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits at every position.

        Args:
            ids: token ids, int64 [batch, seq_len], seq_len at most `max_seq_len`.

        Returns:
            [batch, seq_len, vocab_size].
        """
        check_seq_len(ids, self.max_seq_len)
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(places))
        logits: Tensor = self.head(self.norm(self.encoder(x)))
        return logits
