"""The gradient is that of the global sum of losses over the global sum of weights, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from paceline.train.trainer import Trainer
from tests.dist.pool import Pool
from tests.train.cases import Trained, apart, assert_ranks_agree, take_steps, tensors_apart

NUM_SAMPLES, GLOBAL_BATCH, NUM_STEPS, NUM_CLASSES, IGNORED = 37, 16, 7, 5, -100
MICROBATCHES = [1, 4, 16]


class Masked(Dataset[dict[str, Tensor]]):
    """Targets spread very unevenly: most samples have none, some have many; 37 samples end raggedly."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(NUM_SAMPLES, 6, 3, generator=generator, dtype=torch.float64)
        self.targets = torch.full((NUM_SAMPLES, 6), IGNORED)
        for sample, count in ((0, 6), (5, 1), (17, 6), (18, 6), (21, 2), (30, 1), (33, 6), (36, 3)):
            self.targets[sample, :count] = torch.randint(NUM_CLASSES, (count,), generator=generator)
        self.importance = torch.rand(NUM_SAMPLES, generator=generator, dtype=torch.float64) ** 4

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "inputs": self.inputs[index],
            "targets": self.targets[index],
            "importance": self.importance[index],
        }


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


def build_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.02, weight_decay=0.1)


def token_losses(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss per place, 0 where there is no target."""
    return functional.cross_entropy(
        output.transpose(1, 2), batch["targets"], ignore_index=IGNORED, reduction="none"
    )


def by_targets(output: Tensor, batch: dict[str, Tensor]) -> Any:
    return token_losses(output, batch).sum(), (batch["targets"] != IGNORED).sum()


def by_importance(output: Tensor, batch: dict[str, Tensor]) -> Any:
    losses = token_losses(output, batch).sum(1)
    return (losses * batch["importance"]).sum(), batch["importance"].sum()


def by_count(output: Tensor, batch: dict[str, Tensor]) -> Any:
    """Return a weight that is a number, not a tensor."""
    return output.square().sum(), len(output) * 6


def by_mean(output: Tensor, batch: dict[str, Tensor]) -> Any:
    """Return a scalar: the mean over samples."""
    return output.square().sum((1, 2)).mean()


LOSSES = {"targets": by_targets, "importance": by_importance, "count": by_count, "mean": by_mean}


def full_batch_loop(kind: str, model: nn.Module) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Compute the expected result: one process, the whole global batch at once, torch alone."""
    data, optimizer = Masked(), torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    losses, gradients = [], []
    for step in range(NUM_STEPS):
        start = GLOBAL_BATCH * (step % 3)
        stop = min(start + GLOBAL_BATCH, NUM_SAMPLES)
        output = model(data.inputs[start:stop])
        targets, importance = data.targets[start:stop], data.importance[start:stop]
        places = functional.cross_entropy(
            output.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
        )
        if kind == "targets":
            loss = places.sum() / (targets != IGNORED).sum()
        elif kind == "importance":
            loss = (places.sum(1) * importance).sum() / importance.sum()
        elif kind == "count":
            loss = output.square().sum() / (6 * len(output))
        else:
            loss = output.square().sum() / len(output)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return losses, gradients


def train(world: Any, kind: str) -> list[Trained]:
    """With each microbatch size; the gradients of every step are in `extra`."""
    results = []
    for microbatch_size in MICROBATCHES:
        torch.manual_seed(3)
        trainer = Trainer(
            build_model(),
            forward=lambda model, batch: model(batch["inputs"]),
            loss=LOSSES[kind],
            optimizer=build_optimizer,
            dtype="fp64",
            microbatch_size=microbatch_size,
        )
        gradients: list[dict[str, Tensor]] = []
        trainer.on_gradients(lambda named, to=gradients: to.append({n: g.clone() for n, g in named.items()}))
        loader = trainer.loader(Masked(), global_batch_size=GLOBAL_BATCH, shuffle=False)
        trained = take_steps(trainer, loader, NUM_STEPS)
        trained.extra = gradients
        results.append(trained)
    return results


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["targets", "importance", "count", "mean"])
def test_losses_gradients_and_weights_are_the_full_batch_loops(ranks: Pool, kind: str, nproc: int) -> None:
    torch.manual_seed(3)
    model = build_model().double()
    losses, gradients = full_batch_loop(kind, model)
    results = ranks.run(train, nproc=nproc, args=(kind,))
    for number in range(len(MICROBATCHES)):
        assert_ranks_agree([result[number] for result in results])
        trained = results[0][number]
        assert apart(losses, trained.losses) <= 1e-12
        for step, (expected, found) in enumerate(zip(gradients, trained.extra, strict=True)):
            assert tensors_apart(expected, found) <= 1e-12, f"step {step + 1}"
        final = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        assert tensors_apart(final, trained.tensors) <= 1e-10


def test_the_data_is_as_uneven_as_it_states() -> None:
    counts = (Masked().targets != IGNORED).sum(1)
    for size in (1, 4):
        sums = [int(part.sum()) for part in counts[:GLOBAL_BATCH].split(size)]
        assert 0 in sums
        assert max(sums) == 6
