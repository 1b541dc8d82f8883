"""A loss over the outputs of the whole global batch: the same bits on any ranks, and torch's numbers."""

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

NUM_SAMPLES, GLOBAL_BATCH, NUM_STEPS = 60, 24, 5


class Pairs(Dataset[dict[str, Any]]):
    """Pictures and texts; each text has its own length, which a collate pads per microbatch."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.randn(20, generator=torch.Generator().manual_seed(index))
        return {"image": drawn[:12], "text": drawn[12:], "id": index, "length": index % 4}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "padded": torch.zeros(len(samples), int(batch["length"].max()))}


class TwoTowers(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()

        def tower(width: int) -> nn.Module:
            middle = nn.BatchNorm1d(16) if norm else nn.Identity()
            return nn.Sequential(
                nn.Linear(width, 16), middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 8)
            )

        self.image, self.text = tower(12), tower(8)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Any]:
        return {
            "image": F.normalize(self.image(image), dim=-1),
            "text": F.normalize(self.text(text), dim=-1),
            "scale": self.scale.exp(),
            "unused": image.sum(1),
            "name": "clip",
        }


def forward(model: nn.Module, batch: dict[str, Any]) -> Any:
    return model(batch["image"], batch["text"])


def clip_loss(output: dict[str, Any], batch: Any) -> Tensor:
    logits = output["scale"] * output["image"] @ output["text"].T
    targets = torch.arange(len(logits))
    assert len(batch["id"]) == len(logits)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def recall(output: dict[str, Any], batch: Any) -> Any:
    hits = (output["image"] @ output["text"].T).argmax(1) == torch.arange(len(output["image"]))
    return hits.sum(), len(hits)


def build(model: nn.Module | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = TwoTowers(settings.pop("dropout", 0.0), settings.pop("norm", False)) if model is None else model
    return Trainer(
        **{
            "model": model,
            "forward": forward,
            "loss": clip_loss,
            "optimizer": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
            "loss_over": "global_batch",
            "microbatch_size": 5,
            "clip_norm": 1.0,
            **settings,
        }
    )


def train(world: Any, options: dict[str, Any]) -> dict[str, Any]:
    trainer = build(**options)
    loader = trainer.loader(Pairs(), global_batch_size=GLOBAL_BATCH, epochs=2, collate=collate)
    losses = []
    for share in loader:
        step = trainer.step(share)
        assert step.skipped is None
        losses.append((step.loss, step.grad_norm))
        if step.number == NUM_STEPS:
            break
    valid = trainer.loader(Pairs(), global_batch_size=GLOBAL_BATCH, shuffle=False, collate=collate)
    evaluation = trainer.evaluate(valid, {"recall": recall})
    state = trainer.whole_state()
    return {
        "losses": losses,
        "hash": hash_tensors(state) if world.is_main else None,
        "state": {name: t.clone() for name, t in state.items()},
        "evaluation": (evaluation.loss, evaluation.weight, evaluation.metrics["recall"]),
    }


PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout and BatchNorm": {"dropout": 0.2, "norm": True},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
}


@pytest.mark.parametrize("case", PLAIN)
def test_any_number_of_ranks_has_the_same_bits(ranks: Pool, case: str) -> None:
    """5 microbatches of 5 and 4 samples, and of 5 and 2 at the end of the epoch; on 6 ranks one has none."""
    options = PLAIN[case]
    results = {nproc: ranks.run(train, nproc=nproc, args=(options,)) for nproc in (1, 2, 3)}
    one = results[1][0]
    for nproc in (2, 3):
        main = results[nproc][0]
        assert main["hash"] == one["hash"]
        assert main["losses"] == one["losses"]
        assert main["evaluation"] == one["evaluation"]
        assert all(each["losses"] == one["losses"] for each in results[nproc])


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2", "dp_shard=3", "dp_replicate=2 zero=3 dp_shard=2"])
def test_other_layouts(ranks: Pool, layout: str) -> None:
    if layout == "dp_replicate=2 zero=3 dp_shard=2":
        layout = "dp_replicate=2 dp_shard=2"
    nproc = 4 if "replicate" in layout else int(layout[-1])
    example = {"image": torch.randn(2, 12), "text": torch.randn(2, 8)}
    options = {"layout": layout, "example": example, "microbatch_size": 7}
    if "tp" in layout:
        options["dtype"] = "fp64"
    one = ranks.run(train, nproc=1, args=({**options, "layout": ""},))[0]
    many = ranks.run(train, nproc=nproc, args=(options,))[0]
    if "tp" in layout:
        for mine, its in zip(one["losses"], many["losses"], strict=True):
            assert mine == pytest.approx(its, rel=1e-12)
        assert one["evaluation"] == pytest.approx(many["evaluation"], rel=1e-12)
    else:
        assert (many["hash"], many["losses"]) == (one["hash"], one["losses"])


class DeepTowers(TwoTowers):
    """Towers on blocks that both inputs pass through, so that there is something to cut."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Any]:
        found = super().forward(image, text)
        for block in self.blocks:
            found = {**found, "image": found["image"] + block(found["image"]), "text": block(found["text"])}
        return found


def train_deep(world: Any, layouts: list[str]) -> list[dict[str, Any]]:
    example = {"image": torch.randn(2, 12), "text": torch.randn(2, 8)}
    return [train(world, {"model": DeepTowers, "layout": layout, "example": example}) for layout in layouts]


@pytest.mark.parametrize(
    ("nproc", "layouts"),
    [
        (2, ["pp=2"]),
        pytest.param(2, ["pp=2 schedule=zbv"], marks=pytest.mark.slow),
        pytest.param(4, ["pp=2 dp_replicate=2", "pp=2 dp_shard=2 schedule=gpipe"], marks=pytest.mark.slow),
    ],
)
def test_stages_have_the_same_bits(ranks: Pool, nproc: int, layouts: list[str]) -> None:
    """Each layer is called twice per forward. 5 microbatches, the last ones smaller; under dp, 3 and 2."""
    [one] = ranks.run(train_deep, nproc=1, args=([""],))[0]
    results = ranks.run(train_deep, nproc=nproc, args=(layouts,))
    for place in range(len(layouts)):
        main = results[0][place]
        assert (main["hash"], main["evaluation"]) == (one["hash"], one["evaluation"])
        assert all(each[place]["losses"] == one["losses"] for each in results)


def test_a_rank_without_a_microbatch(ranks: Pool) -> None:
    options = {"microbatch_size": 12}  # 2 microbatches, and 1 at the end
    one, many = (ranks.run(train, nproc=nproc, args=(options,)) for nproc in (1, 3))
    assert {each["evaluation"] for each in many} == {one[0]["evaluation"]}
    assert many[0]["hash"] == one[0]["hash"]


def train_plainly(num_steps: int, samples: list[list[int]]) -> tuple[list[float], dict[str, Tensor]]:
    """Train by a loop of torch's own on whole batches."""
    torch.manual_seed(0)
    model = TwoTowers().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, losses = Pairs(), []
    for indices in samples[:num_steps]:
        batch = collate([data[index] for index in indices])
        batch = {**batch, "image": batch["image"].double(), "text": batch["text"].double()}
        loss = clip_loss(forward(model, batch), batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def test_the_numbers_are_those_of_a_plain_loop() -> None:
    order: list[list[int]] = []

    def note(output: Any, batch: Any) -> Tensor:
        order.append(batch["id"].tolist())
        return clip_loss(output, batch)

    with start(device="cpu", threads_per_rank=1):
        trainer = build(loss=note, dtype="fp64")
        loader = trainer.loader(Pairs(), global_batch_size=GLOBAL_BATCH, epochs=2, collate=collate)
        losses = [trainer.step(share).loss for share in loader]
        expected, weights = train_plainly(len(losses), order)
        assert losses == pytest.approx(expected, rel=1e-12)
        for name, parameter in trainer.model.named_parameters():
            torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-10, atol=1e-12)


def test_raw_batches_too(ranks: Pool) -> None:
    results = ranks.run(step_raw, nproc=2)
    assert results[0] == results[1] == pytest.approx(ranks.run(step_raw, nproc=1)[0], rel=1e-6)


def step_raw(world: Any) -> float:
    trainer = build()
    size = GLOBAL_BATCH // world.world_size
    data = [Pairs()[index] for index in range(GLOBAL_BATCH)][world.rank * size : (world.rank + 1) * size]
    batch = torch.utils.data.default_collate(data)
    trainer.step(batch)
    return trainer.step(batch).loss


# ---- what can't work


def step(**settings: Any) -> None:
    with start(device="cpu", threads_per_rank=1):
        trainer = build(**settings)
        for share in trainer.loader(Pairs(), global_batch_size=GLOBAL_BATCH, collate=collate):
            trainer.step(share)


REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "unknown": ("PL400", "loss_over='batch'", {"loss_over": "batch"}),
    "a constant": (
        "PL412",
        "does not depend on the output",
        {"loss": lambda output, batch: torch.zeros(())},
    ),
    "rows of several shapes": (
        "PL415",
        "batch['padded'] has rows of the shapes (2,), (3,)",
        {"loss": lambda output, batch: output["image"].sum() + batch["padded"].sum()},
    ),
    "an output that is no row and differs": (
        "PL415",
        "output has no row per sample",
        {"forward": lambda model, batch: forward(model, batch)["image"].mean()},
    ),
    "a field of rows and of text": (
        "PL415",
        "output['name'] has no row per sample",
        {"forward": lambda model, batch: {**forward(model, batch), "name": str(batch["id"])}},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_joined_is_refused(case: str) -> None:
    code, saw, settings = REFUSED[case]
    with pytest.raises(PacelineError) as caught:
        step(**settings)
    assert caught.value.code == code
    assert saw in str(caught.value)


def test_a_parameter_that_the_loss_takes_by_itself_is_refused() -> None:
    model = TwoTowers()
    with pytest.raises(PacelineError, match=r"uses a trained tensor of shape \[1\].*PL415"):
        step(model=model, loss=lambda output, batch: output["image"].sum() * model.scale.sum())


def test_named_models_are_refused() -> None:
    with start(device="cpu", threads_per_rank=1), pytest.raises(PacelineError, match=r"with step=.*PL415"):
        Trainer(
            {"one": nn.Linear(2, 2)},
            optimizer={"one": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)},
            step=lambda update: None,
            loss_over="global_batch",
        )


def bad_on_all(world: Any) -> None:
    trainer = build(loss=lambda output, batch: output["image"].sum() + batch["padded"].sum())
    for share in trainer.loader(Pairs(), global_batch_size=GLOBAL_BATCH, collate=collate):
        trainer.step(share)


def test_all_ranks_refuse_together(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(bad_on_all)
    assert {error.code for error in caught.value.causes.values()} == {"PL415"}


def test_fields_of_a_tuple_come_when_asked_for() -> None:
    touched = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        assert len(batch) == 2
        with pytest.raises(IndexError):
            batch[2]
        targets = batch[-1]
        touched.append(len(targets))
        return F.cross_entropy(output, targets)

    with start(device="cpu", threads_per_rank=1):
        trainer = build(model=nn.Linear(3, 2), forward=lambda model, batch: model(batch[0]), loss=loss)
        trainer.step((torch.randn(12, 3), torch.zeros(12, dtype=torch.long)))
    assert touched == [12]
