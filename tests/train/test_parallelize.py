"""`paceline.parallelize`: a layout alone and a plain torch loop around it, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import paceline
from paceline.errors import PacelineError
from tests.dist.pool import Pool
from tests.train.loops import Net, hash_state, square
from tests.train.test_loop_axes import build

STEPS, SAMPLES = 4, 12


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 2)) for _ in range(STEPS)]


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()  # neither dropout nor BatchNorm: plain torch draws other masks


def train(world: Any, layout: str, optimizer_of: str = "AdamW", sizes: tuple[int, ...] = ()) -> Any:
    """Train on samples that each data rank brings itself; return weights and gradient norms."""
    model = net()
    laid_out = paceline.parallelize(
        model, layout, example=batches()[0], forward=lambda model, batch: model(batch[0]), dtype="fp64"
    )
    optimizer = getattr(torch.optim, optimizer_of)(model.parameters(), lr=0.01)
    num_ranks = laid_out.layout.dp
    rank, norms = laid_out.layout.find_dp_rank(world.rank), []
    for batch in batches():
        rows = torch.arange(SAMPLES).split(sizes or [SAMPLES // num_ranks] * num_ranks)[rank]
        step = laid_out.own(tuple(each[rows].double() for each in batch))
        for part in step:
            square(model(part[0]), part).backward()
        norms.append(step.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
    return laid_out.whole_state(), norms


def train_plainly(optimizer_of: str = "AdamW") -> Any:
    model, norms = net().double(), []
    optimizer = getattr(torch.optim, optimizer_of)(model.parameters(), lr=0.01)
    for batch in batches():
        x, y = (each.double() for each in batch)
        square(model(x), (x, y)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


@pytest.mark.parametrize("optimizer_of", ["AdamW", "Adagrad", "Adafactor"])
def test_a_plain_loop_has_the_weights_of_one_process(ranks: Pool, optimizer_of: str) -> None:
    expected, norms = train_plainly(optimizer_of)
    # Adagrad has state from its construction, Adafactor needs whole matrices.
    layouts = [(1, ""), (3, "dp_replicate=3"), (2, "dp_shard=2"), (2, "tp=2")]
    for nproc, layout in layouts if optimizer_of == "AdamW" else layouts[2:3]:
        state, found = ranks.run(train, nproc, (layout, optimizer_of))[0]
        assert found == pytest.approx(norms, rel=1e-9), layout
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=f"{layout} {name}")


def test_ranks_may_bring_different_numbers_of_samples(ranks: Pool) -> None:
    expected, _ = train_plainly()
    for layout, sizes in [("dp_replicate=3", (7, 5, 0)), ("dp_shard=3", (1, 0, 11))]:
        state, _ = ranks.run(train, 3, (layout, "AdamW", sizes))[0]
        torch.testing.assert_close(state, dict(expected), rtol=1e-9, atol=1e-12)


def train_transformer(world: Any, kind: str, layout: str) -> list[float]:
    """Return the losses of a transformer whose ranks bring the samples of their data rank."""
    model, batch = build(kind)
    laid_out = paceline.parallelize(model.eval(), layout, example=batch)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    rank, num_ranks = laid_out.layout.find_dp_rank(world.rank), laid_out.layout.dp
    for _ in range(3):
        step = laid_out.own({"input_ids": batch["input_ids"].chunk(num_ranks)[rank]})
        for part in step:
            ids = part["input_ids"]
            logits = model(ids).logits[:, :-1]
            step.backward(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        losses.append(step.loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("kind", "layouts"), [("gpt2", ["tp=2 sequence=true", "cp=2"]), ("mixtral", ["ep=2"])]
)
def test_divided_transformers(ranks: Pool, kind: str, layouts: list[str]) -> None:
    model, batch = build(kind)
    model, ids, expected = model.eval(), batch["input_ids"], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        loss = cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for layout in layouts:
        found = ranks.run(train_transformer, 2, (kind, layout))
        assert found[0] == found[1] == pytest.approx(expected, rel=1e-5), layout


def refuse(world: Any, what: str) -> str:
    model = net()
    try:
        layout = {"pp": "pp=2", "example": "tp=2", "number": "dp_shard=3", "drift": ""}.get(
            what, "dp_shard=2"
        )
        laid_out = paceline.parallelize(model, layout)
        if what == "twice":
            paceline.parallelize(model, layout)
        if what == "resume":
            laid_out.resume("never")
        if what == "save":
            laid_out.save()
        if what == "own":
            for batch in batches():
                for part in laid_out.own(batch):
                    square(model(part[0]), part).backward()
        if what == "drift":  # a backward outside of the inner loop
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in batches():
                square(model(batch[0] + world.rank), batch).backward()
                optimizer.step()
                for part in laid_out.own(tuple(each[world.rank :] for each in batch)):
                    square(model(part[0]), part).backward()
    except PacelineError as error:
        return error.code
    return "none"


def test_what_is_refused(ranks: Pool) -> None:
    expected = {"pp": "PL646", "example": "PL463", "number": "PL113", "twice": "PL929", "resume": "PL647"}
    expected |= {"save": "PL403", "own": "PL419", "drift": "PL418"}
    found = {what: set(ranks.run(refuse, 2, (what,))) for what in expected}
    assert found == {what: {code} for what, code in expected.items()}


def test_an_optimizer_that_the_loop_does_not_know() -> None:
    with paceline.start():
        model = net()
        loop = paceline.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
        stray = torch.optim.AdamW(model.parameters())
        for part in loop.split(batches()[0]):
            square(model(part[0]), part).backward()
        with pytest.raises(PacelineError, match="PL647"):
            stray.step()
        assert hash_state(loop.whole_state()) == hash_state(net().state_dict())


def test_an_optimizer_that_the_loop_builds_is_at_hand() -> None:
    with paceline.start():
        model = net()
        loop = paceline.Loop(model, lambda named: torch.optim.Adagrad([p for _, p in named]))
        for part in loop.split(batches()[0]):
            square(model(part[0]), part).backward()
        loop.optimizer.step()
        assert len(loop.optimizer.state) == len(list(model.parameters()))
