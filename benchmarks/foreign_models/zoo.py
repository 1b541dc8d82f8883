"""Forty and more models that others wrote or write, each in small, with batches, a call and a loss.

Those of `transformers` come from a table of configurations; those of `own_models.py` are built as people
build them in scripts of their own. A model is here as its library has it: nothing is set to make it fit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.foreign_models import own_models
from benchmarks.foreign_models.models import (
    DROPOUT,
    IGNORED,
    MODELS,
    SMALL,
    Batch,
    Foreign,
    Size,
    call_images,
    call_padded,
    call_pairs,
    classify,
    make_images,
    make_padded,
    make_pairs,
    make_tokens,
)

SIZE = SMALL
_WIDE = 2 * SIZE.hidden
_COMMON: dict[str, Any] = {
    "vocab_size": SIZE.vocab,
    "hidden_size": SIZE.hidden,
    "num_hidden_layers": SIZE.layers,
    "num_attention_heads": SIZE.heads,
}
_GROUPED = {**_COMMON, "intermediate_size": _WIDE, "num_key_value_heads": 2, "attention_dropout": DROPOUT}
_HEADS_OF_8 = {**_GROUPED, "head_dim": 8, "pad_token_id": 0}
_EXPERTS = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_PAIR: dict[str, Any] = {
    "vocab_size": SIZE.vocab,
    "d_model": SIZE.hidden,
    "encoder_layers": SIZE.layers,
    "decoder_layers": SIZE.layers,
    "encoder_attention_heads": SIZE.heads,
    "decoder_attention_heads": SIZE.heads,
    "encoder_ffn_dim": _WIDE,
    "decoder_ffn_dim": _WIDE,
    "dropout": DROPOUT,
}
_WAVES: dict[str, Any] = {
    **_COMMON,
    "intermediate_size": _WIDE,
    "conv_dim": [16, 16],
    "conv_stride": [4, 2],
    "conv_kernel": [8, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "num_labels": 10,
    "classifier_proj_size": 16,
}
# Of decoders that predict the next token: class, then settings of its configuration.
_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma": ("Gemma", _HEADS_OF_8),
    "Gemma 2": ("Gemma2", {**_HEADS_OF_8, "sliding_window": 4}),
    "Mistral": ("Mistral", {**_GROUPED, "sliding_window": 4}),
    "Qwen2": ("Qwen2", _GROUPED),
    "Qwen3": ("Qwen3", {**_GROUPED, "head_dim": 8}),
    "Phi": ("Phi", {**_COMMON, "intermediate_size": _WIDE, "resid_pdrop": DROPOUT, "embd_pdrop": DROPOUT}),
    "Phi-3": ("Phi3", {**_GROUPED, "resid_pdrop": DROPOUT, "embd_pdrop": DROPOUT, "pad_token_id": 0}),
    "Falcon": ("Falcon", {**_COMMON, "hidden_dropout": DROPOUT, "multi_query": False}),
    "Falcon, one key head": ("Falcon", {**_COMMON, "hidden_dropout": DROPOUT, "multi_query": True}),
    "GPT-NeoX": ("GPTNeoX", {**_COMMON, "intermediate_size": _WIDE, "hidden_dropout": DROPOUT}),
    "GPT-J": (
        "GPTJ",
        {
            "vocab_size": SIZE.vocab,
            "n_positions": 32,
            "n_embd": SIZE.hidden,
            "n_layer": SIZE.layers,
            "n_head": SIZE.heads,
            "rotary_dim": 4,
            "resid_pdrop": DROPOUT,
            "embd_pdrop": DROPOUT,
            "attn_pdrop": DROPOUT,
        },
    ),
    "OPT": (
        "OPT",
        {
            **_COMMON,
            "ffn_dim": _WIDE,
            "max_position_embeddings": 32,
            "dropout": DROPOUT,
            "word_embed_proj_dim": SIZE.hidden,
        },
    ),
    "BLOOM": (
        "Bloom",
        {
            "vocab_size": SIZE.vocab,
            "hidden_size": SIZE.hidden,
            "n_layer": SIZE.layers,
            "n_head": SIZE.heads,
            "hidden_dropout": DROPOUT,
            "attention_dropout": DROPOUT,
        },
    ),
    "Mamba": (
        "Mamba",
        {
            "vocab_size": SIZE.vocab,
            "hidden_size": SIZE.hidden,
            "state_size": 4,
            "num_hidden_layers": SIZE.layers,
        },
    ),
    "Mamba 2": (
        "Mamba2",
        {
            "vocab_size": SIZE.vocab,
            "hidden_size": SIZE.hidden,
            "state_size": 8,
            "num_hidden_layers": SIZE.layers,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 4,
        },
    ),
    "Cohere": ("Cohere", {**_GROUPED, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "OLMo 2": ("Olmo2", {**_GROUPED, "pad_token_id": 0}),
    "Mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2-MoE": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": _WIDE}),
    "Qwen3-MoE": ("Qwen3Moe", {**_EXPERTS, "head_dim": 8}),
    "GPT-OSS": (
        "GptOss",
        {**_HEADS_OF_8, "intermediate_size": 32, "num_local_experts": 4, "sliding_window": 4},
    ),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            **_COMMON,
            "intermediate_size": _WIDE,
            "moe_intermediate_size": 16,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "attention_dropout": DROPOUT,
            "pad_token_id": 0,
        },
    ),
}
# Of encoders that fill in what is masked.
_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "DistilBERT": (
        "DistilBert",
        {
            "vocab_size": SIZE.vocab,
            "dim": SIZE.hidden,
            "n_layers": SIZE.layers,
            "n_heads": SIZE.heads,
            "hidden_dim": _WIDE,
            "max_position_embeddings": 32,
        },
    ),
    "RoBERTa": ("Roberta", {**_COMMON, "intermediate_size": _WIDE, "max_position_embeddings": 32}),
    "DeBERTa": (
        "DebertaV2",
        {
            **_COMMON,
            "intermediate_size": _WIDE,
            "max_position_embeddings": 32,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    "ALBERT": (
        "Albert",
        {
            **_COMMON,
            "embedding_size": 16,
            "intermediate_size": _WIDE,
            "max_position_embeddings": 32,
            "hidden_dropout_prob": DROPOUT,
        },
    ),
    "ELECTRA": (
        "Electra",
        {**_COMMON, "embedding_size": 16, "intermediate_size": _WIDE, "max_position_embeddings": 32},
    ),
}


def build(model: str, config: str, settings: dict[str, Any], size: Size) -> nn.Module:
    """Return a model of `transformers`; its size is in the settings."""
    import transformers

    transformers.logging.set_verbosity_error()
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return built


def build_xlnet(size: Size) -> nn.Module:
    """Two streams and relative positions."""
    settings = {
        "vocab_size": size.vocab,
        "d_model": size.hidden,
        "n_layer": size.layers,
        "n_head": size.heads,
    }
    return build("XLNetLMHeadModel", "XLNetConfig", settings | {"d_inner": _WIDE}, size)


def build_clip(size: Size) -> nn.Module:
    """Text and images, and a temperature of no dimensions."""
    common = {
        "hidden_size": size.hidden,
        "intermediate_size": _WIDE,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "attention_dropout": DROPOUT,
    }
    text = common | {"vocab_size": size.vocab, "max_position_embeddings": size.length, "eos_token_id": 2}
    settings = {"text_config": text, "vision_config": common | {"image_size": 16, "patch_size": 4}}
    return build("CLIPModel", "CLIPConfig", settings | {"projection_dim": 16}, size)


# ---- batches, calls and losses


def make_larger_images(size: Size, step: int) -> Batch:
    """Noise of 32 x 32 pixels with a class each."""
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(size.samples, 3, 32, 32, generator=generator),
        "targets": torch.randint(0, 10, (size.samples,), generator=generator),
    }


def make_speech(size: Size, step: int) -> Batch:
    """Return a spectrogram beside tokens."""
    generator = torch.Generator().manual_seed(step + 99)
    return make_tokens(size, step) | {"mel": torch.randn(size.samples, 8, 20, generator=generator)}


def make_waves(size: Size, step: int) -> Batch:
    """Sound with a class and a text."""
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(size.samples, 400, generator=generator),
        "targets": torch.randint(0, 10, (size.samples,), generator=generator),
        "labels": torch.randint(1, size.vocab, (size.samples, 5), generator=generator),
    }


def make_captioned(size: Size, step: int) -> Batch:
    """Images with texts."""
    return make_images(size, step) | {"ids": make_tokens(size, step)["ids"]}


def call_decoder(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch["ids"], use_cache=False).logits
    return logits


def call_speech(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(
        input_features=batch["mel"], decoder_input_ids=batch["ids"], use_cache=False
    ).logits
    return logits


def call_waves(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_values=batch["x"]).logits
    return logits


def call_captioned(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch["ids"], pixel_values=batch["x"]).logits_per_text
    return logits


def call_plain(model: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = model(batch["x"] if "x" in batch else batch["ids"])
    return output


def call_noised(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Noise of a strength drawn per sample, as diffusion models are trained."""
    x = batch["x"]
    strength, noise = torch.rand(len(x), dtype=x.dtype), torch.randn_like(x)
    mixed = (1 - strength[:, None, None, None]) * x + strength[:, None, None, None] * noise
    return model(mixed, 100 * strength), noise


def classify_one(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["targets"])


def contrast(logits: Tensor, batch: Batch) -> Tensor:
    """Each text with its image against the others of the microbatch."""
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def align(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Connectionist temporal classification."""
    lengths = torch.full((len(logits),), logits.shape[1]), torch.full((len(logits),), 5)
    losses = F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), batch["labels"], *lengths, reduction="sum")
    return losses, len(logits)


def restore(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    return F.mse_loss(*output)


def _hf(model: str, config: str, settings: dict[str, Any], *rest: Any) -> Foreign:
    return Foreign(partial(build, model, f"{config}Config", settings), *rest)


_IMAGES = (make_images, call_plain, classify_one)
_TEXT = (make_tokens, call_plain, classify)

ZOO: dict[str, Foreign] = {
    **{name: model for name, model in MODELS.items() if "own loss" not in name},
    **{
        name: _hf(f"{kind}ForCausalLM", kind, settings, make_tokens, call_decoder, classify)
        for name, (kind, settings) in _DECODERS.items()
    },
    "Gemma 3": _hf(
        "Gemma3ForCausalLM",
        "Gemma3Text",
        {**_HEADS_OF_8, "sliding_window": 4},
        *(make_tokens, call_decoder, classify),
    ),
    "Llama 4": _hf(
        "Llama4ForCausalLM",
        "Llama4Text",
        {**_HEADS_OF_8, "intermediate_size": 32, "intermediate_size_mlp": _WIDE, "num_local_experts": 4},
        *(make_tokens, call_decoder, classify),
    ),
    **{
        name: _hf(f"{kind}ForMaskedLM", kind, settings, make_padded, call_padded, classify)
        for name, (kind, settings) in _ENCODERS.items()
    },
    "XLNet": Foreign(build_xlnet, make_padded, call_padded, classify),
    "BART": _hf(
        "BartForConditionalGeneration",
        "Bart",
        {**_PAIR, "max_position_embeddings": 32},
        *(make_pairs, call_pairs, classify),
    ),
    "BART, layers dropped": _hf(
        "BartForConditionalGeneration",
        "Bart",
        {**_PAIR, "max_position_embeddings": 32, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5},
        *(make_pairs, call_pairs, classify),
    ),
    "Whisper": _hf(
        "WhisperForConditionalGeneration",
        "Whisper",
        {
            **_PAIR,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        *(make_speech, call_speech, classify),
    ),
    "CLIP": Foreign(build_clip, make_captioned, call_captioned, contrast),
    "Swin": _hf(
        "SwinForImageClassification",
        "Swin",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 10,
            "hidden_dropout_prob": DROPOUT,
            "drop_path_rate": DROPOUT,
        },
        *(make_larger_images, call_images, classify_one),
    ),
    "ConvNeXt": _hf(
        "ConvNextForImageClassification",
        "ConvNext",
        {
            "hidden_sizes": [8, 16, 32, 64],
            "depths": [1, 1, 2, 1],
            "num_labels": 10,
            "drop_path_rate": DROPOUT,
        },
        *(make_larger_images, call_images, classify_one),
    ),
    "ResNet": _hf(
        "ResNetForImageClassification",
        "ResNet",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
            "num_labels": 10,
        },
        *(make_images, call_images, classify_one),
    ),
    "wav2vec 2.0, layers dropped": _hf(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2",
        {**_WAVES, "mask_time_prob": 0.2, "mask_time_length": 2, "layerdrop": 0.1},
        *(make_waves, call_waves, classify_one),
    ),
    "wav2vec 2.0, CTC": _hf(
        "Wav2Vec2ForCTC",
        "Wav2Vec2",
        {**_WAVES, "apply_spec_augment": False, "layerdrop": 0.0, "ctc_zero_infinity": True},
        *(make_waves, call_waves, align),
    ),
    "nanoGPT": Foreign(own_models.NanoGPT, *_TEXT),
    "nanoGPT, attention by hand": Foreign(partial(own_models.NanoGPT, flash=False), *_TEXT),
    "LSTM": Foreign(own_models.RecurrentModel, *_TEXT),
    "GRU cell": Foreign(own_models.CellModel, *_TEXT),
    "mixture of experts": Foreign(own_models.Mixture, *_TEXT),
    "attention by einsum": Foreign(own_models.EinsumModel, *_TEXT),
    "a block three times": Foreign(own_models.Universal, *_TEXT),
    "diffusion U-Net": Foreign(own_models.Diffusion, make_images, call_noised, restore),
    "EfficientNet": Foreign(own_models.Efficient, *_IMAGES),
    "MLP-Mixer of ModuleDicts": Foreign(own_models.Mixer, *_IMAGES),
    "weight and spectral norm": Foreign(own_models.Normed, *_IMAGES),
    "VQ, codebook by averages": Foreign(own_models.Quantised, *_IMAGES),
}
assert IGNORED == -100, "the ignore_index that F.cross_entropy has by default"
