"""The encoder: torch's layers, drawn apart, without warnings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.models.encoder import Encoder
from paceline.recipe.schema import EncoderModel


def build(**keys: object) -> Encoder:
    torch.manual_seed(0)
    section = EncoderModel.model_validate({"kind": "encoder", "layers": 2, "hidden": 32, "heads": 4} | keys)
    return Encoder(section, vocab_size=40, max_seq_len=12)


@pytest.mark.parametrize("norm_first", [True, False])
def test_it_is_built_of_torchs_layers(norm_first: bool) -> None:
    model = build(norm_first=norm_first, ffn_hidden=48)
    layers = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    assert len(layers) == 2
    assert all(layer.norm_first is norm_first and layer.linear1.out_features == 48 for layer in layers)
    assert model(torch.randint(0, 40, (3, 12))).shape == (3, 12, 40)
    assert build().encoder.layers[0].linear1.out_features == 4 * 32


def test_layers_do_not_start_as_copies() -> None:
    first, second = build().encoder.layers
    assert not torch.equal(first.self_attn.in_proj_weight, second.self_attn.in_proj_weight)
    assert not torch.equal(first.linear1.weight, second.linear1.weight)


def test_it_looks_both_ways_and_knows_places() -> None:
    model = build().eval()
    ids = torch.randint(0, 40, (1, 12))
    later = ids.clone()
    later[0, -1] = (later[0, -1] + 1) % 40
    with torch.no_grad():
        assert not torch.allclose(model(ids)[0, 0], model(later)[0, 0])
        same = model(torch.zeros(1, 12, dtype=torch.int64))[0]
    assert not torch.allclose(same[0], same[1])


def test_train_and_eval_mode() -> None:
    model = build(dropout=0.2)
    ids = torch.randint(0, 40, (2, 12))
    assert not torch.equal(model(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))


def test_all_parameters_get_gradients() -> None:
    model = build()
    model(torch.randint(0, 40, (2, 12))).logsumexp(-1).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_longer_sequence_is_refused() -> None:
    with pytest.raises(PacelineError, match="PL220"):
        build()(torch.zeros(1, 13, dtype=torch.int64))
