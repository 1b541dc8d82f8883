"""Predictions and metrics of all samples: once each, in order, and the same under every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from tests.dist.pool import Pool

NUM_SAMPLES, LENGTH = 13, 8


class Tagger(nn.Module):
    """A small attention model, so that every axis has something to divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 2)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def make_data() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(16, (NUM_SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(2, (NUM_SAMPLES, LENGTH), generator=generator)
    return [{"ids": ids[n], "label": labels[n], "number": n} for n in range(NUM_SAMPLES)]


def forward(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["ids"])


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    losses = nn.functional.cross_entropy(output.flatten(0, 1), batch["label"].flatten(), reduction="sum")
    return losses, batch["label"].numel()


def select(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return output.softmax(-1)[..., 1].flatten(), batch["label"].flatten()


def compute_auc(scores: Tensor, labels: Tensor) -> float:
    """The share of pairs in the right order; pairs of equal scores count half."""
    pairs = scores[labels == 1][:, None] - scores[labels == 0][None]
    return float(((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean())


def make_metrics() -> dict[str, Any]:
    found: dict[str, Any] = {"auc": (compute_auc, select)}
    found["both"] = (lambda scores, labels: {"mean": scores.mean(), "rate": labels.double().mean()}, select)
    try:
        from torchmetrics.classification import BinaryF1Score
    except ImportError:
        return found
    return found | {"f1": (BinaryF1Score(), select)}


def run(world: paceline.World, layout: str, loss_over: str = "microbatch") -> tuple[Any, ...]:
    data = make_data()
    trainer = paceline.Trainer(
        Tagger(),
        forward=forward,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        layout=layout,
        example={"ids": torch.zeros(2, LENGTH, dtype=torch.long), "label": torch.zeros(2, LENGTH).long()},
        microbatch_size=2,
        loss_over=loss_over,  # type: ignore[arg-type]
    )
    before = torch.get_rng_state()
    loader = trainer.loader(data, global_batch_size=6, shuffle=False)
    found = list(trainer.predict(loader))
    assert all(module.training for module in trainer.model.modules())
    evaluation = trainer.evaluate(loader, make_metrics())
    assert torch.equal(before, torch.get_rng_state())
    outputs = torch.cat([output for output, _ in found])
    numbers = [int(n) for _, batch in found for n in batch["number"]]
    return outputs, numbers, evaluation.values()


@pytest.mark.parametrize(
    ("layout", "nproc"),
    [
        ("dp_replicate=3", 3),
        ("pp=2", 2),
        pytest.param("dp_replicate=2", 2, marks=pytest.mark.slow),
        pytest.param("dp_shard=2", 2, marks=pytest.mark.slow),
        pytest.param("tp=2", 2, marks=pytest.mark.slow),
        pytest.param("cp=2 cp_by=gather", 2, marks=pytest.mark.slow),
        pytest.param("dp_replicate=2 pp=2", 4, marks=pytest.mark.slow),
    ],
)
def test_predictions_and_metrics_are_those_of_plain_torch(ranks: Pool, layout: str, nproc: int) -> None:
    model, data = Tagger().eval(), make_data()
    with torch.no_grad():
        truth = model(torch.stack([each["ids"] for each in data]))
    batch = {"label": torch.stack([each["label"] for each in data])}
    scores, labels = select(truth, batch)
    expected = {"auc": compute_auc(scores, labels), "both_mean": float(scores.mean())}
    expected["both_rate"] = float(labels.double().mean())
    if "f1" in make_metrics():
        hits, said = ((scores > 0.5) & (labels == 1)).sum(), (scores > 0.5).sum() + (labels == 1).sum()
        expected["f1"] = float(2 * hits / said)
    one = ranks.run(run, args=("",))[0]
    for outputs, numbers, values in [one, *ranks.run(run, nproc=nproc, args=(layout,))]:
        assert numbers == list(range(NUM_SAMPLES))
        torch.testing.assert_close(outputs, truth)
        assert {key: values[key] for key in expected} == pytest.approx(expected, abs=1e-5)
        if layout in ("dp_replicate=2", "dp_replicate=3", "dp_shard=2"):
            assert torch.equal(outputs, one[0])
            assert values == one[2]


def test_metrics_of_all_samples_beside_a_loss_over_the_global_batch(ranks: Pool) -> None:
    one = ranks.run(run, args=("", "global_batch"))[0]
    for _, _, values in ranks.run(run, nproc=3, args=("dp_replicate=3", "global_batch")):
        assert values == one[2]
        assert values["auc"] == pytest.approx(ranks.run(run, args=("",))[0][2]["auc"])


def refuse(world: paceline.World) -> list[str]:
    said = []
    trainer = paceline.Trainer(
        Tagger(),
        forward=forward,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    loader = trainer.loader(make_data(), global_batch_size=6, shuffle=False)
    for wrong in (
        lambda: list(trainer.predict(trainer.loader(make_data(), global_batch_size=6))),
        lambda: list(
            trainer.predict(trainer.loader(make_data(), global_batch_size=6, shuffle=False, drop_last=True))
        ),
        lambda: trainer.evaluate(loader, {"f1": (3, select)}),
        lambda: trainer.evaluate(loader, {"f1": (compute_auc,)}),  # type: ignore[dict-item]
        lambda: trainer.evaluate(loader, {"f1": 3}),  # type: ignore[dict-item]
        lambda: trainer.evaluate(loader, {"f1": (lambda *_: "good", select)}),
        lambda: trainer.evaluate(loader, {"f1": (compute_auc, lambda output, batch: 3.0)}),
    ):
        with pytest.raises(paceline.PacelineError) as caught:
            wrong()
        said.append(str(caught.value))
    return said


def test_what_is_no_metric_is_refused(ranks: Pool) -> None:
    said = ranks.run(refuse)[0]
    assert [text[-6:-1] for text in said] == ["PL736"] * 2 + ["PL735"] + ["PL400"] * 2 + ["PL735"] * 2
    assert "shuffle=True" in said[0]
    assert "drop_last=True" in said[1]
