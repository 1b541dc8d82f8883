"""The decoder against an implementation of its own, and what it must refuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.models.gpt import Gpt
from paceline.recipe.schema import GptModel, default_ffn_hidden

VOCAB = 50


def build(max_seq_len: int = 16, **keys: object) -> Gpt:
    torch.manual_seed(0)
    section = GptModel.model_validate({"kind": "gpt", "layers": 2, "hidden": 32, "heads": 4} | keys)
    return Gpt(section, VOCAB, max_seq_len)


def reference_logits(model: Gpt, ids: Tensor) -> Tensor:
    """Llama written out with loops over heads and positions, from the papers' formulas."""
    section, weights = model.section, dict(model.named_parameters())
    heads, kv_heads = section.heads, section.kv_heads or section.heads
    dim = section.hidden // heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + section.norm_eps).sqrt() * weights[name + ".weight"]

    def rotate(vector: Tensor, position: int) -> Tensor:
        out = vector.clone()
        for pair in range(dim // 2):  # feature i turns against feature i + dim/2
            angle = position * section.rope_theta ** (-2 * pair / dim)
            a, b = vector[pair], vector[pair + dim // 2]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    rows = []
    for row in ids:
        x = weights["embed_tokens.weight"][row]
        for number in range(section.layers):
            prefix = f"layers.{number}."
            y = norm(x, prefix + "input_layernorm")
            q, k, v = (y @ weights[f"{prefix}self_attn.{name}_proj.weight"].T for name in "qkv")
            attended = torch.zeros(len(row), heads * dim, dtype=x.dtype)
            for head in range(heads):
                shared = head // (heads // kv_heads)
                mine, theirs = slice(head * dim, (head + 1) * dim), slice(shared * dim, (shared + 1) * dim)
                for t in range(len(row)):
                    query = rotate(q[t, mine], t)
                    scores = torch.stack([query @ rotate(k[s, theirs], s) for s in range(t + 1)])
                    chances = (scores / math.sqrt(dim)).softmax(0)
                    attended[t, mine] = chances @ v[: t + 1, theirs]
            x = x + attended @ weights[prefix + "self_attn.o_proj.weight"].T
            y = norm(x, prefix + "post_attention_layernorm")
            gate, up = (y @ weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate * gate.sigmoid() * up) @ weights[prefix + "mlp.down_proj.weight"].T
        head_weight = weights.get("lm_head.weight", weights["embed_tokens.weight"])
        rows.append(norm(x, "norm") @ head_weight.T)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "keys",
    [{}, {"kv_heads": 2, "tie_embeddings": False}, {"kv_heads": 1, "rope_theta": 500.0, "norm_eps": 1e-2}],
)
def test_logits_are_those_of_the_formulas(keys: dict[str, object]) -> None:
    model = build(init_std=0.3, dropout=0.5, **keys).double().eval()
    ids = torch.randint(0, VOCAB, (2, 7))
    with torch.no_grad():
        # the cosines are worked out in fp32, as Hugging Face does
        torch.testing.assert_close(model(ids), reference_logits(model, ids), rtol=1e-4, atol=1e-5)


def test_names_are_hugging_face_names_without_model() -> None:
    names = set(build(layers=1, tie_embeddings=False).state_dict())
    assert names == {
        "embed_tokens.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "norm.weight",
        "lm_head.weight",
    }
    assert "lm_head.weight" not in build(layers=1).state_dict()


def test_shapes_are_those_of_hugging_face() -> None:
    layer = build(hidden=16, heads=4, kv_heads=2, ffn_hidden=24).layers[0]
    assert layer.self_attn.q_proj.weight.shape == (16, 16)
    assert layer.self_attn.k_proj.weight.shape == (2 * 4, 16)
    assert layer.mlp.gate_proj.weight.shape == (24, 16)


@pytest.mark.parametrize(("hidden", "inner"), [(128, 352), (96, 256), (100, 288), (12, 32)])
def test_default_feed_forward_width(hidden: int, inner: int) -> None:
    assert default_ffn_hidden(hidden) == inner


def test_future_tokens_do_not_reach_the_past() -> None:
    model = build().eval()
    ids = torch.randint(0, VOCAB, (1, 16))
    other = ids.clone()
    other[0, 9:] = (other[0, 9:] + 1) % VOCAB
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[:, :9], model(other)[:, :9])
        assert not torch.allclose(model(ids)[:, 9:], model(other)[:, 9:])


def test_initial_weights() -> None:
    model = build(hidden=128, layers=8, init_std=0.05)
    layer = model.layers[3]
    for weight, std in (
        (model.embed_tokens.weight, 0.05),
        (layer.self_attn.q_proj.weight, 0.05),
        (layer.mlp.up_proj.weight, 0.05),
        (layer.self_attn.o_proj.weight, 0.05 / 4),
        (layer.mlp.down_proj.weight, 0.05 / 4),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(128))


def test_dropout_acts_in_train_mode_only() -> None:
    model = build(dropout=0.3)
    ids = torch.randint(0, VOCAB, (2, 8))
    assert not torch.equal(model(ids), model(ids))
    torch.manual_seed(7)
    first = model(ids)
    torch.manual_seed(7)
    assert torch.equal(first, model(ids))  # all of it comes from the default generator
    model.eval()
    assert torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("place", ["embedding", "attention", "residual"])
def test_each_dropout_acts(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(dropout=0.5)
    ids = torch.randint(0, VOCAB, (1, 8))
    # everything off but one
    for layer in model.layers:
        layer.dropout = 0.5 if place == "residual" else 0.0
        layer.self_attn.dropout = 0.5 if place == "attention" else 0.0
    if place != "embedding":
        model.section = model.section.model_copy(update={"dropout": 0.0})
    assert not torch.equal(model(ids), model(ids))


def test_all_parameters_get_gradients_under_autocast() -> None:
    model = build(kv_heads=2, dropout=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(torch.randint(0, VOCAB, (2, 8)))
    logits.float().logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_a_longer_sequence_is_refused() -> None:
    with pytest.raises(PacelineError, match=r"17 tokens for a model of 16 positions.*PL220"):
        build()(torch.zeros(1, 17, dtype=torch.int64))
