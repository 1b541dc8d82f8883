"""Trial steps find what an optimizer must have whole, on optimizers as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.train.mixing import Parted, find_mixing

SHAPES = {"w": (24, 16), "v": (24, 16), "stack": (4, 6, 5), "bias": (24,), "square": (9, 9)}


class Optimizer(torch.optim.Optimizer):
    """One whose step is a function of (parameter, gradient, state, group)."""

    def __init__(self, parameters: Any, update: Callable[..., Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.update(p, p.grad, self.state[p], group), alpha=-group["lr"])


def lion(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    m = state.setdefault("m", torch.zeros_like(p))
    update = m.lerp(grad, 0.1).sign()
    m.lerp_(grad, 0.01)
    return update


def lars(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    return grad * (p.norm() / (grad.norm() + 1e-9))


def rows(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    return grad / (grad.norm(dim=-1, keepdim=True) + 1e-9) if p.dim() > 1 else grad


def batched(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    return grad / (grad.norm(dim=(-2, -1), keepdim=True) + 1e-9) if p.dim() > 1 else grad


def late(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Use a factor of all rows only after many steps, as Shampoo does."""
    factor = state.setdefault("factor", torch.zeros(p.shape[-1], p.shape[-1], dtype=p.dtype))
    factor += grad.reshape(-1, p.shape[-1]).T @ grad.reshape(-1, p.shape[-1])
    return grad @ factor if group["k"] > 100 else grad


def clipped(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Clip by the mean square over the tensor, which needs gradients that change, as StableAdamW does."""
    square = state.setdefault("square", grad.square())
    square.lerp_(grad.square(), 0.1)
    update = grad / square.sqrt()
    return update / update.square().mean().sqrt().clamp(min=1.0)


class Preconditioner:
    def __init__(self, size: int) -> None:
        self.factor = torch.zeros(size, size, dtype=torch.float64)


def square_factor(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Keep a matrix whose shape is that of the parameter, if that one is square."""
    state["factor"] = grad @ grad.T if p.dim() == 2 else grad.clone()
    return grad


def held_by_an_object(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    factor = state.setdefault("by", [Preconditioner(p.shape[-1])])[0].factor
    factor += grad.reshape(-1, p.shape[-1]).T @ grad.reshape(-1, p.shape[-1])
    return grad @ factor if group["k"] > 100 else grad


def noisy(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    return grad + 0.01 * torch.randn_like(grad)


class Global(Optimizer):
    """Adapts its rate to all gradients, as Prodigy does."""

    def step(self, closure: Any = None) -> None:
        total = sum(
            float(p.grad.abs().sum()) for g in self.param_groups for p in g["params"] if p.grad is not None
        )
        self.param_groups[0]["d"] = total
        super().step()


class Signs(Optimizer):
    """A number of all parameters that does not depend on the size of gradients, as in D-Adapted Lion."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    sums = self.state[p].setdefault("sums", torch.zeros_like(p))
                    group["d"] = group.get("d", 0.0) + float((p.grad.sign() * sums).sum())
                    sums += p.grad.sign()
        super().step()


class Silent(Global):
    """The same, with nothing in its groups that shows it."""

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        assert grads
        Optimizer.step(self)


class Around(Optimizer):
    """Keeps its parameters outside of its groups."""

    def __init__(self, parameters: Any, update: Callable[..., Tensor]) -> None:
        super().__init__(parameters, update)
        self.mine = list(self.param_groups[0]["params"])

    def step(self, closure: Any = None) -> None:
        for p in self.mine:
            if p.grad is not None:
                p.data -= 0.1 * p.grad


class Talking(Optimizer):
    def step(self, closure: Any = None) -> None:
        torch.ops._c10d_functional.all_reduce(self.param_groups[0]["params"][0].grad, "sum", "0")


def find(make: Callable[[list[nn.Parameter]], Any], dims: frozenset[int] = frozenset({0, 1})) -> Any:
    named = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    optimizer = make(list(named.values()))
    state = torch.random.get_rng_state()
    before = repr((optimizer.param_groups, dict(optimizer.state)))
    try:
        return find_mixing(
            optimizer,
            [
                Parted(n, p, tuple(p.shape), frozenset(d for d in dims if d < p.dim()))
                for n, p in named.items()
            ],
        )
    except paceline.PacelineError as error:
        return f"{error.code} {error.saw}"
    finally:
        assert torch.equal(state, torch.random.get_rng_state())
        assert before == repr((optimizer.param_groups, dict(optimizer.state)))
        assert all(bool((p == 1).all()) and p.grad is None for p in named.values())


def test_finds_what_must_be_whole() -> None:
    every = set(SHAPES)
    assert find(lambda ps: torch.optim.AdamW(ps)) is None
    assert find(lambda ps: Optimizer(ps, lion)) == set()
    assert find(lambda ps: Optimizer(ps, lion, lr=0.0)) == set()  # as before a warm-up
    assert find(lambda ps: Optimizer(ps, lars)) == every
    assert find(lambda ps: Optimizer(ps, lars, lr=0.0)) == every
    assert find(lambda ps: Optimizer(ps, late)) == every
    assert find(lambda ps: Optimizer(ps, clipped)) == every
    assert find(lambda ps: Optimizer(ps, held_by_an_object)) == every
    assert find(lambda ps: Optimizer(ps, rows), frozenset({0})) == set()
    assert find(lambda ps: Optimizer(ps, rows)) == {"w", "v", "square"}
    assert find(lambda ps: Optimizer(ps, batched), frozenset({0})) == {"w", "v", "square"}
    assert find(lambda ps: Optimizer(ps, batched)) == {"w", "v", "stack", "square"}
    assert find(lambda ps: Optimizer(ps[4:], square_factor)) == {"square"}
    assert find(lambda ps: torch.optim.Muon(ps[:2])) == {"w", "v"}
    assert find(lambda ps: torch.optim.Adafactor(ps)) == every


@pytest.mark.parametrize(
    ("make", "saw"),
    [
        (lambda ps: Global(ps, lion), "depends on other parameters"),
        (lambda ps: Signs(ps, lion), "depends on other parameters"),
        (lambda ps: Silent(ps, lion), "depends on other parameters"),
        (lambda ps: Silent([{"params": [p]} for p in ps], rows), "depends on other parameters"),
        (lambda ps: Optimizer(ps, noisy), "random numbers"),
        (lambda ps: Around(ps, lion), "does not change the tensors in its param_groups"),
        (lambda ps: Talking(ps, lion), "communicates with other ranks"),
        (lambda ps: torch.optim.SparseAdam(ps), "does not support dense gradients"),
    ],
)
def test_refuses_what_no_rank_can_step(make: Callable[[list[nn.Parameter]], Any], saw: str) -> None:
    found = find(make)
    assert found.startswith("PL466 ")
    assert saw in found
