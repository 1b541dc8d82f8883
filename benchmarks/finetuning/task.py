"""The task of all scripts: a tiny BERT that classifies pairs of texts, with data that are made here."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

BATCH, EPOCHS, LR, WARMUP, CLIP = 16, 3, 2e-3, 4, 1.0
MODEL = Path(tempfile.gettempdir()) / "paceline-finetuning-bert"


class Pairs(Dataset[dict[str, torch.Tensor]]):
    """Pairs of rows of tokens; the label is whether they begin alike. Rows are padded to one length."""

    def __init__(self, num_rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(4, 60, (num_rows, 24), generator=generator)
        self.labels = torch.arange(num_rows) % 2
        same = self.labels.bool()
        self.ids[same, 12] = self.ids[same, 0]
        lengths = torch.randint(14, 25, (num_rows, 1), generator=generator)
        self.mask = (torch.arange(24) < lengths).long()
        self.ids *= self.mask

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[n], "attention_mask": self.mask[n], "labels": self.labels[n]}


def make_model() -> None:
    """Save the model that all scripts start with; no dropout, whose masks differ between tools."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForSequenceClassification(config).save_pretrained(MODEL)


def load_data() -> tuple[Pairs, Pairs]:
    """Return rows to train on, whose last batch is not full, and rows to evaluate."""
    torch.set_num_threads(1)
    return Pairs(200, 1), Pairs(50, 2)


def load_loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders in a fixed order, because every tool shuffles in its own way."""
    train, valid = load_data()
    return DataLoader(train, batch_size=BATCH), DataLoader(valid, batch_size=BATCH)


def warm_up(step: int) -> float:
    """Return the factor of the learning rate: a linear rise and a linear fall."""
    total = EPOCHS * -(-200 // BATCH)
    return step / WARMUP if step < WARMUP else max(0.0, (total - step) / (total - WARMUP))


def report(losses: list[float], accuracy: float) -> None:
    """Print what run.py compares."""
    print(json.dumps({"losses": losses, "accuracy": accuracy}), file=sys.stdout, flush=True)
