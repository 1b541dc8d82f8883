"""Models that we didn't write: sharded gradients are those of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.models.resnet import Resnet
from paceline.recipe.schema import ResnetModel
from tests.dist.pool import Pool
from tests.parallel.sharded import build_shards

SMALL = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 31}
VOCAB = 37
Loss = Callable[[nn.Module, int], Tensor]


def tokens(index: int, low: int = 0) -> Tensor:
    return torch.randint(low, VOCAB, (2, 7), generator=torch.Generator().manual_seed(index))


def images(index: int) -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def language_loss(model: nn.Module, index: int) -> Tensor:
    ids = tokens(index)
    return model(input_ids=ids, labels=ids).loss


def build_llama() -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=VOCAB, num_key_value_heads=1)), language_loss


def build_gpt2() -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_embd=20, n_layer=2, n_head=2, vocab_size=VOCAB, n_positions=9, **dropout)
    return GPT2LMHeadModel(config), language_loss


def build_t5() -> tuple[nn.Module, Loss]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=20, num_layers=2, num_heads=2, d_ff=31, d_kv=10, vocab_size=VOCAB, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), language_loss


def build_bert() -> tuple[nn.Module, Loss]:
    from transformers import BertConfig, BertForMaskedLM

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SMALL, vocab_size=VOCAB, **dropout)), language_loss


def build_vit() -> tuple[nn.Module, Loss]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**SMALL, image_size=16, patch_size=8, num_labels=5)
    model = ViTForImageClassification(config)
    return model, lambda model, index: model(images(index)).logits.square().sum()


def build_transformer() -> tuple[nn.Module, Loss]:
    model = nn.Transformer(20, 2, 2, 2, 30, dropout=0.0, batch_first=True)

    def loss(model: nn.Module, index: int) -> Tensor:
        x = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return (model(x, x * x) ** 3).sum()

    return model, loss


def build_resnet() -> tuple[nn.Module, Loss]:
    model = Resnet(ResnetModel(kind="resnet", blocks=[1, 2], width=6), 3, 5)
    return model, lambda model, index: model(images(index)).square().sum()


BUILDERS = [build_llama, build_gpt2, build_t5, build_bert, build_vit, build_transformer, build_resnet]


def build(number: int) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loss = BUILDERS[number]()
    return model.double().train(), loss


def gradients_of_all(world: Any, layout: str) -> Any:
    return [gradients_of(world, number, layout) for number in range(len(BUILDERS))]


def gradients_of(world: Any, number: int, layout: str) -> Any:
    model, loss = build(number)
    shards, mesh = build_shards(world, layout, model)
    own = 2 - mesh.dp.rank  # three microbatches on two ranks
    shards.begin((2, 1))
    for at in range(2):
        index = 2 * mesh.dp.rank + at if at < own else None
        with shards.synchronising(at == 1, index):
            shards.backward(loss(model, index or 0))
    shards.check_reduced()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}, len(shards.units) - 1


@pytest.mark.parametrize("zero", [1, 3])
def test_models_of_others(ranks: Pool, zero: int) -> None:
    results = ranks.run(gradients_of_all, 2, (f"dp_shard=2 zero={zero}",), timeout_s=90)
    for number, builder in enumerate(BUILDERS):
        model, loss = build(number)
        for index in range(3):
            loss(model, index).backward()
        for of_rank in results:
            gradients, num_blocks = of_rank[number]
            assert num_blocks >= 2
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(
                    gradients[name], parameter.grad, rtol=1e-9, atol=1e-10, msg=f"{builder.__name__}: {name}"
                )
