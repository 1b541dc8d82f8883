"""cp by gather: attention by rows with the bits of one process, for any number of key and value heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.mesh import build_mesh
from paceline.models.gpt import Gpt
from paceline.parallel.context.apply import apply_context
from paceline.parallel.context.find import find_context_plan
from paceline.parallel.tensor.attention import open_attention
from paceline.parallel.tensor.differentiable import all_reduce
from paceline.recipe import Layout, parse_recipe
from paceline.recipe.legal import Rules
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool
from tests.parallel.context.test_context_refusals import RECIPE, Model, _plain
from tests.parallel.context.test_context_traffic import LENGTH, Packed, count_kept
from tests.parallel.tensor.models import CASES, _ids, build

# Models whose attention is torch's function; four ranks are more than the two key and value heads of some.
MODELS = ["gpt", "gpt-grouped", "lora", "encoder", "llama", "gpt2", "bert"]
# Their sequences have 5, 6 or 17 positions. In fp64 a product rounds the last rows otherwise that are no
# multiple of 4, so the bits of an attention of few rows may differ.
ODD = ["transformer", "seq-first", "vit"]


def batch_of(name: str) -> dict[str, Tensor]:
    return CASES[name].batch() if name in ODD else _ids(16)


def loss_of(name: str, model: nn.Module) -> Tensor:
    output = CASES[name].run(model, batch_of(name))
    target = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    return ((output - target) ** 2).sum()  # type: ignore[no-any-return]


def run_example(name: str) -> Callable[[nn.Module], Any]:
    batch = {key: value[:2] if name != "seq-first" else value for key, value in batch_of(name).items()}
    return lambda model: CASES[name].run(model, batch)


def compare(world: Any, names: list[str]) -> dict[str, tuple[bool, float]]:
    """By model: whether the loss has the bits of one process, and the largest difference of a gradient."""
    torch.set_num_threads(1)
    axis = build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp
    found = {}
    for name in names:
        reference, model = build(name), build(name)
        for each in (reference, model):
            open_attention(each)
        expected = loss_of(name, reference)
        expected.backward()
        plan = find_context_plan(model, run_example(name), world.world_size, by="gather")
        assert not plan.crossings
        assert any(call.gathers for call in plan.attending)
        apply_context(model, plan, axis)
        loss = loss_of(name, model)
        loss.backward()
        scale = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
        worst = 0.0
        for (key, whole), part in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert (whole.grad is None) == (part.grad is None), key
            if whole.grad is None or part.grad is None:
                continue
            grad = all_reduce(part.grad, axis) if key in plan.partial else part.grad
            worst = max(worst, float((grad - whole.grad).abs().max()) / scale)
        worst = max(worst, abs(float(loss.detach() / expected.detach()) - 1))
        found[name] = (torch.equal(loss, expected), worst)
    return found


QUICK = ["gpt-grouped", "encoder", "llama"]


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, QUICK),
        pytest.param(2, [*MODELS, *ODD], marks=pytest.mark.slow),
        pytest.param(4, [*MODELS, *ODD], marks=pytest.mark.slow),
    ],
)
def test_models_as_in_one_process(ranks: Pool, num_ranks: int, names: list[str]) -> None:
    """The forward has every bit; gradients are sums over the sequence, in another order."""
    for found in ranks.run(compare, nproc=num_ranks, args=(names,)):
        wrong = {
            name: seen for name, seen in found.items() if seen[1] > 1e-12 or not (seen[0] or name in ODD)
        }
        assert not wrong, wrong


class Eager(nn.Module):
    """Attention written with matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (y.view(batch, length, 4, 8).transpose(1, 2) for y in self.qkv(x).split(32, dim=-1))
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, 32))
        return result


class LearnedBias(Packed):
    """Attention with a learned bias per distance."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 4, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (y.view(batch, length, 4, 8).transpose(1, 2) for y in self.qkv(x).split(32, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, 32))
        return result


class TwoPaths(Packed):
    """Attention that is written once for training and once for evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).split(32, dim=-1))  # type: ignore[no-untyped-call]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


def _with(kind: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(0)
    model = Model(_plain)
    for block in model.blocks:
        block.attend = kind()
    return model


@pytest.mark.parametrize(
    ("kind", "code", "word"),
    [
        (Eager, "PL634", "bmm in blocks.0.attend combines positions"),
        (LearnedBias, "PL630", "the mask of the attention in blocks.0.attend depends on parameters"),
    ],
)
def test_what_gather_cannot_divide_is_refused_by_name(
    kind: Callable[[], nn.Module], code: str, word: str
) -> None:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    with pytest.raises(PacelineError) as caught:
        find_context_plan(_with(kind), lambda m: m(ids), 2, by="gather")
    assert caught.value.code == code
    assert word in str(caught.value), str(caught.value)
    assert 'cp_by="heads"' in str(caught.value)


def evaluate_otherwise(world: Any) -> str:
    model, ids = _with(TwoPaths), torch.zeros(2, LENGTH, dtype=torch.int64)
    axis = build_mesh(Layout.parse("cp=2"), world).cp
    apply_context(model, find_context_plan(model, lambda m: m(ids), 2, by="gather"), axis)
    model(ids)
    try:
        model.eval()(ids)
    except PacelineError as error:
        return str(error)
    return ""


def test_attention_that_the_trial_has_not_seen_is_refused(ranks: Pool) -> None:
    for found in ranks.run(evaluate_otherwise, nproc=2):
        assert "PL634" in found
        assert "blocks.0.attend calls F.scaled_dot_product_attention at another place" in found


def read_documents(world: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs before and after a token of the second document, position 9, is changed."""
    model = _with(Packed)
    ids = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    if world.world_size > 1:
        axis = build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp
        apply_context(model, find_context_plan(model, lambda m: m(ids), world.world_size, by="gather"), axis)
    before = model(ids).detach()
    ids[:, 9] = (ids[:, 9] + 1) % 50
    return before, model(ids).detach()


def test_documents_do_not_see_each_other(ranks: Pool) -> None:
    ((expected, changed),) = ranks.run(read_documents, nproc=1)
    for before, after in ranks.run(read_documents, nproc=2):
        assert torch.equal(before, expected)
        assert torch.equal(after, changed)
        same = (before == after).all(-1).all(0)
        assert same.tolist() == [not 9 <= position < 14 for position in range(LENGTH)]


def read_packed(world: Any, ways: list[str]) -> list[tuple[Tensor, Tensor]]:
    """Return the same of a Llama, whose positions begin anew with each document, by way to attend."""
    torch.set_num_threads(1)
    document = torch.arange(LENGTH) // 7
    places = (torch.arange(LENGTH) % 7).expand(2, -1)
    seen = (document[:, None] == document[None, :]).tril()
    mask = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(~seen, -1e30)
    found = []
    for way in ways:
        model, ids = (
            build("llama"),
            torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(0)),
        )

        def run(model: nn.Module, ids: Tensor = ids) -> Tensor:
            output: Tensor = model(
                input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False
            ).logits
            return output

        if way:
            axis = build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp
            apply_context(model, find_context_plan(model, run, world.world_size, by=way), axis)
        before = run(model).detach()
        ids[:, 9] = (ids[:, 9] + 1) % 96
        found.append((before, run(model).detach()))
    return found


def test_documents_packed_for_a_llama_do_not_see_each_other(ranks: Pool) -> None:
    pytest.importorskip("transformers")
    (((expected, changed),),) = ranks.run(read_packed, nproc=1, args=([""],))
    for found in ranks.run(read_packed, nproc=2, args=(["heads", "gather"],)):
        for before, after in found:
            assert torch.equal(before, expected)
            assert torch.equal(after, changed)
            same = (before == after).all(-1).all(0)
            assert same.tolist() == [not 9 <= position < 14 for position in range(LENGTH)]


def read_short(world: Any) -> tuple[Tensor, Tensor]:
    """Return the logits for two positions, of one process and of this rank, which has one of them."""
    torch.set_num_threads(1)
    whole, model = build("llama"), build("llama")
    axis = build_mesh(Layout.parse("cp=2"), world).cp
    apply_context(model, find_context_plan(model, run_example("llama"), 2, by="gather"), axis)
    ids = torch.tensor([[3, 5], [7, 2]])
    return tuple(each(input_ids=ids, use_cache=False).logits.detach() for each in (whole, model))


def test_a_single_position_is_causal_too(ranks: Pool) -> None:
    """Models of transformers leave is_causal out for a single query, as if it were the first position."""
    pytest.importorskip("transformers")
    for expected, found in ranks.run(read_short, nproc=2):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-13)


LAYERS, HIDDEN, HEADS, KV_HEADS, SAMPLES = 3, 32, 4, 1, 4


def count(world: Any) -> dict[str, tuple[int, int]]:
    """Count messages and bytes that this rank sends to others in forward and in backward, by collective."""
    torch.manual_seed(0)
    section = GptModel(kind="gpt", layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS)
    model, n = Gpt(section, 50, LENGTH), world.world_size
    ids = torch.randint(0, 50, (SAMPLES, LENGTH))
    axis = build_mesh(Layout.parse(f"cp={n}"), world).cp
    apply_context(model, find_context_plan(model, lambda m: m(ids[:2]), n, by="gather"), axis)
    sent: dict[str, list[int]] = {}
    phase, exchange, gather = "forward", dist.all_to_all_single, dist.all_gather

    def all_to_all_single(into: Tensor, flat: Tensor, received: Any, given: list[int], **kw: Any) -> Any:
        others = sum(given) - given[world.rank]
        sent.setdefault(f"{phase} exchange", []).append(others * flat.element_size())
        return exchange(into, flat, received, given, **kw)

    def all_gather(parts: list[Tensor], own: Tensor, **kw: Any) -> Any:
        sent.setdefault(f"{phase} gather", []).append((n - 1) * own.numel() * own.element_size())
        return gather(parts, own, **kw)

    dist.all_to_all_single, dist.all_gather = all_to_all_single, all_gather  # type: ignore[assignment]
    try:
        loss = model(ids).sum()
        phase = "backward"
        loss.backward()
    finally:
        dist.all_to_all_single, dist.all_gather = exchange, gather
    return {key: (len(sizes), sum(sizes)) for key, sizes in sent.items()}


def test_bytes_are_those_of_the_formula(ranks: Pool) -> None:
    n, activation = 2, 4 * SAMPLES * LENGTH * HIDDEN
    keys = activation * KV_HEADS // HEADS
    per_pass = LAYERS * (n - 1) * 2 * keys // n
    # The last block's output in forward, the first one's gradient in backward.
    ends = (n - 1) * activation // n
    for sent in ranks.run(count, nproc=n):
        assert sent == {
            "forward gather": (LAYERS + 1, per_pass + ends),
            "backward exchange": (LAYERS, per_pass),
            "backward gather": (1, ends),
        }


@pytest.mark.parametrize(
    ("text", "code"),
    [("cp=4 cp_by=gather", ""), ("cp=4 cp_by=heads", "PL632"), ("cp=4", ""), ("cp_by=gather", "PL138")],
)
def test_layouts_by_gather(text: str, code: str) -> None:
    layout = Layout.parse(text).close()
    found = [problem.code for problem in Rules.of(parse_recipe(RECIPE)).check(layout, layout.num_ranks)]
    assert found == ([code] if code else [])


def keep(world: Any) -> int:
    """Return bytes that backward keeps of a block, without parameters."""
    torch.manual_seed(0)
    model = Gpt(
        GptModel(kind="gpt", layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS), 50, LENGTH
    )
    ids = torch.randint(0, 50, (SAMPLES, LENGTH))
    if world.world_size > 1:
        axis = build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp
        plan = find_context_plan(model, lambda m: m(ids[:2]), world.world_size, by="gather")
        apply_context(model, plan, axis)
    return count_kept(model, ids, model.layers[1])


def test_activations_are_divided_and_keys_are_not(ranks: Pool) -> None:
    (whole,) = ranks.run(keep, nproc=1)
    n, keys = 2, 4 * SAMPLES * LENGTH * HIDDEN * KV_HEADS // HEADS
    for part in ranks.run(keep, nproc=n):
        # Keys and values of the other ranks too.
        expected = whole / n + (n - 1) / n * 2 * keys
        assert abs(part / expected - 1) < 0.05, (part, expected, whole)
