"""torch's `update_bn` on an average of weights: every rank reads all data, so the statistics are torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from tests.dist.pool import Pool

DATA = TensorDataset(torch.sin(torch.arange(72.0, dtype=torch.float64)).reshape(12, 6), torch.arange(12) % 4)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()


def follow_torch() -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        for start in range(0, 12, 6):
            optimizer.zero_grad()
            losses = []
            for first in range(start, start + 6, 2):
                inputs, labels = DATA[first : first + 2]
                losses.append(nn.functional.cross_entropy(model(inputs), labels, reduction="sum"))
            (torch.stack(losses).sum() / 6).backward()
            optimizer.step()
            average.update_parameters(model)
    update_bn(DataLoader(DATA, batch_size=5), average)
    return {name.removeprefix("module."): each for name, each in average.state_dict().items()}


def follow(world: paceline.World, layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    trainer = paceline.Trainer(
        net(),
        forward=lambda model, batch: model(batch[0]),
        loss=lambda output, batch: (
            nn.functional.cross_entropy(output, batch[1], reduction="sum"),
            len(output),
        ),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.5),
        layout=layout,
        microbatch_size=2,
        ema=0.5,
        dtype="fp64",
    )
    for batch in trainer.loader(DATA, global_batch_size=6, shuffle=False, epochs=2):
        trainer.step(batch)
    assert trainer.average is not None
    with trainer.average.applied():
        update_bn(DataLoader(DATA, batch_size=5), trainer.model)
        averaged = trainer.whole_state()
    own = dict(trainer.model.named_buffers())
    trainer.step(next(iter(trainer.loader(DATA, global_batch_size=6, shuffle=False))))  # ranks still agree
    return averaged, own


@pytest.mark.parametrize("layout", ["dp_replicate", "dp_shard"])
def test_update_bn_gives_the_statistics_of_one_process(ranks: Pool, layout: str) -> None:
    expected = follow_torch()
    for nproc in (1, 2, 3):
        found = ranks.run(follow, nproc=nproc, args=(f"{layout}={nproc}",))
        averaged = found[0][0]
        for name, each in expected.items():
            if name in averaged:
                torch.testing.assert_close(averaged[name], each, rtol=1e-7, atol=1e-9)
        for _, own in found:
            assert all(torch.equal(own[name], found[0][1][name]) for name in own)
