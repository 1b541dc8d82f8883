"""A LoRA fine-tune: frozen base, low-rank adapters, an average of weights, a schedule of one's own.

torchrun --nproc-per-node 2 examples/lora.py
"""

import torch
from torch import nn

import paceline
from paceline.models import Gpt
from paceline.recipe.schema import GptModel

SEQ_LEN = 32
TEXT = ("a paceline is a line of riders who take turns at the front. nobody is dropped. " * 200).encode()


class Lora(nn.Module):
    """W x + B A x with W frozen (Hu et al. 2021)."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def add_adapters(model, rank=4):
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name.startswith(("q", "v")):
                setattr(module, name, Lora(child, rank))
    return model


class Text(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.tensor(list(TEXT))

    def __len__(self):
        return (len(self.ids) - 1) // SEQ_LEN

    def __getitem__(self, index):
        window = self.ids[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1]
        return {"ids": window[:-1], "targets": window[1:]}


def token_loss(logits, batch):
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    return losses, batch["targets"].numel()


def main():
    with paceline.start(seed=1) as world:
        model = Gpt(GptModel(kind="gpt", layers=2, hidden=64, heads=4), vocab_size=256, max_seq_len=SEQ_LEN)
        trainer = paceline.Trainer(
            add_adapters(model),
            forward=lambda model, batch: model(batch["ids"]),
            loss=token_loss,
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-2),
            schedule=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40),
            clip_norm=1.0,
            ema=0.9,
        )
        loader = trainer.loader(Text(), global_batch_size=16, epochs=1)
        trainer.resume("runs/lora")
        for batch in loader:
            step = trainer.step(batch)
            if step.number % 10 == 0:
                trainer.save()
                if world.is_main:
                    print(f"step {step.number}: loss {step.loss:.6f}  lr {step.lr:.2e}")


if __name__ == "__main__":
    main()
