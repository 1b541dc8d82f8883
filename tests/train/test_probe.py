"""The effect of the cut into microbatches on a model is reported before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from paceline.checkpoint import hash_tensors
from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from paceline.world import start
from tests.dist.pool import Pool, RankError

IGNORED = -100


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": torch.tensor(IGNORED if index % 4 == 3 else index % 2)}


class Tokens(nn.Module):
    """Computes its own loss, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), y, ignore_index=IGNORED)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(len(x), 2)


def net(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 2))


def squares(output: Tensor, batch: Any) -> Any:
    return output.square().sum(), len(output)


def contrastive(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def build(**settings: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        **{
            "model": net(),
            "forward": lambda model, batch: model(batch["x"]),
            "loss": squares,
            "optimizer": lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
            **settings,
        }
    )


def take_steps(
    settings: dict[str, Any], num_steps: int = 2, size: int = 16, shuffle: bool = False
) -> Trainer:
    trainer = build(**settings)
    for share in trainer.loader(Samples(), global_batch_size=size, shuffle=shuffle):
        trainer.step(share)
        if trainer.step_number == num_steps:
            break
    return trainer


@pytest.fixture(autouse=True)
def world() -> Any:
    with start(device="cpu", threads_per_rank=1) as world:
        yield world


COUPLED: dict[str, dict[str, Any]] = {
    "contrastive": {"loss": contrastive},
    "after BatchNorm": {"model": lambda: net(nn.BatchNorm1d(8)), "loss": contrastive},
    "mean over targets": {
        "loss": lambda output, batch: F.cross_entropy(output, batch["y"], ignore_index=IGNORED)
    },
    "a loss inside of the model": {
        "model": Tokens,
        "forward": lambda model, batch: model(**batch),
        "loss": lambda output, batch: output,
    },
    "a sum that counts as a mean": {"loss": lambda output, batch: output.square().sum()},
    "a term per microbatch": {"loss": lambda output, batch: (output.square().sum() + 5.0, len(output))},
    "bf16": {"loss": contrastive, "dtype": "bf16"},
    "fp64": {"loss": contrastive, "dtype": "fp64"},
}


# BatchNorm refuses a microbatch of one sample, and the first two samples have a target each.
_NOT_FROM_ONE_SAMPLE = ("after BatchNorm", "mean over targets", "a loss inside of the model")


@pytest.mark.parametrize(
    ("case", "size"),
    [(case, 32) for case in COUPLED] + [(case, 8) for case in COUPLED if case not in _NOT_FROM_ONE_SAMPLE],
)
def test_a_loss_that_depends_on_the_cut_is_refused(case: str, size: int) -> None:
    """With 8 samples a microbatch has one, so that two are joined."""
    with pytest.raises(PacelineError, match="PL413") as caught:
        take_steps(COUPLED[case], size=size)
    assert f"each global batch of {size} would be divided into 8 microbatches of {size // 8}." in str(
        caught.value
    )
    take_steps({**COUPLED[case], "microbatch_size": size}, size=size)  # chosen


def test_the_module_that_mixes_samples_is_named() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(6, 6), Mixing(), nn.Linear(6, 1))
    with pytest.raises(PacelineError, match="The output of 1 for a sample depends on the other samples"):
        take_steps({"model": model}, size=32)


def test_a_mean_over_targets_returned_as_a_pair_is_right() -> None:
    def loss(output: Tensor, batch: Any) -> Any:
        y = batch["y"]
        return F.cross_entropy(output, y, ignore_index=IGNORED, reduction="sum"), (y != IGNORED).sum()

    take_steps({"loss": loss})


INDEPENDENT: dict[str, dict[str, Any]] = {
    "sum": {},
    "mean": {"loss": lambda output, batch: output.square().mean()},
    "dropout": {"model": lambda: net(nn.Dropout(0.5))},
    "noise in forward": {"model": lambda: Noisy(6, 2)},
    "noise in the loss": {"loss": lambda output, batch: ((output - torch.randn_like(output)) ** 2).mean()},
    "LSTM dropout": {
        "model": lambda: nn.LSTM(6, 2, num_layers=2, dropout=0.5, batch_first=True),
        "forward": lambda model, batch: model(batch["x"][:, None])[0],
    },
    "fp16": {"dtype": "fp16"},
    "bf16": {"dtype": "bf16"},
    "a batch that can't be cut": {"forward": lambda model, batch: model(batch["x"].view(2, 6)).view(2, 2)},
    "on the whole batch": {"loss": contrastive, "loss_over": "global_batch"},
}


@pytest.mark.parametrize("case", INDEPENDENT)
def test_other_losses_train(case: str, caplog: pytest.LogCaptureFixture) -> None:
    take_steps(INDEPENDENT[case])
    assert "PL41" not in caplog.text


def test_nothing_is_disturbed() -> None:
    """The same bits as with the same size of microbatches said outright."""
    model = lambda: net(nn.BatchNorm1d(8), nn.Dropout(0.3))  # noqa: E731
    noisy = {
        "model": model,
        "forward": lambda model, batch: model(batch["x"]) + torch.randn(len(batch["x"]), 2),
    }
    one, other = (take_steps({**noisy, **more}).whole_state() for more in ({}, {"microbatch_size": 2}))
    assert hash_tensors(one) == hash_tensors(other)


def test_batchnorm_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    take_steps({"model": lambda: net(nn.BatchNorm1d(8))})
    assert caplog.text.count("PL413") == 1
    assert "1: BatchNorm normalizes each microbatch of 2 samples separately" in caplog.text
    caplog.clear()
    take_steps({"model": lambda: net(nn.BatchNorm1d(8)), "microbatch_size": 4})
    assert "PL413" not in caplog.text


def test_batchnorm_with_one_sample() -> None:
    with pytest.raises(
        PacelineError, match=r"BatchNorm got one value per channel: a global batch of 8.*PL414"
    ):
        take_steps({"model": lambda: net(nn.BatchNorm1d(8))}, size=8)


def test_a_mean_over_no_targets_is_reported_as_that() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch["y"], ignore_index=IGNORED)

    with pytest.raises(PacelineError, match="is nan while others are finite") as caught:
        take_steps({"loss": loss, "microbatch_size": 1, "max_skipped_in_a_row": 1})
    assert "return (sum of losses, number of targets)" in caught.value.fix


# ---- on several ranks


def train(world: Any, settings: dict[str, Any], num_steps: int = 4, size: int = 8) -> list[str]:
    made = {"spectral": spectral, "old spectral": old_spectral, "average": Average, "count": Count}
    torch.manual_seed(0)
    settings = {**settings, "model": made.get(settings.get("model", ""), net)()}
    if settings.get("loss") == "contrastive":
        settings["loss"] = contrastive
    trainer = build(**settings)
    messages: list[str] = []
    for share in trainer.loader(Samples(), global_batch_size=size):
        trainer.step(share)
        if trainer.step_number == num_steps:
            break
    return [hash_tensors({n: t.detach() for n, t in trainer.model.state_dict().items()}), *messages]


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_all_ranks_refuse_together(ranks: Pool, layout: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(train, args=({"loss": "contrastive", "layout": layout}, 1, 32))
    assert {error.code for error in caught.value.causes.values()} == {"PL413"}


def train_few(world: Any, layout: str) -> float:
    """Take a first step in which the last rank has one sample, and the others two each."""
    torch.manual_seed(0)
    trainer = build(model=net(), layout=layout)
    data = torch.utils.data.Subset(Samples(), range(2 * world.world_size - 1))
    share = next(iter(trainer.loader(data, global_batch_size=16)))
    assert len(share.samples[0]) == (1 if world.rank + 1 == world.world_size else 2)
    return float(trainer.step(share).loss)


def test_a_rank_with_a_single_sample_keeps_others_from_cutting(ranks: Pool) -> None:
    """Forwards of a sharded model are collective, so all ranks run the halves or none does."""
    assert len(set(ranks.run(train_few, args=("dp_shard=2",)))) == 1


# ---- buffers


def spectral() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.ReLU(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2)),
    )


def old_spectral() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2))


class Average(nn.Sequential):
    """Keeps an average of its inputs, which depends on the samples; and puts a new tensor in its place."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 2))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return super().forward(x)


class Count(nn.Sequential):
    """Counts its forwards, and reads a constant."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("constant", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.constant


@pytest.mark.parametrize("model", ["spectral", "old spectral", "count"])
@pytest.mark.parametrize("size", [2, 3])
def test_buffers_that_change_alike_have_the_same_bits(ranks: Pool, model: str, size: int) -> None:
    """4 microbatches and less, so that one of 3 ranks has none at times."""
    settings = {"model": model, "microbatch_size": size, "layout": ""}
    results = [ranks.run(train, nproc=nproc, args=(settings,)) for nproc in (1, 2, 3)]
    assert len({each for many in results for (each,) in many}) == 1


def test_a_buffer_that_changes_alike_changes_once_per_step() -> None:
    trainer = take_steps({"model": Count, "microbatch_size": 2})
    assert int(trainer.model.count) == 2  # type: ignore[arg-type]


def test_a_buffer_that_depends_on_the_samples_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    trainer = take_steps({"model": Average, "microbatch_size": 4})
    assert caplog.text.count("PL416") == 1
    assert "average: forward changes this buffer depending on the samples" in caplog.text
    expected = torch.zeros(6)
    samples = torch.stack([Samples()[index]["x"] for index in range(32)])
    for microbatch in samples.split(4):
        expected = 0.9 * expected + 0.1 * microbatch.mean(0)
    torch.testing.assert_close(trainer.model.average, expected)  # each forward once, the probe's none


def test_a_skipped_step_leaves_them_alone() -> None:
    trainer = build(model=Count, loss=lambda output, batch: (output.sum() * float("nan"), 1))
    trainer.step({"x": torch.randn(4, 6)})
    assert int(trainer.model.count) == 0  # type: ignore[arg-type]
