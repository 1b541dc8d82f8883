"""Calls of torch's functions in a model's code: which of them are changed under tp, and which are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.mesh import build_mesh
from paceline.parallel.dropout.replacements import apply_dropout
from paceline.parallel.tensor.apply import apply_plan
from paceline.parallel.tensor.attention import open_attention
from paceline.parallel.tensor.split_plan import find_plan
from paceline.recipe import Layout
from tests.dist.pool import Pool
from tests.parallel.tensor.models import NanoAttention
from tests.train.test_layouts import Tokens, build_trainer

WIDTH, HEADS, SAMPLES = 16, 4, 4


class Attention(nn.Module):
    """Views with numbers between dropouts that are functions; other views while it is evaluated."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        if not self.training:
            x = x.view(batch * length, width).view(batch, length, width)
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(x).split(width, 2)
        )
        dropout = 0.2 if self.training else 0.0
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            y = F.dropout((q @ k.transpose(-2, -1)).softmax(-1), dropout, self.training) @ v
        result: Tensor = self.out(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + result


class Steps(nn.Module):
    """Goes along the sequence, so that a longer one passes the same line more often."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for place in range(x.shape[1]):
            y = self.up(x[:, place]).view(-1, HEADS, 2 * WIDTH // HEADS).tanh()
            found.append(self.down(y.view(-1, 2 * WIDTH)))
        return x + torch.stack(found, 1)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), Attention(True), Attention(False), Steps()).double()


def run(model: nn.Module, masks: Any, length: int) -> list[float]:
    """Return the loss in training and in evaluation, and the norm of the input's gradient."""
    x = torch.randn(SAMPLES, length, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with masks.drawing(7, range(SAMPLES)):
        loss = model.train()(x).square().sum()
        loss.backward()
    with torch.no_grad():
        valid = model.eval()(x).square().sum()
    gradient = model[0].weight.grad  # type: ignore[index]
    return [loss.item(), valid.item(), gradient.norm().item()]


def compare(world: Any, hooks: bool) -> tuple[list[float], list[float], float]:
    torch.set_num_threads(1)
    reference = build()
    expected = run(reference, apply_dropout(reference), 6)
    model = build()
    masks = apply_dropout(model)
    if hooks:  # seen by the trial forward
        model[2].register_forward_hook(lambda _m, _a, y: y.view(-1, WIDTH).view(y.shape))  # type: ignore[index]
    batch = torch.zeros(2, 4, 8, dtype=torch.float64)
    plan = find_plan(model, lambda m: m(batch), world.world_size, masks)
    apply_plan(model, plan, build_mesh(Layout.parse(f"tp={world.world_size}"), world).tp, masks)
    if hooks:  # not seen by it
        for module in [*model.modules()]:
            module.register_forward_pre_hook(lambda _m, args: (args[0].view(args[0].shape),))
            module.register_forward_hook(lambda _m, _a, y: y.reshape(-1).reshape(y.shape))
    return expected, run(model, masks, 6), plan.share


@pytest.mark.parametrize("hooks", [False, True])
def test_only_calls_of_the_model_are_changed(ranks: Pool, hooks: bool) -> None:
    for expected, found, share in ranks.run(compare, nproc=2, args=(hooks,)):
        assert found == pytest.approx(expected, rel=1e-12)
        assert share > 0.9


class Recomputed(nn.Linear):
    """Recomputes its own product in backward, where no forward of a module runs."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.product, input, use_reentrant=False)
        return result

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 0.5, self.bias).tanh()


def test_calls_that_backward_repeats_by_themselves_are_not_changed() -> None:
    blocks = [nn.Sequential(nn.Linear(16, 32), kind(32, 16)) for kind in (Recomputed, nn.Linear)]
    model = nn.Sequential(*blocks)
    plan = find_plan(model, lambda m: m(torch.zeros(2, 4, 16)), 2)
    assert {name for name in plan.splits if name.endswith("weight")} == {"1.0.weight", "1.1.weight"}
    assert "at no place that can be changed" in plan.describe()


class Averaged(nn.MultiheadAttention):
    """Computes more than its class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, weights = super().forward(*args, **kwargs)
        return y * 2, weights


def test_attention_with_a_forward_of_its_own_keeps_it() -> None:
    patched = nn.MultiheadAttention(8, 2, batch_first=True)
    inner = patched.forward
    patched.forward = lambda *args, **kwargs: inner(*args, **kwargs)  # type: ignore[method-assign]
    model = nn.ModuleList([patched, Averaged(8, 2), nn.MultiheadAttention(8, 2)])
    kept = patched.forward
    open_attention(model)
    assert patched.forward is kept
    assert "forward" not in model[1].__dict__
    assert "forward" in model[2].__dict__


def test_a_trial_leaves_forwards_as_they_are() -> None:
    model = build()
    patched = model[1]  # type: ignore[index]
    inner = patched.forward
    patched.forward = lambda x: inner(x)
    kept = patched.forward
    batch = torch.zeros(2, 4, 8, dtype=torch.float64)
    find_plan(model, lambda m: m(batch), 2)
    assert patched.forward is kept
    assert all("forward" not in module.__dict__ for module in model.modules() if module is not patched)


def build_language_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, 32), nn.Sequential(NanoAttention(), NanoAttention()), nn.Linear(32, 64)
    )


def train_compiled(world: Any, layout: str, compiles: bool) -> tuple[list[float], list[bool]]:
    torch.set_num_threads(1)
    trainer = build_trainer(layout, model=build_language_model, compile=compiles)
    losses: list[float] = []
    for share in trainer.loader(Tokens(), global_batch_size=8):
        losses.append(trainer.step(share).loss)
        if len(losses) == 2:
            break
    compiled = [module._compiled_call_impl is not None for module in trainer.model.modules()]
    trainer.close()
    return losses, compiled


def test_blocks_with_changed_calls_are_not_compiled(ranks: Pool) -> None:
    ((expected, _),) = ranks.run(train_compiled, 1, ("", False))
    for losses, compiled in ranks.run(train_compiled, 2, ("tp=2", True)):
        assert losses == pytest.approx(expected, rel=1e-11)
        assert not any(compiled)
