"""Does your model train to the same bits on any number of ranks? Put it in here and see.

python examples/same_bits.py                               one process
torchrun --nproc-per-node 3 examples/same_bits.py          three ranks: the same hash

Replace `build_model`, `Data` and `loss` by yours and run both lines; nothing is written.
"""

import torch
from torch import nn

import paceline
from paceline.checkpoint import hash_tensors


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 5)
    )


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 500

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"image": torch.randn(1, 8, 8, generator=generator), "label": index % 5}


def loss(output, batch):
    losses = nn.functional.cross_entropy(output, batch["label"], reduction="none")
    return losses.sum(), losses.numel()


def main():
    with paceline.start(deterministic=True) as world:
        trainer = paceline.Trainer(
            build_model,
            forward=lambda model, batch: model(batch["image"]),
            loss=loss,
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
            clip_norm=1.0,
            reduction="exact",
        )
        for batch in trainer.loader(Data(), global_batch_size=48, epochs=2):
            step = trainer.step(batch)
            if world.is_main and step.number % 7 == 0:
                print(f"step {step.number}: loss {step.loss!r}, gradient norm {step.grad_norm!r}")
        if world.is_main:
            print("weights", hash_tensors(trainer.model.state_dict()))


if __name__ == "__main__":
    main()
