"""A loop of a user's own: what it may do, on any number of ranks, and what it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import paceline
from tests.dist.pool import Pool
from tests.train.loops import hash_state, square

Body = Callable[[Any, Any], None]


class Plain(nn.Module):
    """Two linear layers with dropout; nothing depends on the microbatches' size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
        self.aside = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def begin(layout: str = "", **settings: Any) -> tuple[paceline.Loop, Plain, Any, TensorDataset]:
    torch.manual_seed(1)
    model, data = Plain(), TensorDataset(torch.randn(52, 6), torch.randn(52, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"microbatch_size": 4, "reduction": "exact", **settings}
    if "tp" in layout:
        settings |= {"example": data[:4], "forward": lambda model, batch: model(batch[0])}
    return paceline.Loop(model, optimizer, layout=layout, **settings), model, optimizer, data


# ---- what a loop may do, each with one hash on any number of ranks


def several_backwards(world: Any, layout: str) -> str:
    loop, model, optimizer, data = begin(layout)
    for step in loop.loader(data, global_batch_size=16, epochs=1):
        for x, y in step:
            output = model(x)
            (output - y).square().mean().backward(retain_graph=True)
            output.abs().mean().backward()
            model.aside.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_state(loop.whole_state())


def gradient_penalty(world: Any, layout: str) -> str:
    loop, model, optimizer, data = begin(layout)
    for step in loop.loader(data, global_batch_size=16, epochs=1):
        for x, y in step:
            x.requires_grad_()
            output = model(x)
            (found,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            ((output - y).square().mean() + (found.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_state(loop.whole_state())


def zero_every_second_step(world: Any, layout: str) -> str:
    loop, model, optimizer, data = begin(layout)
    for step in loop.loader(data, global_batch_size=8, epochs=1):
        for batch in step:
            square(model(batch[0]), batch).backward()
        if step.number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return hash_state(loop.whole_state())


def kept_gradients(world: Any, layout: str) -> str:
    """Two passes with gradients projected onto each other (PCGrad); the first outlives the second."""
    loop, model, optimizer, data = begin(layout)
    for step in loop.loader(data, global_batch_size=16, epochs=1):
        for batch in step:
            square(model(batch[0]), batch).backward()
        first = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        for batch in step:
            model(batch[0]).abs().mean().backward()
        for parameter, other in zip(model.parameters(), first, strict=True):
            if parameter.grad is not None and other is not None:
                parameter.grad.add_(other * (parameter.grad * other).sum().clamp(max=0.0))
        optimizer.step()
        optimizer.zero_grad()
    return hash_state(loop.whole_state())


def left_out_microbatches(world: Any, layout: str) -> str:
    loop, model, optimizer, data = begin(layout)
    weights = []
    for step in loop.loader(data, global_batch_size=16, epochs=1):
        for batch in step:
            if batch[1].sum() < -1:
                continue
            square(model(batch[0]), batch).backward()
        weights.append(step.weight)
        optimizer.step()
        optimizer.zero_grad()
    assert min(weights) < 16
    return hash_state(loop.whole_state())


def broken_microbatch(world: Any, layout: str) -> str:
    loop, model, optimizer, data = begin(layout)
    data.tensors[0][11] = float("nan")
    skipped = 0
    for step in loop.loader(data, global_batch_size=16, epochs=1):
        for batch in step:
            square(model(batch[0]), batch).backward()
        skipped += step.skipped is not None
        optimizer.step()
        optimizer.zero_grad()
    assert skipped == 1
    return hash_state(loop.whole_state())


def scaler(world: Any, layout: str) -> str:
    """A GradScaler that falls from a scale at which gradients overflow."""
    loop, model, optimizer, data = begin(layout, on_nonfinite="keep")
    scaling = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    loop.track(scaler=scaling)
    for step in loop.loader(data, global_batch_size=16, epochs=2):
        for batch in step:
            scaling.scale(100 * square(model(batch[0]), batch)).backward()
        scaling.unscale_(optimizer)
        step.clip_grad_norm_(0.5)
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
    assert scaling.get_scale() < 2.0**127
    return hash_state(loop.whole_state())


def edited_gradients(world: Any, layout: str) -> str:
    """A loop that changes gradients in ways that torch does not count, and clips to their norm."""
    loop, model, optimizer, data = begin(layout)
    norms = []
    for step in loop.loader(data, global_batch_size=16, epochs=1):
        for batch in step:
            square(model(batch[0]), batch).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if step.number % 2:
            torch._foreach_mul_(gradients, 0.01)
        for grad in gradients:
            grad.data.mul_(0.1)
        expected = float(nn.utils.get_total_norm(gradients)) if not layout else 0.0
        norms.append(step.clip_grad_norm_(0.001))
        assert layout or norms[-1] == pytest.approx(expected, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    return hash_state({"norms": torch.tensor(norms), **loop.whole_state()})


def goes_on_after_an_exception(world: Any, layout: str) -> str:
    """As in a notebook whose cell is run again; gradients from before the loop do not count."""
    torch.manual_seed(1)
    model, data = Plain(), TensorDataset(torch.randn(52, 6), torch.randn(52, 2))
    model(data[:4][0]).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = paceline.Loop(model, optimizer, layout=layout, microbatch_size=4)
    codes = []
    for attempt in range(3):
        try:
            for step in loop.loader(data, global_batch_size=16, epochs=1, name=f"loader {attempt}"):
                for batch in step:
                    if not attempt:
                        raise TypeError
                    square(model(batch[0]), batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        except paceline.PacelineError as error:
            codes.append(error.code)
        except TypeError:
            codes.append("TypeError")
    assert codes == ["TypeError", "PL649"]
    return hash_state(loop.whole_state())


def draws_between_steps(world: Any, layout: str) -> str:
    loop, model, optimizer, data = begin(layout)
    torch.manual_seed(5)
    drawn = []
    for step in loop.loader(data, global_batch_size=12, epochs=1):
        for batch in step:
            square(model(batch[0] + torch.rand(())), batch).backward()
        drawn.append(torch.rand(()))
        optimizer.step()
        optimizer.zero_grad()
    return hash_state({"drawn": torch.stack(drawn), **loop.whole_state()})


def token_means(world: Any, layout: str) -> str:
    """Means over targets; some microbatches have none."""
    loop, model, optimizer, data = begin(layout, weight=lambda batch: (batch[1][:, 0] > 0.8).sum())
    for step in loop.loader(data, global_batch_size=16, epochs=1):
        for x, y in step:
            kept = y[:, 0] > 0.8
            (model(x)[kept] - y[kept]).square().mean().backward()
        assert step.skipped is None
        step.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return hash_state(loop.whole_state())


def numbered(world: Any, layout: str) -> str:
    """Microbatches that the loop draws itself, and its own values."""
    loop, model, optimizer, _ = begin(layout, means=["size", "late"])
    sizes = []
    for _ in range(4):
        step = loop.step(5)
        for number in step:
            x = torch.randn(4, 6)
            output = model(x)
            step.mean("size", output.abs().mean() + number)
            step.backward(output.square().mean())
            step.mean("late", output.abs().mean() + number)
        assert step.means["late"] == step.means["size"]
        sizes.append(torch.tensor([step.means["size"], step.loss]))
        optimizer.step()
        optimizer.zero_grad()
    return hash_state({"sizes": torch.stack(sizes), **loop.whole_state()})


def split_batches(world: Any, layout: str) -> str:
    loop, model, optimizer, data = begin(layout)
    for _ in range(3):
        for rows in torch.randperm(52).split(14):
            step = loop.split(data[rows])
            for batch in step:
                square(model(batch[0]), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return hash_state(loop.whole_state())


def weighted_sampler(world: Any, layout: str) -> str:
    loop, model, optimizer, data = begin(layout)
    sampler = WeightedRandomSampler(torch.arange(1.0, 53.0), 40, generator=torch.Generator())
    seen = []
    for step in loop.loader(DataLoader(data, batch_size=16, sampler=sampler), epochs=2):
        for batch in step:
            seen.append(batch[0].sum())
            square(model(batch[0]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(set(map(float, seen))) == len(seen)  # drawn anew in each epoch
    return hash_state(loop.whole_state())


class ByLength:
    """Batches of samples of one kind, of varying sizes, in an order that torch draws."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        for number in torch.randperm(6).tolist():
            yield [number + 6 * place for place in torch.randperm(3 + number).tolist()]


def batch_sampler(world: Any, layout: str, folder: str = "", stops: int = 0) -> str:
    loop, model, optimizer, data = begin(layout)
    loader: Any = DataLoader(data, batch_sampler=ByLength())  # type: ignore[arg-type]
    steps = loop.loader(loader, epochs=2)
    if folder:
        loop.resume(folder)
    sizes = []
    for step in steps:
        sizes.append(step.num_samples)
        for batch in step:
            square(model(batch[0]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if stops and step.number == stops:
            loop.save()
            return ""
    if not folder:
        assert sorted(sizes[:6]) == [3, 4, 5, 6, 7, 8]
        assert sizes[:6] != sizes[6:]
    return hash_state(loop.whole_state())


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        result: Tensor = self.linear(x)
        return result


def buffers_of_forwards(world: Any, layout: str) -> str:
    torch.manual_seed(1)
    model, data = Counted(), TensorDataset(torch.randn(52, 6), torch.randn(52, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = paceline.Loop(model, optimizer, layout=layout, microbatch_size=4)
    num_steps = 0
    for step in loop.loader(data, global_batch_size=16, epochs=2):
        for batch in step:
            square(model(batch[0]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps = step.number
    assert float(model.count) == num_steps
    return hash_state(loop.whole_state())


def two_models(world: Any, layout: str) -> str:
    """A GAN: a pass for D, one for G, whose gradients in D nobody wants; D keeps those of two steps."""
    torch.manual_seed(2)
    g, d = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    of_g, of_d = (torch.optim.Adam(each.parameters(), lr=0.02) for each in (g, d))
    loop = paceline.Loop({"G": g, "D": d}, {"G": of_g, "D": of_d}, layout=layout, microbatch_size=4)
    data = TensorDataset(torch.randn(40, 6))
    norms = []
    for step in loop.loader(DataLoader(data, batch_size=16, shuffle=True), epochs=2):
        for (real,) in step.of("D"):
            fake = g(torch.randn(len(real), 3)).detach()
            (d(fake).mean() - d(real).mean() + d(real).square().mean()).backward()
        norms.append(step.clip_grad_norm_(0.3, "D"))
        of_d.step()
        for (real,) in step.of("G"):
            step.backward(-d(g(torch.randn(len(real), 3))).mean())
        of_g.step()
        of_g.zero_grad()
        if step.number % 2 == 0:
            of_d.zero_grad()
    return hash_state({"norms": torch.tensor(norms), **loop.whole_state()})


ANYWHERE = [
    *(zero_every_second_step, broken_microbatch, scaler, draws_between_steps, numbered, split_batches),
    *(edited_gradients, goes_on_after_an_exception),
]
REPLICAS = [
    several_backwards,
    gradient_penalty,
    kept_gradients,
    left_out_microbatches,
    token_means,
    weighted_sampler,
    batch_sampler,
    buffers_of_forwards,
    two_models,
]


def check_all(ranks: Pool, cases: list[Callable[..., str]], layouts: list[tuple[int, str]]) -> None:
    wrong = []
    for case in cases:
        expected = ranks.run(case, 1, ("",))[0]
        for nproc, layout in layouts:
            try:
                found = ranks.run(case, nproc, (layout,))[0]
            except Exception as error:
                found = str(error)[-900:]
            if found != expected:
                wrong.append((case.__name__, layout, expected, found))
    assert not wrong, "\n".join(map(str, wrong))


def test_the_bits_do_not_depend_on_the_ranks(ranks: Pool) -> None:
    check_all(ranks, [*ANYWHERE, *REPLICAS], [(3, "dp_replicate=3")])


def test_the_bits_are_the_same_with_shards(ranks: Pool) -> None:
    check_all(ranks, [*ANYWHERE, token_means], [(2, "dp_shard=2")])


def test_a_batch_sampler_goes_on_in_the_middle_of_an_epoch(ranks: Pool, tmp_path: Path) -> None:
    expected = ranks.run(batch_sampler, 1, ("",))[0]
    ranks.run(batch_sampler, 2, ("dp_replicate=2", str(tmp_path), 8))
    ranks.run(batch_sampler, 1, ("", str(tmp_path), 10))
    assert ranks.run(batch_sampler, 3, ("dp_replicate=3", str(tmp_path)))[0] == expected


@pytest.mark.slow
def test_the_bits_are_the_same_on_more_ranks(ranks: Pool) -> None:
    check_all(ranks, [*ANYWHERE, *REPLICAS], [(2, "dp_replicate=2"), (4, "dp_replicate=4")])
    check_all(ranks, [*ANYWHERE, token_means], [(3, "dp_shard=3"), (4, "dp_replicate=2 dp_shard=2")])
