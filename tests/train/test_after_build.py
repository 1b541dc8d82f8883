"""A trainer follows changes of a model after the build, or refuses them by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from paceline import Loop
from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from paceline.world import start
from tests.dist.pool import Pool

NUM_STEPS = 6
DATA = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Dropout(0.0), nn.Linear(6, 4))


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.05, weight_decay=0.1)


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def build(model: nn.Module | None = None, **settings: Any) -> Trainer:
    return Trainer(
        net() if model is None else model,
        **{"optimizer": adam, "loss": squares, "microbatch_size": 2, **settings},
    )


def toggle(model: nn.Module, done: int) -> None:
    """Freeze the first block after step 2, thaw it after step 4 and freeze the head; and clip by hand."""
    first, head = model[0][0], model[2]  # type: ignore[index]
    if done == 2:
        first.requires_grad_(False)
    if done == 4:
        first.requires_grad_(True)
        head.weight.requires_grad_(False)
    with torch.no_grad():
        head.bias.clamp_(-0.1, 0.1)


def train_plainly() -> dict[str, Tensor]:
    model = net().double()
    optimizer = adam(model.named_parameters())
    for number in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        (model(DATA.double()).square().sum() / len(DATA)).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
        optimizer.step()
        toggle(model, number)
    return model.state_dict()


def share_of(trainer: Trainer) -> Any:
    return trainer.loader(DATA, global_batch_size=8, shuffle=False, epochs=NUM_STEPS)


def train_frozen(world: Any, layouts: list[str], reduction: str) -> list[dict[str, Tensor]]:
    found = []
    for layout in layouts:
        trainer = build(layout=layout, example=DATA[:2], dtype="fp64", clip_norm=0.5, reduction=reduction)
        for batch in share_of(trainer):
            toggle(trainer.model, trainer.step(batch).number)
        found.append(trainer.whole_state())
        trainer.close()
    return found


def assert_close(found: dict[str, Tensor]) -> None:
    for name, expected in train_plainly().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9)


def test_parameters_may_be_frozen_and_thawed_in_one_process() -> None:
    with start(device="cpu") as world:
        assert_close(train_frozen(world, [""], "exact")[0])


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_parameters_may_be_frozen_and_thawed_on_any_layout(ranks: Pool, reduction: str) -> None:
    layouts = ["dp_replicate=2", "dp_shard=2"]
    if reduction == "fast":
        layouts += ["dp_shard=2 zero=1", "tp=2", "pp=2"]
    for found in ranks.run(train_frozen, args=(layouts, reduction))[0]:
        assert_close(found)


def code_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except PacelineError as error:
        return str(error)
    return "nothing"


def thaw(model: Any, optimizer: Any) -> None:
    model[2].weight.requires_grad_(True)


def add_group(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [model[2].weight]})


def add_foreign(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))


def drop_group(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()


def replace_head(model: Any, optimizer: Any) -> None:
    model[2] = nn.Linear(6, 4)


def replace_weight(model: Any, optimizer: Any) -> None:
    model[2].bias = nn.Parameter(torch.zeros(4))


def add_adapter(model: Any, optimizer: Any) -> None:
    model[0][1].adapter = nn.Linear(6, 6)


def parametrize(model: Any, optimizer: Any) -> None:
    nn.utils.parametrizations.weight_norm(model[0][0].up)


def prune_weight(model: Any, optimizer: Any) -> None:
    prune.l1_unstructured(model[0][0].up, "weight", amount=0.5)


def remove_bias(model: Any, optimizer: Any) -> None:
    model[0][0].up.bias = None


def cast(model: Any, optimizer: Any) -> None:
    model[0].to(torch.bfloat16)


def add_buffer(model: Any, optimizer: Any) -> None:
    model[0].register_buffer("mean", torch.zeros(3))


def take_step(loop: Loop, model: Any, made: list[Any]) -> None:
    for batch in loop.split(DATA):
        model(batch).square().mean().backward()
    made[0].step()
    made[0].zero_grad()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (thaw, "requires_grad of 2.weight was turned on after the trainer was built (model)"),
        (add_group, "the optimizer got 2.weight after"),
        (add_foreign, "the optimizer got a tensor of shape [3] after"),
        (drop_group, "the groups of the optimizer changed"),
        (replace_head, "module 2 was replaced"),
        (replace_weight, "parameter 2.bias was replaced"),
        (add_adapter, "module 0.1.adapter was added"),
        (parametrize, "module 0.0.up.parametrizations was added"),
        (prune_weight, "parameter 0.0.up.weight was removed"),
        (remove_bias, "parameter 0.0.up.bias was removed"),
        (cast, "the dtype of 0.0.down.bias from torch.float32 to torch.bfloat16"),
        (add_buffer, "0.mean of model became a buffer"),
    ],
)
@pytest.mark.parametrize("call", ["Trainer", "Loop"])
def test_other_changes_are_refused(call: str, change: Any, expected: str) -> None:
    made: list[Any] = []

    def trained(named: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.1))
        return made[0]

    with start(device="cpu"):
        model = net()
        model[2].weight.requires_grad_(False)
        if call == "Trainer":
            trainer = build(model, optimizer=trained)
            step = partial(trainer.step, DATA)
        else:
            step = partial(take_step, Loop(model, trained, microbatch_size=2), model, made)
        step()
        change(model, made[0])
        message = code_of(step)
    assert expected.removeprefix("the dtype of 0.0.down.bias ") in message
    assert message.endswith(("[PL390]", "[PL393]"))


class Harmless(nn.Module):
    """Replaces a buffer, makes a cache, counts calls, and has a submodule in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6).eval()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 1.0
        if not hasattr(self, "positions"):
            self.register_buffer("positions", torch.arange(6.0), persistent=False)
        return self.norm(self.layer(x)) + self.positions


def test_usual_changes_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Any] = []

    def sgd(named: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD([{"params": [p]} for _, p in named], lr=0.1))
        return made[0]

    with start(device="cpu"), caplog.at_level(logging.WARNING):
        trainer = build(Harmless(), optimizer=sgd)
        for _ in range(3):
            trainer.step(DATA)
            made[0].param_groups[0]["lr"] *= 0.5
            trainer.model.load_state_dict(trainer.model.state_dict())
            trainer.model.layer.weight.data = trainer.model.layer.weight.data * 0.9
            trainer.model.eval()
            trainer.model.train()
            trainer.model.norm.eval()
    assert "PL39" not in caplog.text


def differ(world: Any) -> dict[str, str]:
    """Let ranks differ in ways that a trainer follows, and make changes that shards lose."""
    is_odd = world.rank == 1

    def named(layout: str, before: Callable[[Any], Any], after: Callable[[Any], Any]) -> str:
        model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 2))
        x = torch.randn(4, 3, 6, 6)

        def go() -> None:
            before(model)
            trainer = build(model, layout=layout)
            trainer.step(x)
            after(trainer.model)
            trainer.step(x)

        return code_of(go)

    def odd(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda model: act(model) if is_odd else None

    def nothing(model: Any) -> None:
        pass

    def assign(model: Any) -> None:
        model[3].weight.data = model[3].weight.data * 0

    return {
        "channels_last": named("", odd(lambda m: m.to(memory_format=torch.channels_last)), nothing),
        "eval": named("", odd(lambda m: m[2].eval()), nothing),
        "eval later": named("", nothing, odd(lambda m: m.eval())),
        "frozen later": named("", nothing, odd(lambda m: m[0].bias.requires_grad_(False))),
        "frozen shard": named("dp_shard=2", nothing, odd(lambda m: m[3].requires_grad_(False))),
        "assigned": named("dp_shard=2", nothing, assign),
        "assigned copy": named("dp_replicate=2", nothing, assign),
    }


def test_ranks_that_change_alone_are_named(ranks: Pool) -> None:
    found = ranks.run(differ)[1]
    for case, expected in {
        "channels_last": "torch.float32 with strides [27, 1, 9, 3] on rank 1",
        "eval": "Dropout(p=0.1, inplace=False) in eval mode on rank 1",
        "eval later": "since the build of model is missing on rank 0, the model is in eval mode on rank 1",
        "frozen later": "since the build of model is missing on rank 0, 0.bias is frozen on rank 1",
        "frozen shard": "3.weight is frozen; 3.bias is frozen on rank 1",
        "assigned": "`.data` of 3.weight was assigned, without an effect on its shards, after",
        "assigned copy": "nothing",
    }.items():
        assert expected in found[case], case


def test_a_hook_that_returns_nan_skips_the_step() -> None:
    for clip_norm in (0.0, 1.0):
        with start(device="cpu"):
            trainer = build(clip_norm=clip_norm)

            def hook(gradients: dict[str, Tensor]) -> None:
                if trainer.step_number == 2:  # noqa: B023
                    gradients["2.weight"].fill_(math.nan)

            trainer.on_gradients(hook)
            steps = [trainer.step(DATA).skipped for _ in range(3)]
            assert steps[::2] == [None, None]
            assert "on_gradients, the gradient of 2.weight is not finite" in str(steps[1])
            assert all(p.isfinite().all() for p in trainer.model.parameters())


class Centres(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.ones(4))

    def forward(self, output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return (output - self.centre).square().sum(), len(output)


def test_remarks_of_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(nn.BatchNorm1d):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__(6)
            self.counter = nn.Module()
            self.counter.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.counter.calls += 1  # type: ignore[operator]
            return super().forward(x)

    def remarks(model: nn.Module, **settings: Any) -> str:
        caplog.clear()
        with start(device="cpu"), caplog.at_level(logging.WARNING):
            trainer = build(model, **settings)
            trainer.step(DATA)
            trainer.step(DATA)
        return "\n".join(record.getMessage() for record in caplog.records if "PL" in record.getMessage())

    in_eval = remarks(net().eval())
    assert "trained in eval mode (1 Dropout)" in in_eval
    assert "[PL394]" in in_eval
    assert "counter.calls: forward changes this number" in remarks(Counting(), microbatch_size=4)
    assert "PL416" not in remarks(Counting(), microbatch_size=8)
    assert not remarks(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2)))
    assert not remarks(nn.BatchNorm1d(6))
    criterion = Centres()
    assert "outside of the model: 1, the first of shape [4]" in remarks(net(), loss=criterion)
    assert not remarks(net(), loss=Centres().requires_grad_(False))
    held = torch.optim.SGD(criterion.parameters(), lr=0.1)
    assert "SGD trains them" in code_of(lambda: remarks(net(), loss=criterion))
    held.zero_grad()


class Tally:
    def __init__(self, total: Any) -> None:
        self.total = total

    def state_dict(self) -> dict[str, Any]:
        return {"totals": [self.total]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["totals"][0]


def track_differing(world: Any, folder: str) -> list[str]:
    found = []
    for total in (world.rank, torch.ones(3) * world.rank, torch.ones(3), {"a": "b"}):
        trainer = build()
        trainer.track(tally=Tally(total), ema=trainer.model)
        trainer.resume(folder)
        trainer.step(DATA + world.rank)
        found.append(code_of(trainer.save))
    return found


def test_states_that_differ_are_refused(ranks: Pool, tmp_path: Path) -> None:
    number, tensor, *same = ranks.run(track_differing, args=(str(tmp_path),))[0]
    assert "tally['totals'][0] is 0 on rank 0, 1 on rank 1" in number
    assert "tally['totals'][0] is torch.float32 [3]" in tensor
    assert same == ["nothing", "nothing"]


def go(folder: Path, *, frozen: bool, accept: list[str] | None = None, last: int, late: int = 0) -> Any:
    """Train up to a step, with the first block frozen before the build, or after step `late`."""
    with start(device="cpu"):
        model = net()
        model[0][0].requires_grad_(not frozen)

        def trained(named: Any) -> torch.optim.Optimizer:
            return adam([(name, p) for name, p in named if p.requires_grad])

        trainer = build(model, optimizer=trained)
        trainer.resume(folder, accept=accept or ())
        while trainer.step_number < last:
            trainer.step(DATA + trainer.step_number)
            if trainer.step_number == late:
                trainer.model[0][0].requires_grad_(False)
        trainer.save()
        return trainer.whole_state()


def test_a_resumed_run_trains_the_same_parameters(tmp_path: Path) -> None:
    whole = go(tmp_path / "whole", frozen=False, last=5, late=2)
    go(tmp_path / "parts", frozen=False, last=3, late=2)
    resumed = go(tmp_path / "parts", frozen=False, last=5, late=2)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)

    go(tmp_path / "frozen", frozen=True, last=2)
    with pytest.raises(PacelineError, match=r"0\.0\.down\.bias, .* was frozen at the build.*\[PL515\]"):
        go(tmp_path / "frozen", frozen=False, last=4)
    before = go(tmp_path / "frozen", frozen=True, last=2)
    after = go(tmp_path / "frozen", frozen=False, last=4, accept=["frozen"])
    assert all(not torch.equal(before[name], after[name]) for name in before)
