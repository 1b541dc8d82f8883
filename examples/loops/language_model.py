"""A padded language model: the mean loss over tokens, a warm-up, and a transformer of torch.

python examples/loops/language_model.py
torchrun --nproc-per-node 2 examples/loops/language_model.py "dp_shard=2"
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import paceline

PADDING = -100


class Sentences(Dataset):
    """Sequences of different lengths; each next token is the sum of the two before."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        tokens = [index % 7, index % 11]
        while len(tokens) < 5 + index % 9:
            tokens.append((tokens[-1] + tokens[-2]) % 16)
        return torch.tensor(tokens)


def pad(sentences):
    ids = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PADDING)
    return {"ids": ids[:, :-1], "labels": labels[:, 1:]}


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, 16)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def train(layout="", folder="runs/language-model"):
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    loop = paceline.Loop(
        model,
        optimizer,
        layout=layout,
        example={"ids": torch.zeros(2, 8, dtype=torch.long)},
        microbatch_size=4,
        weight=lambda batch: (batch["labels"] != PADDING).sum(),
    )
    loader = loop.loader(DataLoader(Sentences(), batch_size=24, shuffle=True, collate_fn=pad), epochs=5)
    loop.track(schedule=schedule)
    loop.resume(folder)
    for step in loader:
        for batch in step:
            logits = model(batch["ids"])
            step.backward(cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=PADDING))
        step.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step.number % 5 == 0:
            loop.save()
            if loop.world.is_main:
                print(f"step {step.number}: loss {step.loss:.6f}")
    return loop


if __name__ == "__main__":
    with paceline.start():
        train(*sys.argv[1:])
