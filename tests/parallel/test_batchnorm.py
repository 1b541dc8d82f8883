"""Running statistics merged from microbatches are those of one process that runs them in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.batchnorm import RunningStatistics
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool
from tests.train.cases import Trained, assert_ranks_agree, assert_same_run, take_steps, tensors_apart


class Net(nn.Module):
    """One layer is called twice per forward, one has other settings, one is frozen in eval mode."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 3, 3)
        self.twice = nn.BatchNorm2d(3, momentum=momentum)
        self.wide = nn.BatchNorm1d(3, momentum=0.3, affine=False)
        # A bias there would have a true gradient of 0, as the next layer takes the mean away.
        self.frozen = nn.BatchNorm1d(3, affine=False)
        self.without = nn.BatchNorm1d(3, track_running_stats=False)
        self.head = nn.Linear(3, 2)
        with torch.no_grad():
            self.frozen.running_mean.fill_(0.25)
        self.frozen.eval()

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.conv(x)).relu()).mean((2, 3))
        return self.head(self.without(self.frozen(self.wide(x))))


def microbatches(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2 + number % 3, 1, 6, 6, generator=generator, dtype=torch.float64) * (1 + number)
        for number in range(num)
    ]


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_merging_is_running_in_order(momentum: float | None) -> None:
    plain, ours = Net(momentum).double(), Net(momentum).double()
    statistics = RunningStatistics([ours])
    for step in range(3):
        batches = microbatches(5)[: 5 - step]
        for batch in batches:
            plain(batch)
        statistics.begin()
        rows: dict[int, Tensor] = {}
        for index in reversed(range(len(batches))):  # whoever computes them, in whatever order
            statistics.start_microbatch()
            ours(batches[index])
            rows[index] = statistics.read_microbatch()
        statistics.merge(torch.stack([rows[index] for index in range(len(batches))]))
        assert tensors_apart(buffers(plain), buffers(ours)) <= 1e-14
    assert ours.twice.num_batches_tracked == 2 * (5 + 4 + 3)


def test_restoring_leaves_no_trace() -> None:
    model = Net().double()
    model(microbatches(1)[0])
    before = buffers(model)
    statistics = RunningStatistics([model])
    statistics.begin()
    statistics.start_microbatch()
    model(torch.full((3, 1, 6, 6), float("nan"), dtype=torch.float64))
    statistics.read_microbatch()
    statistics.restore()
    assert all(torch.equal(before[name], buffer) for name, buffer in buffers(model).items())


def test_only_layers_with_running_statistics_take_part() -> None:
    statistics = RunningStatistics([Net()])
    assert statistics.num_values == 3 * (2 * 3 + 1)
    assert RunningStatistics([nn.Linear(2, 2)]).num_values == 0


def test_layers_in_eval_mode_stay_as_they_are() -> None:
    model = Net().double().eval()
    before = buffers(model)
    statistics = RunningStatistics([model])
    statistics.begin()
    statistics.start_microbatch()
    model(microbatches(1)[0])
    row = statistics.read_microbatch()
    assert row.shape == (statistics.num_values,)
    statistics.merge(row[None])
    assert all(torch.equal(before[name], buffer) for name, buffer in buffers(model).items())


class Images(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 27

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(1, 6, 6, generator=generator) * (1 + index % 4)}


def train(world: Any, momentum: float | None, dtype: str) -> Trained:
    trainer = Trainer(
        Net(momentum),
        loss=lambda output, batch: ((output - 1).square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
        microbatch_size=3,
        dtype=dtype,
    )
    return take_steps(trainer, trainer.loader(Images(), global_batch_size=11), 6)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_are_the_same_on_any_number_of_ranks(ranks: Pool, momentum: float | None) -> None:
    one = ranks.run(train, nproc=1, args=(momentum, "fp64"))[0]
    for nproc in (2, 3, 4):
        results = ranks.run(train, nproc=nproc, args=(momentum, "fp64"))
        assert_ranks_agree(results)
        assert_same_run(one, results[0], losses=1e-12, tensors=1e-12)


def test_in_fp32_the_first_steps_statistics_are_bit_equal(ranks: Pool) -> None:
    """The weights are still the same then, and the order of merging is too."""

    def statistics(trained: Trained) -> dict[str, Tensor]:
        return {n: t for n, t in trained.tensors.items() if "running" in n or "tracked" in n}

    one, two, three = (statistics(ranks.run(train_one_step, nproc=nproc)[0]) for nproc in (1, 2, 3))
    assert len(one) == 9
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name])
        assert torch.equal(tensor, three[name])


def train_one_step(world: Any) -> Trained:
    trainer = Trainer(
        Net(),
        loss=lambda output, batch: ((output - 1).square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
        microbatch_size=3,
    )
    return take_steps(trainer, trainer.loader(Images(), global_batch_size=11), 1)
