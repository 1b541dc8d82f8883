"""Dropout of a laid-out model: what its masks depend on, and that nothing else about the model changes."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import PacelineError
from paceline.models.encoder import Encoder
from paceline.models.gpt import Gpt
from paceline.parallel.dropout.replacements import Cut, Masks, _patches, apply_dropout
from paceline.parallel.recompute import apply_recompute
from paceline.parallel.split import Split
from paceline.parallel.tensor.attention import open_attention
from paceline.recipe.schema import EncoderModel, GptModel

BATCH, SEQ, HIDDEN = 4, 10, 24


def draw_x(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def run(
    masks: Masks, model: Callable[[Tensor], Any], x: Tensor, size: int = BATCH, dim: int = 0, seed: int = 7
) -> Tensor:
    """Compute the output of all samples, in microbatches."""
    parts = []
    for start in range(0, BATCH, size):
        with masks.drawing(seed, range(start, start + size)):
            parts.append(model(x.narrow(dim, start, size)))
    return torch.cat(parts, dim)


def assert_same(a: Tensor, b: Tensor) -> None:
    """Equal but for the order of sums, which another batch size changes."""
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Functional(nn.Module):
    """Everything functional, each twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.dropout(x, 0.2, self.training), 0.2, self.training)
        x = F.alpha_dropout(F.feature_alpha_dropout(x, 0.2, self.training), 0.2, self.training)
        x = torch.dropout(x, 0.2, self.training)
        x = F.dropout1d(x, 0.2, self.training)
        return F.dropout(x.clone(), 0.2, self.training, inplace=True)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout2d(0.3), nn.Flatten(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1)[:, :75].view(-1, 3, 5, 5))


class Attention(nn.Module):
    """Weights wanted, so that torch takes the path through F.dropout on [batch * heads, ...]."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 4, dropout=0.3, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(HIDDEN, 4, 32, dropout=0.2, **options)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "functional": (Functional, 0),
    "images": (Images, 0),
    "encoder layer": (lambda: layer(batch_first=True), 0),
    "encoder layer, sequence first": (layer, 1),
    "attention": (lambda: Attention(True), 0),
    "attention, sequence first": (lambda: Attention(False), 1),
    "alpha": (lambda: nn.Sequential(nn.AlphaDropout(0.2), nn.Sequential(nn.FeatureAlphaDropout(0.3))), 0),
    "kinds": (lambda: nn.Sequential(nn.Dropout1d(0.2), nn.Unflatten(2, (2, 3, 4)), nn.Dropout3d(0.2)), 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_masks_do_not_depend_on_microbatches_or_other_draws(name: str) -> None:
    build, dim = MODELS[name]
    model = build().double()
    x = draw_x(BATCH, SEQ, HIDDEN)
    x = x.transpose(0, 1) if dim else x
    masks = apply_dropout(model)
    whole = run(masks, model, x, dim=dim)
    torch.rand(3)
    assert_same(run(masks, model, x, 2, dim), whole)
    assert_same(run(masks, model, x, 1, dim), whole)
    assert not torch.allclose(run(masks, model, x, dim=dim, seed=8), whole)
    assert masks.unsafe == []
    model.eval()
    evaluated = model(x)
    assert torch.equal(run(masks, model, x, dim=dim), evaluated)
    assert not torch.allclose(evaluated, whole)


def test_sequence_first_draws_as_batch_first() -> None:
    x = draw_x(BATCH, SEQ, HIDDEN)
    torch.manual_seed(0)
    first = layer(batch_first=True).double()
    second = layer().double()
    second.load_state_dict(first.state_dict())
    a = run(apply_dropout(first), first, x)
    b = run(apply_dropout(second), second, x.transpose(0, 1), dim=1)
    assert_same(b.transpose(0, 1), a)


GPT = GptModel(kind="gpt", layers=2, hidden=32, heads=4, kv_heads=2, dropout=0.2)
ENCODER = EncoderModel(kind="encoder", layers=2, hidden=32, heads=4, dropout=0.2)


@pytest.mark.parametrize(
    "build", [lambda: Gpt(GPT, 50, SEQ), lambda: Encoder(ENCODER, 50, SEQ)], ids=["gpt", "encoder"]
)
def test_our_models(build: Callable[[], nn.Module]) -> None:
    model = build().double()
    ids = torch.randint(50, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    masks, keys = apply_dropout(model), []
    masks.on_draw = lambda key, dropped, result: keys.append((key, list(dropped.shape)))
    whole = run(masks, model, ids)
    block = "layers.1" if isinstance(model, Gpt) else "encoder.layers.1"
    assert (f"{block}.self_attn/sdpa#0", [BATCH, 4, SEQ, SEQ]) in keys
    assert len(keys) == len({key for key, _ in keys}) == (7 if isinstance(model, Gpt) else 9)
    assert_same(run(masks, model, ids, 1), whole)
    assert masks.unsafe == []


def rate_of(y: Tensor) -> float:
    return (y == 0).double().mean().item()


def test_values_are_torchs() -> None:
    masks = apply_dropout(model := nn.Dropout(0.25))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.ones(8, 4000, dtype=dtype, requires_grad=True)
        with masks.drawing(1, range(8)):
            y = model(x)
            y.sum().backward()
        assert y.dtype == dtype
        assert torch.equal(y.unique(), torch.tensor([0, 1 / torch.tensor(0.75, dtype=dtype)], dtype=dtype))
        assert torch.equal(x.grad, y.detach())
        assert rate_of(y) == pytest.approx(0.25, abs=0.02)
    with masks.drawing(1, range(8)), torch.no_grad():
        for p, expected in ((0.0, x), (1.0, torch.zeros_like(x))):
            assert torch.equal(F.dropout(x, p), expected)
        z = x.detach().clone()
        assert F.dropout(z, 0.5, inplace=True) is z
        assert rate_of(z) == pytest.approx(0.5, abs=0.02)
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x, 1.5)
        assert F.dropout1d(torch.ones(8, 3, 5), 0.5).std(2).max() == 0


@pytest.mark.parametrize("feature", [False, True])
def test_alpha_dropout_keeps_mean_and_variance(feature: bool) -> None:
    model = nn.FeatureAlphaDropout(0.2) if feature else nn.AlphaDropout(0.2)
    masks = apply_dropout(model)
    x = torch.randn(64, 4000, 1, dtype=torch.float64)
    with masks.drawing(1, range(64)):
        y = model(x)
    assert y.mean().item() == pytest.approx(0, abs=0.02)
    assert y.var().item() == pytest.approx(1, abs=0.03)
    torch.manual_seed(0)
    dropped = (y - x).abs() > 10  # nothing is: what is dropped has one value
    assert not dropped.any()
    values, counts = y.unique(return_counts=True)
    torch.manual_seed(0)
    theirs, their_counts = model(x).unique(return_counts=True)
    assert values[counts.argmax()].item() == pytest.approx(theirs[their_counts.argmax()].item())


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": draw_x(SEQ, SEQ) > -1},
    "float": {"attn_mask": draw_x(BATCH, 1, SEQ, SEQ)},
    "row without keys": {"attn_mask": torch.arange(SEQ)[:, None].expand(SEQ, SEQ) > 0},
    "negative scale": {"scale": -0.3},
    "groups": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_is_torchs(name: str, dtype: torch.dtype) -> None:
    options = dict(ATTENTION[name])
    if options.get("attn_mask") is not None and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].to(dtype)
    num_heads = 2 if name == "groups" else 4
    query, key, value = (
        draw_x(BATCH, heads, SEQ, 8).to(dtype).requires_grad_() for heads in (4, num_heads, num_heads)
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(query, key, value, **options)
    masks = apply_dropout(nn.Identity())
    heard: list[tuple[Tensor, Tensor]] = []
    with masks.drawing(1, range(BATCH)):
        got = F.scaled_dot_product_attention(query, key, value, dropout_p=1e-12, **options)
        masks.on_draw = lambda _key, weights, result: heard.append((weights, result))
        dropped = F.scaled_dot_product_attention(query, key, value, dropout_p=0.4, **options)
        nothing = F.scaled_dot_product_attention(query, key, value, dropout_p=1.0, **options)
    assert got.dtype == dtype
    rtol = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)
    weights, result = heard[0]
    kept = result != 0
    assert torch.equal(result[kept], (weights * torch.tensor(1 / 0.6, dtype=weights.dtype))[kept])
    assert not torch.allclose(dropped, got)
    assert not nothing.any()
    dropped.sum().backward()
    assert query.grad is not None


def test_autocast() -> None:
    masks = apply_dropout(model := layer(batch_first=True))
    x = draw_x(BATCH, SEQ, HIDDEN).float()
    with masks.drawing(1, range(BATCH)):
        plain = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        native = model(x)
        with masks.drawing(1, range(BATCH)):
            got = model(x)
            query = draw_x(BATCH, 4, SEQ, 8).float()
            assert F.scaled_dot_product_attention(query, query, query, dropout_p=0.1).dtype == torch.bfloat16
    assert got.dtype == native.dtype
    torch.testing.assert_close(got.float(), plain, rtol=0.1, atol=0.1)


def test_tensor_parallel_parts_draw_their_part_of_the_mask() -> None:
    """Heads of attention, features of a feed-forward, and a part of the sequence."""
    masks = apply_dropout(nn.Identity())
    wholes = {"/sdpa#0": (BATCH, 4, SEQ, SEQ), "/dropout#0": (BATCH, SEQ, 48), "/dropout#1": (BATCH, SEQ, 6)}
    cuts = {"/sdpa#0": (1, 1), "/dropout#0": (2, 3), "/dropout#1": (1, 1)}

    def draw_all(part: int | None) -> list[Tensor]:
        results: list[Tensor] = []
        masks.on_draw = lambda _key, _x, y: results.append(y)
        values = []
        for key, size in wholes.items():
            whole = torch.ones(size, dtype=torch.float64)
            dim, outer = cuts[key]
            values.append(whole if part is None else Split(dim, outer, 2).take(whole, part))
        query = torch.zeros(BATCH, 4 if part is None else 2, SEQ, 8, dtype=torch.float64)
        masks.splits = {} if part is None else {key: [Cut(*cut, 2, part)] for key, cut in cuts.items()}
        with masks.drawing(3, range(BATCH)):
            F.scaled_dot_product_attention(query, query, query, dropout_p=0.3)
            F.dropout(values[1], 0.3)
            F.dropout(values[2], 0.3)
        return results

    whole, parts = draw_all(None), [draw_all(part) for part in range(2)]
    for number, cut in enumerate(cuts.values()):
        joined = Split(*cut, 2).join([part[number] for part in parts])
        assert torch.equal(joined, whole[number])
        assert not torch.equal(parts[0][number], parts[1][number])


def test_later_calls_are_cut_as_the_first() -> None:
    masks = apply_dropout(model := nn.Sequential(nn.Dropout(0.5)))
    whole, part = torch.ones(BATCH, 20), torch.ones(BATCH, 10)
    with masks.drawing(1, range(BATCH)):
        expected = [model(whole) for _ in range(2)]
    masks.splits["0/dropout#0"] = [Cut(1, 1, 2, 1)]
    with masks.drawing(1, range(BATCH)):
        got = [model(part) for _ in range(2)]
    assert torch.equal(torch.cat(got), torch.cat(expected)[:, 10:])
    assert not torch.equal(*got)


def test_calls_of_one_dropout_are_cut_each_by_itself() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    masks = apply_dropout(model)
    whole, part = torch.ones(BATCH, 20), torch.ones(BATCH, 10)
    with masks.drawing(1, range(BATCH)):
        expected = [model(whole) for _ in range(2)]
    masks.splits = {"0/dropout#0": [Cut(1, 1, 2, 1)], "~1.0/dropout#0": []}
    with masks.drawing(1, range(BATCH)):
        got = [model(part), model(whole)]
        with pytest.raises(PacelineError) as caught:
            model(whole)
    assert torch.equal(got[0], expected[0][:, 10:])
    assert torch.equal(got[1], expected[1])
    assert caught.value.code == "PL429"


@contextlib.contextmanager
def own_attention() -> Iterator[list[float]]:
    """Patch torch as a user does: double the attention, and list the calls."""
    original, calls = F.scaled_dot_product_attention, []

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs.get("dropout_p", 0.0))
        return 2 * original(*args, **kwargs)

    F.scaled_dot_product_attention = attention
    try:
        yield calls
    finally:
        F.scaled_dot_product_attention = original


class Attend(nn.Module):
    """Attention; with `patches` under a context manager of its own, as torch's context parallelism is."""

    def __init__(self, p: float = 0.0, patches: bool = False) -> None:
        super().__init__()
        self.p, self.patches = p, patches

    def forward(self, x: Tensor) -> Tensor:
        with own_attention() if self.patches else contextlib.nullcontext():
            y = F.scaled_dot_product_attention(x, x, x, dropout_p=self.p if self.training else 0.0)
        return F.dropout(y, 0.1, self.training)


def test_an_attention_of_the_user_is_called_in_a_drawing() -> None:
    masks = apply_dropout(model := Attend())
    x = draw_x(BATCH, 2, SEQ, 8)
    torchs = F.scaled_dot_product_attention
    with masks.drawing(1, range(BATCH)):
        plain = model(x)
    with own_attention() as calls:
        patched = F.scaled_dot_product_attention
        with masks.drawing(1, range(BATCH)):
            doubled = model(x)
            with masks.drawing(2, range(BATCH)):  # an evaluation in the middle
                model(x)
        assert F.scaled_dot_product_attention is patched
    assert F.scaled_dot_product_attention is torchs
    assert len(calls) == 2
    assert torch.equal(doubled, 2 * plain)
    assert not masks.unsafe


def test_an_attention_that_the_forward_puts_in_place_is_called_and_draws_our_masks() -> None:
    x = draw_x(BATCH, 2, SEQ, 8)
    outputs = []
    for patches in (False, True):
        masks = apply_dropout(model := Attend(0.3, patches))
        with masks.drawing(1, range(BATCH)):
            outputs.append(model(x))
    assert torch.equal(outputs[1], 2 * outputs[0])


def test_a_patch_made_in_a_drawing_stays_and_works_after_it() -> None:
    torchs, x = F.scaled_dot_product_attention, draw_x(BATCH, 2, SEQ, 8)
    masks = apply_dropout(nn.Identity())
    patch = own_attention()
    try:
        with masks.drawing(1, range(BATCH)):
            calls = patch.__enter__()
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), 2 * torchs(x, x, x))
        assert len(calls) == 1
    finally:
        patch.__exit__(None, None, None)
        F.scaled_dot_product_attention = torchs


def test_a_patch_of_a_drawing_that_is_undone_after_it_leaves_nothing_of_ours() -> None:
    torchs = F.scaled_dot_product_attention
    masks = apply_dropout(model := Attend(0.3))
    patch = own_attention()
    try:
        with masks.drawing(1, range(BATCH)):
            patch.__enter__()
        patch.__exit__(None, None, None)
        with masks.drawing(2, range(BATCH)):
            model(draw_x(BATCH, 2, SEQ, 8))
        assert masks.unsafe == []
        assert F.scaled_dot_product_attention is torchs
    finally:
        F.scaled_dot_product_attention = torchs


def test_an_attention_of_the_user_that_drops_is_named() -> None:
    masks = apply_dropout(model := nn.ModuleDict({"inner": Attend(0.3)}))
    with own_attention(), masks.drawing(1, range(BATCH)):
        model["inner"](draw_x(BATCH, 2, SEQ, 8))
    assert [finding.code for finding in masks.unsafe] == ["PL454"]
    assert masks.unsafe[0].where == "inner"
    assert "dropout_p=0.3" in masks.unsafe[0].saw


def test_a_dropout_of_the_user_draws_our_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = apply_dropout(nn.Identity())
    x = draw_x(BATCH, SEQ)
    with masks.drawing(1, range(BATCH)):
        expected = F.dropout(x, 0.5)
    torchs = F.dropout
    monkeypatch.setattr(F, "dropout", lambda *args, **kwargs: -torchs(*args, **kwargs))
    with masks.drawing(1, range(BATCH)):
        assert torch.equal(F.dropout(x, 0.5), -expected)


def test_steps_that_overlap_put_back_what_was_there() -> None:
    """As of two threads: the first one in is the first one out."""
    torchs = F.scaled_dot_product_attention, F.dropout, torch.dropout
    first, second = _patches.applied(), _patches.applied()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert F.dropout is not torchs[1]
    second.__exit__(None, None, None)
    assert (F.scaled_dot_product_attention, F.dropout, torch.dropout) == torchs


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_recompute_draws_the_same(use_reentrant: bool, preserve: bool) -> None:
    class Model(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            self.recompute = recompute
            self.layers = nn.ModuleList(layer(batch_first=True) for _ in range(3))

        def block(self, x: Tensor, number: int) -> Tensor:
            return F.dropout(self.layers[number](x), 0.2, self.training)

        def forward(self, x: Tensor) -> Tensor:
            # The last one is called twice, so its second call must be told from the first in backward too.
            for number in (0, 1, 2, 2):
                if self.recompute:
                    x = checkpoint(
                        self.block, x, number, use_reentrant=use_reentrant, preserve_rng_state=preserve
                    )
                else:
                    x = self.block(x, number)
            return x

    torch.manual_seed(0)
    model = Model(recompute=False).double()
    x = draw_x(BATCH, SEQ, HIDDEN).requires_grad_()
    masks, grads = apply_dropout(model), []
    drawn: list[list[str]] = []
    masks.on_draw = lambda key, _x, _y: drawn[-1].append(key)
    for recompute in (False, True):
        model.recompute = recompute
        drawn.append([])
        model.zero_grad()
        x.grad = None
        with masks.drawing(5, range(BATCH)):
            model(x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
    once, twice = drawn
    assert "layers.2~1.dropout1/dropout#0" in once
    assert twice[: len(once)] == once
    assert len(twice) > 1.5 * len(once)  # torch stops a recomputation when it has what it needs
    assert set(twice) == set(once)
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["block", "selective"])
@pytest.mark.parametrize("hooked_first", [False, True])
def test_recompute_by_hooks_draws_the_same(kind: str, hooked_first: bool) -> None:
    """As `parallel/recompute.py` does it: the whole module is called again, its hooks included."""
    torch.manual_seed(0)
    model = nn.Sequential(layer(batch_first=True), layer(batch_first=True), nn.Linear(HIDDEN, 3)).double()
    plain = copy.deepcopy(model)
    blocks = [("0", model[0]), ("1", model[1])]
    if hooked_first:
        masks = apply_dropout(model)
        apply_recompute(model, blocks, kind)
    else:
        apply_recompute(model, blocks, kind)
        masks = apply_dropout(model)
    x = draw_x(BATCH, SEQ, HIDDEN)
    drawn: list[str] = []
    masks.on_draw = lambda key, _x, _y: drawn.append(key)
    for each, own in ((model, masks), (plain, apply_dropout(plain))):
        with own.drawing(5, range(BATCH)):
            each(each(x) @ each[2].weight).square().sum().backward()
    assert {"1.dropout1/dropout#0", "~1.1.dropout1/dropout#0"} < set(drawn)
    assert len(drawn) > 1.5 * len(set(drawn))  # they were drawn again
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def test_a_shared_layer_draws_anew_in_each_call() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Dropout(0.5))
            self.again = self.inner

        def forward(self, x: Tensor) -> list[Tensor]:
            return [self.inner(x), self.again(x), self.inner(x)]

    masks, keys = apply_dropout(model := Shared()), []
    masks.on_draw = lambda key, _x, _y: keys.append(key)
    x = torch.ones(BATCH, 100)
    with masks.drawing(1, range(BATCH)):
        a, b, c = model(x)
        model(x)
    assert keys[:3] == ["inner.0/dropout#0", "inner~1.0/dropout#0", "inner~2.0/dropout#0"]
    assert len(set(keys)) == 6
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)


def test_two_models_at_once_draw_by_their_own_names() -> None:
    a, b = (nn.Sequential(nn.Sequential(nn.Dropout(0.5)), nn.Dropout(0.5)) for _ in range(2))
    masks, other = apply_dropout(a), apply_dropout(b)
    x = torch.ones(BATCH, 100)
    keys: list[str] = []
    masks.on_draw = lambda key, _x, _y: keys.append(f"a: {key}")
    other.on_draw = lambda key, _x, _y: keys.append(f"b: {key}")
    with masks.drawing(1, range(BATCH)), other.drawing(2, range(BATCH)):
        together = a(x), b(x)
    names = ["0.0/dropout#0", "1/dropout#0"]
    assert keys == [*(f"a: {name}" for name in names), *(f"b: {name}" for name in names)]
    assert torch.equal(together[0], run(masks, a, x, seed=1))
    assert torch.equal(together[1], run(other, b, x, seed=2))
    torch.manual_seed(0)
    native = b(x)
    with masks.drawing(1, range(BATCH)):  # the other one is left to torch
        torch.manual_seed(0)
        assert torch.equal(b(x), native)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3))  # refuses other widths
        self.second = nn.Sequential(nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.first(x)
        except RuntimeError:
            x = x * 1
        return self.second(x)


def test_a_forward_that_raises_leaves_the_right_scope() -> None:
    masks, keys = apply_dropout(model := Fragile()), []
    masks.on_draw = lambda key, _x, _y: keys.append(key)
    original = F.dropout
    with masks.drawing(1, range(2)):
        model(torch.ones(2, 5))
        with pytest.raises(RuntimeError):
            model.first(torch.ones(2, 5))
        F.dropout(torch.ones(2, 5))
    names = ["first.0/dropout#0", "second.0/dropout#0", "first.0/dropout#0", "/dropout#0"]
    assert keys == names
    with pytest.raises(RuntimeError), masks.drawing(1, range(2)):
        model.first(torch.ones(2, 5))
    assert F.dropout is original
    assert "dropout" not in torch._VF.__dict__
    keys.clear()
    with masks.drawing(1, range(2)):
        model(torch.ones(2, 5))
    assert keys == names[:2]


class Stop(BaseException):
    """torch calls no hook for what isn't an Exception."""


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Dropout(0.5), Raise())
        self.second = nn.Sequential(nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(Stop):
            x = self.first(x)
        return x


class Raise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise Stop


def test_what_is_no_exception_is_over_with_the_module_that_caught_it() -> None:
    masks, keys = apply_dropout(model := Interrupted()), []
    masks.on_draw = lambda key, _x, _y: keys.append(key)
    with masks.drawing(1, range(2)):
        model.second(model(torch.ones(2, 5)))
    assert keys == ["first.0/dropout#0", "second.0/dropout#0"]


def test_outside_of_drawing_torch_is_as_it_was() -> None:
    functions = [F.dropout, F.scaled_dot_product_attention, F.dropout2d, torch.dropout, torch.feature_dropout]
    plain = copy.deepcopy(model := layer(batch_first=True))
    masks = apply_dropout(model)
    x = torch.randn(BATCH, SEQ, HIDDEN)
    results = []
    for each in (model, plain):
        torch.manual_seed(3)
        results.append(each(x))
    assert torch.equal(*results)
    with masks.drawing(1, range(BATCH)):
        state = torch.get_rng_state()
        model(x)
        assert torch.equal(torch.get_rng_state(), state)  # nobody's generator is touched
    now = [F.dropout, F.scaled_dot_product_attention, F.dropout2d, torch.dropout, torch.feature_dropout]
    assert now == functions


def test_the_model_stays_what_it_is() -> None:
    model = Gpt(GPT, 50, SEQ)
    before = list(model.state_dict()), [name for name, _ in model.named_modules()], type(model)
    masks = apply_dropout(model)
    assert (list(model.state_dict()), [name for name, _ in model.named_modules()], type(model)) == before
    ids = torch.randint(50, (BATCH, SEQ))
    whole = run(masks, model, ids)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert list(other.state_dict()) == before[0]
        # A copy draws as its original does, while that is drawing.
        assert torch.equal(run(masks, other, ids), whole)
        other.eval()
        assert other(ids).shape == (BATCH, SEQ, 50)


def test_what_cannot_be_made_independent_is_named() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.lstm = nn.LSTM(6, 6, 2, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x + self.drop(torch.ones(1, 7, 6)))[0]

    masks = apply_dropout(model := Positions())
    assert [(f.code, f.where) for f in masks.unsafe] == [("PL452", "lstm")]
    for _ in range(2):
        with masks.drawing(1, range(BATCH)):
            model(torch.ones(BATCH, 7, 6))
    assert [(f.code, f.where) for f in masks.unsafe] == [("PL452", "lstm"), ("PL451", "drop/dropout#0")]
    assert "[1, 7, 6]" in str(masks.unsafe[1])


@pytest.mark.parametrize(
    ("size", "cut"),
    [
        ((7, 2, 4, 4), Cut(1, 1, 2, 0)),  # attention over 4 samples, in a part of 4 heads
        ((8, 7, 4), Cut(0, 1, 2, 0)),  # features first, whose whole number is a multiple of 4
        ((8, 4, 5), Cut(0, 1, 2, 0, folded=True)),  # samples and heads in one dimension, 4 queries
    ],
)
def test_a_cut_where_samples_are_expected_is_refused(size: tuple[int, ...], cut: Cut) -> None:
    masks = apply_dropout(model := nn.Sequential(nn.Dropout(0.5)))
    masks.splits["0/dropout#0"] = [cut]
    with masks.drawing(1, range(4)), pytest.raises(PacelineError, match="PL451") as caught:
        model(torch.ones(size))
    assert f"0/dropout#0 drops a part {list(size)}" in str(caught.value)


def test_imported_by_name() -> None:
    from torch.nn.functional import dropout

    masks = apply_dropout(nn.Identity())
    x = torch.ones(BATCH, 50)
    assert torch.equal(run(masks, lambda x: dropout(x, 0.5), x, 1), run(masks, lambda x: dropout(x, 0.5), x))
    assert math.isclose(rate_of(run(masks, lambda x: dropout(x, 0.5), x)), 0.5, abs_tol=0.15)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_whose_heads_can_be_divided_has_the_masks_of_torchs_own(batch_first: bool) -> None:
    """Also if it attends over the samples, where as many heads as samples stand in the samples' place."""
    torch.manual_seed(0)
    plain = Attention(batch_first).double()
    opened = copy.deepcopy(plain)
    open_attention(opened)
    x = draw_x(BATCH, SEQ, HIDDEN)
    assert_same(run(apply_dropout(opened), opened, x), run(apply_dropout(plain), plain, x))
