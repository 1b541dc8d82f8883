"""A classifier of handwritten digits: a plain PyTorch loop, and the lines that make it distributed.

python examples/digits.py                                  one process
torchrun --nproc-per-node 4 examples/digits.py             four ranks, the same numbers
"""

import torch
from torch import nn

import paceline
from paceline.data.digits import load_digits


class Digits(torch.utils.data.Dataset):
    def __init__(self, digits):
        self.images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
        self.labels = torch.tensor(digits.labels, dtype=torch.int64)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}


def cross_entropy(logits, batch):
    losses = nn.functional.cross_entropy(logits, batch["label"], reduction="none")
    return losses.sum(), losses.numel()


def accuracy(logits, batch):
    return (logits.argmax(-1) == batch["label"]).sum(), len(batch["label"])


def main():
    train, valid = map(Digits, load_digits(valid_fraction=0.2))
    with paceline.start() as world:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
        trainer = paceline.Trainer(
            model,
            forward=lambda model, batch: model(batch["image"]),
            loss=cross_entropy,
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-3),
        )
        loader = trainer.loader(train, global_batch_size=64, epochs=3)
        trainer.resume("runs/digits")
        for batch in loader:
            step = trainer.step(batch)
            if step.number % 20 == 0:
                trainer.save()
                if world.is_main:
                    print(f"step {step.number}: loss {step.loss:.6f}")
        trainer.save()
        valid_loader = trainer.loader(valid, global_batch_size=64, shuffle=False)
        result = trainer.evaluate(valid_loader, {"accuracy": accuracy})
        if world.is_main:
            print(result)


if __name__ == "__main__":
    main()
