"""The decoder with experts against the formulas and against transformers; groups of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import PacelineError
from paceline.models.grouped import add_to_groups, multiply_groups
from paceline.models.moe import Mixture, MoeGpt
from paceline.recipe import Layout, parse_recipe
from paceline.recipe.legal import Rules
from paceline.recipe.schema import MoeModel

VOCAB = 50


def read(**keys: object) -> MoeModel:
    table = {"kind": "moe", "layers": 2, "hidden": 32, "heads": 4, "experts": 4, "expert_hidden": 24}
    return MoeModel.model_validate(table | keys)


def build(**keys: object) -> MoeGpt:
    torch.manual_seed(0)
    return MoeGpt(read(**keys), VOCAB, 16)


def mix_token_by_token(mixture: Mixture, x: Tensor) -> Tensor:
    outputs = []
    for token in x.flatten(0, 1):
        chances = (mixture.gate.weight @ token).softmax(0)
        chosen = chances.argsort(descending=True)[: mixture.num_choices]
        output = torch.zeros_like(token)
        for expert in chosen:
            gate, up = (mixture.experts.gate_up_proj[expert] @ token).chunk(2)
            answer = mixture.experts.down_proj[expert] @ (functional.silu(gate) * up)
            output = output + chances[expert] / chances[chosen].sum() * answer
        outputs.append(output if mixture.shared is None else output + mixture.shared(token))
    return torch.stack(outputs).view_as(x)


@pytest.mark.parametrize(
    "keys", [{}, {"shared_hidden": 16, "experts_per_token": 3}, {"experts_per_token": 1}]
)
def test_a_mixture_is_that_of_the_formulas(keys: dict[str, object]) -> None:
    torch.manual_seed(1)
    mixture = Mixture(read(**keys)).double()
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    output, expected = mixture(x)[0], mix_token_by_token(mixture, x)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    arguments = [x, *mixture.parameters()]
    upstream = torch.randn_like(output)
    for own, other in zip(
        torch.autograd.grad(output, arguments, upstream),
        torch.autograd.grad(expected, arguments, upstream),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


def test_logits_are_those_of_mixtral() -> None:
    transformers = pytest.importorskip("transformers")
    model = build(tie_embeddings=False, kv_heads=2, init_std=0.2).eval()
    other = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=16,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
        )
    ).eval()
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": value
        for name, value in model.state_dict().items()
    }
    other.load_state_dict(weights)
    ids = torch.randint(0, VOCAB, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, other(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_groups() -> None:
    counts = torch.tensor([2, 0, 3])
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, w: multiply_groups(r, w, counts), (rows, weights))
    (gradient,) = torch.autograd.grad(multiply_groups(rows, weights, counts).sum(), weights)
    assert not gradient[1].any(), "no row, no gradient"
    assert gradient[0].any()
    assert gradient[2].any()
    assert multiply_groups(rows[:0], weights, torch.zeros(3, dtype=torch.int64)).shape == (0, 6)


def test_the_gradient_of_biases_of_groups() -> None:
    counts = torch.tensor([2, 0, 3])
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    biases = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, b: add_to_groups(r, b, counts), (rows, biases))
    (gradient,) = torch.autograd.grad(add_to_groups(rows, biases, counts).sum(), biases)
    assert gradient[:, 0].tolist() == [2, 0, 3]
    assert add_to_groups(rows[:0], biases, torch.zeros(3, dtype=torch.int64)).shape == (0, 4)
    assert add_to_groups(rows.bfloat16(), biases.float(), counts).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bits_of_a_group_do_not_depend_on_its_place(dtype: torch.dtype) -> None:
    """So an expert's owner may compute it beside any others."""
    torch.manual_seed(0)
    width, rows = 17, torch.randn(40, 17).to(dtype)
    weights = torch.randn(3, 9, width).to(dtype)
    together = multiply_groups(rows, weights, torch.tensor([1, 32, 7]))
    alone = multiply_groups(rows[1:33].clone(), weights[1:2].clone(), torch.tensor([32]))
    assert torch.equal(together[1:33], alone)


def test_the_auxiliary_loss_and_the_fullest_expert() -> None:
    model = build(experts_per_token=1, balance_loss=0.5, dense_layers=1)
    gate = model.layers[1].mlp.gate.weight
    ids = torch.randint(0, VOCAB, (2, 16))
    with torch.no_grad():
        gate.zero_()  # equal chances, and all tokens choose the same expert
    output = model(ids)
    assert output.balance.item() == pytest.approx(0.5 * 1.0)
    assert output.fullest.item() == 1.0
    output.balance.backward()
    assert gate.grad is not None
    assert gate.grad.any(), "the router learns from it"
    assert model.eval()(ids).balance.item() == 0.0


def test_only_the_first_blocks_are_dense() -> None:
    model = build(layers=3, dense_layers=2)
    assert [isinstance(block.mlp, Mixture) for block in model.layers] == [False, False, True]


@pytest.mark.parametrize(
    ("keys", "code"), [({"experts_per_token": 5}, "PL650"), ({"dense_layers": 2}, "PL651")]
)
def test_impossible_mixtures_are_refused(keys: dict[str, Any], code: str) -> None:
    model = {"kind": "moe", "layers": 2, "experts": 4, **keys}
    with pytest.raises(PacelineError, match=code):
        parse_recipe({"model": model, "data": {"kind": "text"}, "train": {"steps": 1}})


def test_a_mixture_needs_the_whole_sequence() -> None:
    recipe = parse_recipe({"model": {"kind": "moe"}, "data": {"kind": "text"}, "train": {"steps": 1}})
    assert not Rules.of(recipe).check(Layout(tp=2), 2)
    found = Rules.of(recipe).check(Layout(tp=2, sequence=True), 2)
    assert [finding.code for finding in found] == ["PL652"]
