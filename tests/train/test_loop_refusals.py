"""What a loop of a user's own is refused, by name, and what an error leaves behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

import paceline
from paceline.errors import PacelineError
from tests.dist.pool import Pool
from tests.train.loops import Net, square

_GENERATOR = torch.Generator().manual_seed(0)  # each rank imports this file, in a state of its own
DATA = TensorDataset(torch.randn(24, 6, generator=_GENERATOR), torch.randn(24, 2, generator=_GENERATOR))


def build(**settings: Any) -> tuple[paceline.Loop, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = settings.pop("model", None) or nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return paceline.Loop(model, optimizer, **{"microbatch_size": 4, **settings}), model, optimizer


def refused(code: str, call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(PacelineError) as caught:
        call()
    assert caught.value.code == code
    for part in parts:
        assert part in str(caught.value)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return optimizer


MODEL = nn.Linear(6, 2)


@pytest.mark.parametrize(
    ("code", "models", "optimizers", "settings", "part"),
    [
        ("PL646", MODEL, None, {"dtype": "bf16"}, "torch.autocast"),
        ("PL646", MODEL, None, {"dtype": "fp16"}, "GradScaler"),
        ("PL646", lambda: nn.Linear(6, 2), None, {}, "factory"),
        ("PL400", {"a": MODEL, "b": 3}, None, {}, "Mapping[str, Model]"),
        ("PL646", torch.compile(nn.Linear(6, 2), backend="eager"), None, {}, "compile=True"),
        ("PL647", MODEL, stepped(MODEL), {}, "has state"),
        ("PL647", MODEL, torch.optim.SGD(nn.Linear(6, 2).parameters(), lr=0.1), {}, "no model has"),
        ("PL400", MODEL, [3], {}, "Sequence[Optimizer]"),
        ("PL647", MODEL, torch.optim.Adagrad(MODEL.parameters()), {}, "lambda named: Adagrad"),
        ("PL400", MODEL, None, {"on_nonfinite": "ignore"}, "keep"),
        ("PL400", MODEL, None, {"means": "accuracy"}, "means="),
        ("PL400", MODEL, None, {"means": None}, "means="),
        ("PL400", MODEL, None, {"weight": 3}, "weight="),
        ("PL400", MODEL, None, {"microbatch_size": 2.5}, "microbatch_size"),
        ("PL400", MODEL, None, {"layout": None}, "layout"),
        ("PL400", MODEL, None, {"microbatch_size": 0}, "microbatch_size"),
        ("PL400", MODEL, None, {"reduction": "exactly"}, "reduction"),
        ("PL929", MODEL, None, {"gradient_accumulation_steps": 4}, "Loop("),
        ("PL929", MODEL, None, {"mixed_precision": "bf16"}, "Loop("),
        ("PL929", nn.parallel.DataParallel(MODEL), None, {}, "laid out already"),
    ],
)
def test_arguments(code: str, models: Any, optimizers: Any, settings: dict[str, Any], part: str) -> None:
    if optimizers is None:
        optimizers = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    with paceline.start():
        refused(code, lambda: paceline.Loop(models, optimizers, **settings), part)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([DATA[number] for number in range(24)])


class Endless(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


class Drifting(Endless):
    """A sampler with random numbers of its own, which go on from pass to pass."""

    def __init__(self, kind: list[Any]) -> None:
        self.own, self.kind = random.Random(1), kind

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[Any]:
        drawn = self.own.sample(range(24), 24)
        return iter([[place] for place in drawn] if self.kind else drawn)


@pytest.mark.parametrize(
    ("code", "data", "part"),
    [
        ("PL648", DATA, "global_batch_size"),
        ("PL648", DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0), batch_size=4), "shuffle=True"),
        ("PL648", DataLoader(DATA, batch_sampler=(b for b in [[0]])), "batch_sampler=generator"),  # type: ignore[arg-type]
        ("PL648", DataLoader(DATA, sampler=Drifting([]), batch_size=4), "another order each time"),
        ("PL648", DataLoader(DATA, batch_sampler=Drifting([[]])), "another order each time"),  # type: ignore[arg-type]
        ("PL648", DataLoader(DATA, batch_size=None), "batch_size=None"),
        ("PL648", DataLoader(DATA, sampler=Endless(), batch_size=4), "__len__"),
        (
            "PL648",
            DataLoader(DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, 2, 0), 4, False)),
            "DistributedSampler",
        ),
    ],
)
def test_data(code: str, data: Any, part: str) -> None:
    with paceline.start():
        loop, *_ = build()
        refused(code, lambda: loop.loader(data), part)


class Lists:
    def __init__(self, lists: Any) -> None:
        self.lists = lists

    def __len__(self) -> int:
        return len(self.lists)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)


def test_taken_loaders() -> None:
    with paceline.start():
        loop, _model, _ = build()
        loader = loop.loader(DataLoader(DATA, batch_size=7, drop_last=True), epochs=1)
        rows = [len(batch[0]) for step in loader for batch in step if batch[0].sum().isfinite()]
        assert rows == [4, 3] * 3  # in order, without the last 3
        stream = loop.loader(DataLoader(Stream(), batch_size=8), epochs=1)
        assert sum(len(x) for step in stream for x, _ in step) == 24
        assert len(loop.loader(DataLoader(DATA, batch_size=8))) == 3
        few = DataLoader(DATA, sampler=SequentialSampler(range(10)), batch_size=4)
        assert [step.num_samples for step in loop.loader(few)] == [4, 4, 2]
        lists = DataLoader(DATA, batch_sampler=[[5, 1, 2, 9, 0, 7], [4], [8, 3, 6]])
        steps = list(loop.loader(lists, epochs=1))
        assert [step.num_samples for step in steps] == [6, 1, 3]
        sampler = BatchSampler(RandomSampler(DATA, num_samples=10), 4, False)
        drawn = []
        for num_workers in (0, 1):
            random_lists = DataLoader(DATA, batch_sampler=Lists(sampler), num_workers=num_workers)
            loop, *_ = build()
            drawn.append(torch.cat([x for step in loop.loader(random_lists, epochs=2) for x, _ in step]))
        assert torch.equal(*drawn)
        assert not torch.equal(*drawn[0].chunk(2))
        refused("PL648", lambda: loop.loader(lists, global_batch_size=8), "batch sampler")
        refused("PL648", lambda: loop.loader(lists, shard="mine"), "batch sampler")


def test_order_of_calls() -> None:
    with paceline.start():
        loop, model, optimizer = build(means=["size"])
        loss = model(torch.randn(4, 6)).mean()
        step = next(iter(loop.loader(DATA, global_batch_size=8, epochs=1)))
        refused("PL649", lambda: step.backward(loss), "outside of the loop")
        refused("PL649", lambda: step.mean("size", 1.0), "outside of the loop")
        refused("PL649", lambda: step.grad_norm, "before the end")
        refused("PL649", lambda: step.clip_grad_norm_(1.0), "before the end")
        refused("PL404", lambda: step.of("other").__next__(), "'other'")
        for batch in step:
            refused("PL404", lambda: step.mean("other", 1.0), "means=['size', 'other']")
            refused("PL410", lambda: step.backward(model(batch[0])), "[4, 2]")  # noqa: B023
            refused("PL410", lambda: step.backward(torch.zeros(())), "step.backward")
            refused("PL400", lambda: step.mean("size", 1.0, weight=-1), "-1")
            refused("PL734", lambda: step.mean("size", torch.ones(3)), "size")
            refused("PL400", lambda: step.backward(model(batch[0]).mean(), weight=float("nan")), "nan")  # noqa: B023
            square(model(batch[0]), batch).backward()
            refused("PL644", lambda: step.backward(square(model(batch[0]), batch)), "same microbatch")  # noqa: B023
        for norm in (-1.0, float("nan"), None, model.parameters()):
            refused("PL400", lambda: step.clip_grad_norm_(norm), "max_norm")  # noqa: B023
        optimizer.step()
        loop.end_step()
        refused("PL649", lambda: iter(step), "has ended")
        refused("PL403", loop.save)


def test_what_ranks_do_together_is_refused_while_a_pass_is_open() -> None:
    with paceline.start():
        other, *_ = build()
        trainer = paceline.Trainer(
            nn.Linear(6, 2),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            forward=lambda model, batch: model(batch[0]),
            loss=square,
        )
        loop, model, optimizer = build()
        average = paceline.Average(model, 0.9)
        valid = loop.loader(DATA, global_batch_size=8, shuffle=False)
        steps = iter(loop.loader(DATA, global_batch_size=8, epochs=1))
        step, second = next(steps), other.split(DATA[:8])
        calls = {
            "optimizer.step()": optimizer.step,
            "save()": loop.save,
            "average.update()": average.update,
            "evaluate()": lambda: loop.evaluate(valid, square),
            "predict()": lambda: next(loop.predict(valid)),
            "another step": lambda: loop.step(2),
            "another pass": lambda: next(iter(second)),
        }
        for batch in step:
            for what, call in calls.items():
                refused("PL649", call, what, "step 1")
            refused("PL649", lambda: next(iter(step)), "another pass")
            refused("PL649", lambda: loop.keep_best(1.0), "save()")
            refused("PL649", lambda: trainer.step(DATA[:8]), "another step")
            square(model(batch[0]), batch).backward()
        optimizer.step()
        assert average.num_averaged == 0
        for batch in second:
            assert len(batch[0]) == 4


def test_a_pass_that_is_left_open_is_closed_with_the_world() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with paceline.start(seed=5):
        loop, model, _ = build()
        torch.manual_seed(3)
        microbatches = iter(next(iter(loop.loader(DATA, global_batch_size=8, epochs=1))))
        model(next(microbatches)[0])
    assert torch.equal(torch.rand(3), expected)
    with paceline.start():
        loop, *_ = build()
        assert len(list(loop.split(DATA[:8]))) == 2


def test_a_scaler_needs_the_gradients_that_are_not_finite() -> None:
    with pytest.raises(PacelineError, match='on_nonfinite="keep"') as caught, paceline.start():  # noqa: PT012
        loop, model, optimizer = build()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for batch in loop.split(DATA[:8]):
            scaler.scale(1e9 * square(model(batch[0]), batch)).backward()
        scaler.step(optimizer)
    assert caught.value.code == "PL400"


def test_a_weight_that_is_none() -> None:
    with paceline.start():
        loop, _model, _ = build(weight=lambda batch: -1)
        step = next(iter(loop.loader(DATA, global_batch_size=8, epochs=1)))
        refused("PL400", lambda: next(iter(step)), "weight= returned -1")
        refused("PL400", lambda: loop.step(4), "weight=")
        refused("PL400", lambda: loop.step(2.5), "num_microbatches")  # type: ignore[arg-type]


@pytest.mark.parametrize("leaves", ["break", "raise"])
def test_leaving_a_step_early_is_an_error_and_leaves_nothing_behind(leaves: str) -> None:
    with paceline.start():
        loop, model, _optimizer = build()
        steps = iter(loop.loader(DATA, global_batch_size=8, epochs=1))
        step = next(steps)
        torch.manual_seed(3)
        expected = torch.rand(3)
        torch.manual_seed(3)
        try:
            for batch in step:
                square(model(batch[0]), batch).backward()
                if leaves == "break":
                    break
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert torch.equal(torch.rand(3), expected)
        refused("PL649", lambda: next(steps), "rank 0 left", "step 1")


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return DATA[index]


def run_divided(world: Any, what: str) -> str:
    """Return the code that a rank gets."""
    layout = {"ep": "ep=2", "pp": "pp=2", "several": "tp=2"}.get(what, "dp_shard=2")
    try:
        if what == "several":
            models = {"a": nn.Linear(6, 8), "b": nn.Linear(8, 2)}
            paceline.Loop(models, torch.optim.SGD(models["a"].parameters(), lr=0.1), layout=layout)
            return "none"
        loop, model, _optimizer = build(layout=layout, model=Net())
        if what == "split":
            next(iter(loop.split((torch.full((8, 6), float(world.rank)), torch.zeros(8, 2)))))
            return "none"
        for step in loop.loader(Rows(), global_batch_size=8, epochs=1):
            for batch in step:
                _optimizer.zero_grad()  # of no use and no harm: gradients are set aside
                output = model(batch[0])
                if what == "continue":
                    continue
                if what == "penalty":
                    torch.autograd.grad(output.sum(), list(model.parameters()), create_graph=True)
                if what == "grad":
                    torch.autograd.grad(output.sum(), list(model.parameters()))
                if what == "outside":
                    output = output + sum(p.square().sum() for p in model.parameters())
                square(output, batch).backward(retain_graph=what == "twice")
                if what == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if what == "again":
                    square(output, batch).backward()
                if what == "break":
                    break
    except PacelineError as error:
        return error.code
    return "none"


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("pp", "PL646"),
        ("several", "PL423"),
        ("split", "PL668"),
        ("continue", "PL644"),
        ("twice", "PL644"),
        ("again", "PL644"),
        ("clip", "PL644"),
        ("none", "none"),
        ("penalty", "PL436"),
        ("grad", "PL436"),
        ("outside", "PL642"),
        ("break", "PL649"),
    ],
)
def test_divided_models(ranks: Pool, what: str, code: str) -> None:
    assert ranks.run(run_divided, 2, (what,)) == [code, code]


@pytest.mark.parametrize("explicit", [False, True])
def test_parameters_of_a_criterion_that_no_model_has(explicit: bool) -> None:
    with paceline.start():
        loop, model, _ = build()
        centres = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([centres], lr=0.1)
        step = loop.split((torch.randn(8, 6), torch.zeros(8, 2)))
        for x, _y in step:
            loss = (model(x) - centres).square().mean()
            refused("PL392", lambda: step.backward(loss) if explicit else loss.backward(), "SGD trains them")  # noqa: B023
            break
        assert not optimizer.state


def test_a_gan_of_two_loops() -> None:
    with paceline.start():
        generator, critic = nn.Linear(3, 6), nn.Linear(6, 1)
        loops = [
            paceline.Loop(each, torch.optim.SGD(each.parameters(), lr=0.1), microbatch_size=4)
            for each in (generator, critic)
        ]
        for loop in loops:
            for (noise,) in loop.split((torch.randn(8, 3),)):
                critic(generator(noise)).mean().backward()
        assert critic.weight.grad is not None


class Late(nn.Module):
    """A buffer that changes from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_late = nn.Linear(6, 2), False
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_late:
            self.mean.lerp_(x.mean(0), 0.1)
        result: torch.Tensor = self.linear(x - self.mean)
        return result


def test_a_buffer_that_changes_only_later() -> None:
    with paceline.start():
        loop, model, optimizer = build(model=Late())
        steps = iter(loop.loader(DATA, global_batch_size=8, epochs=1))
        for batch in next(steps):
            square(model(batch[0]), batch).backward()
        optimizer.step()
        model.mean.add_(1.0)  # between steps: the same on every rank
        for batch in next(steps):
            square(model(batch[0]), batch).backward()
        model.is_late = True  # type: ignore[assignment]
        with pytest.raises(PacelineError, match="the buffer mean") as caught:  # noqa: PT012
            for batch in next(steps):
                square(model(batch[0]), batch).backward()
        assert caught.value.code == "PL390"


def test_a_schedule_in_the_inner_loop() -> None:
    with paceline.start():
        loop, model, optimizer = build()
        with pytest.raises(PacelineError, match=r"schedule\.step") as caught:  # noqa: PT012
            for batch in next(iter(loop.loader(DATA, global_batch_size=8, epochs=1))):
                square(model(batch[0]), batch).backward()
                optimizer.param_groups[0]["lr"] *= 0.9  # as a schedule's step does
        assert caught.value.code == "PL649"


class Coder(nn.Sequential):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self[0](x)
        return result


def mix_with_plain_tensors(world: Any, how: str) -> Any:
    torch.manual_seed(0)
    model, target = nn.Linear(6, 2), nn.Linear(6, 2)
    if how in ("parts", "method"):
        layers: Any = Coder(nn.Linear(6, 8), nn.Linear(8, 2))
        loop, *_ = build(layout="dp_shard=2", model=layers)
    else:
        loop = paceline.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), layout="dp_shard=2")
    try:
        if how in ("parts", "method"):
            for x, _y in loop.split((torch.ones(8, 6), torch.ones(8, 2))):
                layers[1](layers.encode(x) if how == "method" else layers[0](x))
        with torch.no_grad():
            for mine, trained in zip(target.parameters(), model.parameters(), strict=True):
                mine.lerp_(trained, 0.1) if how == "softly" else mine.copy_(trained)
    except (RuntimeError, AttributeError) as error:
        world.error = error
    try:
        loop.close()
    except PacelineError as error:
        return error.code, str(error)
    finally:
        world.error = None


@pytest.mark.parametrize(
    ("how", "part"),
    [
        *(("softly", "target network"), ("hard", "target network")),
        *(("parts", "Call the model itself"), ("method", "Call the model itself")),
    ],
)
def test_plain_tensors_beside_shards_are_named(ranks: Pool, how: str, part: str) -> None:
    for code, text in ranks.run(mix_with_plain_tensors, 2, (how,)):
        assert code == "PL435"
        assert "test_loop_refusals.py" in text
        assert part in text


def draw_alone(world: Any, layout: str, how: str) -> None:
    """Train on microbatches that the loop draws by itself."""
    loop, model, optimizer = build(layout=layout)
    data = TensorDataset(torch.randn(192, 6, generator=torch.Generator().manual_seed(3)))
    sampler = DistributedSampler(data, world.world_size, world.rank) if how == "divided" else None
    order = (
        {"sampler": sampler} if sampler else {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
    )
    batches = iter(DataLoader(data, batch_size=8, **order))
    for _ in range(5):
        for _ in loop.step(4):
            x = torch.randn(8, 6) if how == "drawn" else data[:8][0] if how == "same" else next(batches)[0]
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def draw_in_all_ways(world: Any) -> list[str]:
    found = []
    for layout, how in [
        *(("dp_replicate=2", how) for how in ("divided", "drawn", "same", "own")),
        *(("dp_shard=2", how) for how in ("divided", "own")),
    ]:
        try:
            draw_alone(world, layout, how)
            found.append("")
        except PacelineError as error:
            found.append(error.code)
    return found


def test_a_loader_of_the_users_own_that_gives_every_rank_the_same_is_refused(ranks: Pool) -> None:
    assert ranks.run(draw_in_all_ways, 2) == [["", "", "", "PL419", "", "PL419"]] * 2
