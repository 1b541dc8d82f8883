"""A loss or gradient that is not finite on one rank: all skip the step, nothing is left of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.checkpoint import hash_tensors
from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError

GLOBAL_BATCH, MICROBATCH = 8, 2


class Data(Dataset[dict[str, Tensor]]):
    """Batches of 8 in microbatches of 2; the samples named are bad in some way."""

    def __init__(self, num_batches: int, bad: dict[int, str]) -> None:
        self.num_samples = num_batches * GLOBAL_BATCH
        self.bad = bad

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(5, generator=torch.Generator().manual_seed(index)) + 2
        root, weight = torch.tensor(1.0), torch.tensor(1.0)
        match self.bad.get(index):
            case "nan":
                x[3] = float("nan")
            case "inf":
                x[0] = float("inf")
            case "root":  # sqrt(0): a finite loss with an infinite gradient
                root = torch.tensor(0.0)
            case "weight":
                weight = torch.tensor(0.0)
        return {"x": x, "root": root, "weight": weight}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.1), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def forward(self, x: Tensor, root: Tensor, weight: Tensor) -> Tensor:
        output = self.layers(x)
        # The square root's gradient is infinite where `root` is 0.
        return output.square() + (output * root[:, None]).square().sqrt()


def build_trainer(**settings: Any) -> Trainer:
    return Trainer(
        Net(),
        loss=lambda output, batch: ((output[:, 0] * batch["weight"]).sum(), batch["weight"].sum()),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01),
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        microbatch_size=MICROBATCH,
        clip_norm=1.0,
        **settings,
    )


def whole_state(trainer: Trainer) -> str:
    """Return a hash of weights, statistics and the optimizer's state."""
    update = trainer._updates["model"]
    state = {f"model.{n}": t for n, t in trainer.model.state_dict().items()}
    for name, held in update.optimizer_state()["parameters"].items():
        state |= {f"{name}.{key}": torch.as_tensor(value) for key, value in held["state"].items()}
    return hash_tensors(state)


def train(world: Any, num_batches: int, bad: dict[int, str], settings: dict[str, Any]) -> list[Any]:
    trainer = build_trainer(**settings)
    steps = []
    dataset = Data(num_batches, bad)
    for share in trainer.loader(dataset, global_batch_size=GLOBAL_BATCH, shuffle=False):
        step = trainer.step(share)
        steps.append((step.skipped, str(step.loss), step.lr, whole_state(trainer), trainer.num_samples))
    return steps


@pytest.mark.parametrize("nproc", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "sample", "reason"),
    [
        ("nan", 22, "the loss of microbatch 3 of 4 is nan while others are finite"),
        ("nan", 16, "the loss of microbatch 0 of 4 is nan while others are finite"),
        ("inf", 19, "the loss of microbatch 1 of 4 is nan while others are finite"),
        ("root", 21, "the gradient of layers.0.weight is not finite"),
    ],
)
def test_one_bad_microbatch_skips_the_step_on_all_ranks(
    ranks: Pool, nproc: int, kind: str, sample: int, reason: str
) -> None:
    results = ranks.run(train, nproc=nproc, args=(5, {sample: kind}, {}))
    assert all(steps == results[0] for steps in results), "the same on all ranks"
    steps = results[0]
    assert [skipped for skipped, *_ in steps] == [None, None, reason, None, None]
    states = [state for _, _, _, state, _ in steps]
    assert states[2] == states[1], "nothing is left of it"
    assert len(set(states)) == 4
    # The rate follows the number of the step, and the samples are used up.
    assert [lr for _, _, lr, _, _ in steps] == pytest.approx([0.01 / n for n in range(1, 6)])
    assert [num for *_, num in steps] == [8, 16, 24, 32, 40]
    assert math.isfinite(float(steps[3][1]))


def test_a_skipped_step_is_as_if_its_data_had_not_been(ranks: Pool) -> None:
    """But for the seeds of dropout, which follow the number of the step."""
    results = ranks.run(train, nproc=2, args=(3, {3: "nan"}, {}))
    fresh = ranks.run(untouched)[0]
    assert results[0][0][3] == fresh


def untouched(world: Any) -> str:
    return whole_state(build_trainer())


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_no_weight_at_all_skips_and_some_does_not(ranks: Pool, nproc: int) -> None:
    bad = dict.fromkeys(range(8, 16), "weight") | dict.fromkeys(range(16, 23), "weight")
    for steps in ranks.run(train, nproc=nproc, args=(4, bad, {})):
        assert [s for s, *_ in steps] == [None, "the global batch has a total weight of 0", None, None]
        assert steps[1][1] == "nan"
        assert steps[1][3] == steps[0][3]
        assert math.isfinite(float(steps[2][1]))


def test_fp16_skips_a_bad_loss_too(ranks: Pool) -> None:
    for steps in ranks.run(train, nproc=3, args=(8, {25: "nan"}, {"dtype": "fp16"})):
        reasons = [skipped for skipped, *_ in steps]
        # The first scale may be too large for these gradients; by the third step it fits.
        assert reasons[2:4] == [None, "the loss of microbatch 0 of 4 is nan while others are finite"]
        assert steps[3][3] == steps[2][3]
        assert None in reasons[4:], "goes on, once the scale fits"


# ---- too many in a row


def run_with_folder(
    world: Any, folder: str, num_batches: int, bad: dict[int, str], settings: dict[str, Any], every: int
) -> int:
    trainer = build_trainer(**settings)
    dataset = Data(num_batches, bad)
    loader = trainer.loader(dataset, global_batch_size=GLOBAL_BATCH, shuffle=False)
    trainer.resume(folder)
    for share in loader:
        step = trainer.step(share)
        if every and step.number % every == 0:
            trainer.save()
    return trainer.step_number


def bad_batches(*numbers: int) -> dict[int, str]:
    return {number * GLOBAL_BATCH + 5: "nan" for number in numbers}


def test_a_set_number_in_a_row_ends_the_run_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    args = (str(tmp_path), 9, bad_batches(1, 3, 4, 5, 6), {"max_skipped_in_a_row": 3}, 0)
    with pytest.raises(RankError) as caught:
        ranks.run(run_with_folder, nproc=2, args=args)
    assert sorted(caught.value.causes) == [0, 1]
    for error in caught.value.causes.values():
        assert isinstance(error, PacelineError)
        assert error.code == "PL431"
        assert "3 steps in a row were skipped, the last one (step 6)" in str(error)
        assert "the loss of microbatch 2 of 4 is nan while others are finite" in str(error)
    # All of it is in the metrics, the last skip included.
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["skipped"]] == [2, 4, 5, 6]
    assert [row["loss"] is None for row in rows] == [False, True, False, True, True, True]


def test_skips_with_good_steps_between_them_go_on(ranks: Pool, tmp_path: Path) -> None:
    args = (str(tmp_path), 9, bad_batches(0, 1, 3, 4, 6, 7), {"max_skipped_in_a_row": 3}, 0)
    assert ranks.run(run_with_folder, nproc=2, args=args) == [9, 9]


def test_the_count_goes_on_over_a_resume(ranks: Pool, tmp_path: Path) -> None:
    settings = {"max_skipped_in_a_row": 3}
    bad = bad_batches(2, 3, 4)
    with pytest.raises(RankError, match="the last one \\(step 5\\)"):
        ranks.run(run_with_folder, nproc=1, args=(str(tmp_path), 9, bad, settings, 2))
    with pytest.raises(RankError, match="the last one \\(step 5\\)"):
        ranks.run(run_with_folder, nproc=2, args=(str(tmp_path), 9, bad, settings, 0))
