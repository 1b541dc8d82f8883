"""The families by name, each with batches, a call, a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.foreign_models.families import others, text, unseen
from benchmarks.foreign_models.models import Batch

SAMPLES = 8
Named = list[tuple[str, nn.Parameter]]


def build_adamw(named: Named) -> torch.optim.Optimizer:
    """Return an AdamW whose epsilon is far above rounding, which else moves weights without a gradient."""
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-2, eps=1e-3)


def build_sgd(named: Named) -> torch.optim.Optimizer:
    """Return a plain SGD, which takes sparse gradients."""
    return torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.1)


@dataclass(frozen=True)
class Family:
    """A model and what it is trained on.

    Attributes:
        build: makes the model.
        make_batch: from a generator to a global batch of `SAMPLES`; floating-point tensors are fp64.
        loss: from output and batch to (sum of losses, weight).
        forward: from model and batch to the output.
        optimizer: from named parameters.
        clip_norm: 0 for none.
    """

    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Batch], tuple[Tensor, int]]
    forward: Callable[[nn.Module, Batch], Any]
    optimizer: Callable[[Named], torch.optim.Optimizer] = build_adamw
    clip_norm: float = 1.0


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)


def _tokens(generator: torch.Generator, high: int = text.VOCAB, length: int = text.LENGTH) -> Tensor:
    return torch.randint(0, high, (SAMPLES, length), generator=generator)


def make_text(generator: torch.Generator) -> Batch:
    return {"ids": _tokens(generator), "labels": _tokens(generator)}


def make_frames(generator: torch.Generator) -> Batch:
    labels = torch.randint(1, text.VOCAB, (SAMPLES, 3), generator=generator)
    return {"frames": _normal(generator, 16, 8), "labels": labels}


def make_waves(generator: torch.Generator) -> Batch:
    return {"waves": _normal(generator, 46), "noise": _normal(generator, 10, 8)}


def make_images(generator: torch.Generator) -> Batch:
    classes = torch.randint(0, 10, (SAMPLES,), generator=generator)
    return {"x": _normal(generator, 3, 8, 8), "y": _normal(generator, 3, 8, 8), "labels": classes} | {
        "z": _normal(generator, 3, 8, 8),
        "noise": _normal(generator, 8),
    }


def make_patches(generator: torch.Generator) -> Batch:
    classes = torch.randint(0, 10, (SAMPLES,), generator=generator)
    times = torch.rand(SAMPLES, generator=generator, dtype=torch.float64)
    return {"x": _normal(generator, 8, 4), "t": times, "noise": _normal(generator, 8, 4), "labels": classes}


def make_vectors(generator: torch.Generator) -> Batch:
    classes = torch.randint(0, 10, (SAMPLES,), generator=generator)
    return {"x": _normal(generator, 8), "wide": _normal(generator, 6, 12), "labels": classes} | {
        "values": _normal(generator),
        "volume": _normal(generator, 1, 4, 4, 4),
        "points": _normal(generator, 5, 3),
        "colours": _normal(generator, 3),
        "line": _normal(generator, 16),
    }


def make_sets(generator: torch.Generator) -> Batch:
    counts = torch.randint(1, 7, (SAMPLES,), generator=generator)
    edges = torch.randint(0, 6, (SAMPLES, 9, 2), generator=generator)
    return {"x": _normal(generator, 6, 4), "counts": counts, "edges": edges, "values": _normal(generator)}


def make_clicks(generator: torch.Generator) -> Batch:
    ids = torch.randint(0, 40, (SAMPLES, 3, 2), generator=generator)
    return {"dense": _normal(generator, 4), "ids": ids, "values": _normal(generator)}


def call(*names: str) -> Callable[[nn.Module, Batch], Any]:
    """Return a forward that passes these parts of a batch on by position."""
    return partial(_call, names)


def _call(names: tuple[str, ...], model: nn.Module, batch: Batch) -> Any:
    return model(*(batch[name] for name in names))


def score_tokens(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    labels = batch["labels"]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum"), labels.numel()


def score_words(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(logits, batch["labels"][:, 0], reduction="sum"), len(logits)


def align(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Connectionist temporal classification."""
    count = len(logits)
    lengths = torch.full((count,), logits.shape[1]), torch.full((count,), 3)
    return F.ctc_loss(logits.transpose(0, 1), batch["labels"], *lengths, reduction="sum"), count


def pick_frames(output: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, int]:
    """Each masked frame among all frames, and a penalty for codes that are never used."""
    scores, use = output
    targets = torch.arange(scores.shape[1]).expand(len(scores), -1)
    picked = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
    return picked + len(scores) * (use * (use + 1e-7).log()).sum(), len(scores)


def contrast(scores: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)


def classify(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


def restore(key: str, output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return (output - batch[key]).square().flatten(1).mean(1).sum(), len(output)


def regress(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return (output - batch["values"]).square().sum(), len(output)


def score_density(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return output.sum(), len(output)


def detect(output: dict[str, Tensor], batch: Batch) -> tuple[Tensor, int]:
    """Classes of all places, and boxes of those that have an object."""
    labels = (batch["labels"][:, None] + torch.arange(output["classes"].shape[-1])) % 3
    classes = F.cross_entropy(output["classes"], labels, reduction="sum")
    boxes = F.smooth_l1_loss(output["boxes"], torch.zeros_like(output["boxes"]), reduction="none").sum(1)
    return classes + boxes[labels > 0].sum(), labels.numel()


def bound(output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> tuple[Tensor, int]:
    """The evidence's lower bound."""
    x, mean, log_variance = output
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return (x - batch["x"]).square().sum() + divergence, len(x)


def quantise(output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> tuple[Tensor, int]:
    x, z, nearest = output
    codes = (z.detach() - nearest).square().sum() + 0.25 * (z - nearest.detach()).square().sum()
    return (x - batch["x"]).square().sum() + codes, len(x)


def regress_turned(output: Batch, batch: Batch) -> tuple[Tensor, int]:
    """A regression, and a penalty for turns that are not orthogonal."""
    turn = output["turn"]
    gap = turn @ turn.transpose(1, 2) - torch.eye(4, dtype=turn.dtype)
    return (output["value"] - batch["values"]).square().sum() + 0.1 * gap.square().sum(), len(turn)


def score_found(output: unseen.Found, batch: Batch) -> tuple[Tensor, int]:
    """Cross-entropy of an object's logits, and the size of what hooks have collected."""
    loss, count = score_tokens(output.logits, batch)
    return loss + 0.1 * sum(tap.square().mean((1, 2)).sum() for tap in output.taps), count


def penalise(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits, and a penalty of the weights and of their distance to a table of old ones."""
    penalty = sum(p.square().sum() for p in model.parameters())
    return model(batch["ids"]), penalty + (model.head.weight - 0.1).abs().sum()


def score_penalised(output: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, int]:
    loss, count = score_tokens(output[0], batch)
    return loss + 0.01 * output[1] * count, count


_TEXT = (make_text, score_tokens, call("ids"))
_PAIR = (make_text, score_tokens, call("ids", "labels"))
_IMAGES = (make_images, classify, call("x"))


def _decoder(*parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return partial(_build_decoder, parts)


def _build_decoder(parts: tuple[Callable[[], nn.Module], ...]) -> nn.Module:
    mixer, feed = parts
    return text.Decoder([text.Layer(mixer(), feed()) for _ in range(2)])


def _build_kan() -> nn.Module:
    return nn.Sequential(others.KanLayer(8, 8), others.KanLayer(8, 8), others.KanLayer(8, 10))


FAMILIES: dict[str, Family] = {
    "GRU seq2seq, attention": Family(text.Seq2Seq, *_PAIR),
    "LSTM layers": Family(text.StackedLstm, *_TEXT),
    "minGRU": Family(_decoder(text.MinGru, text.FeedForward), *_TEXT),
    "Mamba by hand": Family(_decoder(text.SelectiveScan, text.FeedForward), *_TEXT),
    "RetNet": Family(_decoder(text.Retention, text.FeedForward), *_TEXT),
    "TCN": Family(text.Temporal, *_TEXT),
    "Conformer, CTC": Family(text.SpeechModel, make_frames, align, call("frames")),
    "wav2vec by hand": Family(text.WaveModel, make_waves, pick_frames, call("waves", "noise")),
    "two towers": Family(text.TwoTowers, make_text, contrast, call("ids", "labels")),
    "memory network": Family(text.MemoryNetwork, make_text, score_words, call("ids", "labels")),
    "prompt tuning": Family(text.Prompted, *_TEXT),
    "LoRA, merged": Family(text.build_lora, *_TEXT),
    "early exit": Family(text.EarlyExit, *_TEXT),
    "Mixtral, index_add_": Family(_decoder(text.CausalAttention, text.IndexedMixture), *_TEXT),
    "Switch, capacity": Family(_decoder(text.CausalAttention, text.SwitchMixture), *_TEXT),
    "experts by einsum": Family(_decoder(text.CausalAttention, text.DispatchMixture), *_TEXT),
    "shared expert": Family(_decoder(text.CausalAttention, text.SharedMixture), *_TEXT),
    "hybrid (Jamba)": Family(text.build_hybrid, *_TEXT),
    "DiT": Family(others.Dit, make_patches, partial(restore, "noise"), call("x", "t")),
    "Perceiver": Family(others.Perceiver, make_patches, classify, call("x")),
    "ResNet by attributes": Family(others.ImageClassifier, *_IMAGES),
    "detector, pyramid": Family(others.Detector, make_images, detect, call("x")),
    "DenseNet, Sequential": Family(others.DenseNet, *_IMAGES),
    "MobileNet": Family(others.MobileNet, *_IMAGES),
    "U-Net 3D": Family(others.Volume, make_vectors, partial(restore, "volume"), call("volume")),
    "VAE": Family(others.Vae, make_images, bound, call("x", "noise")),
    "VQ-VAE": Family(others.VqVae, make_images, quantise, call("x")),
    "capsules": Family(others.Capsules, *_IMAGES),
    "RevNet": Family(others.RevNet, make_vectors, classify, call("wide")),
    "flow (RealNVP)": Family(others.Flow, make_vectors, score_density, call("x")),
    "NeRF": Family(others.Nerf, make_vectors, partial(restore, "colours"), call("points")),
    "hypernetwork": Family(others.HyperNet, make_vectors, classify, call("wide")),
    "Fourier operator": Family(others.FourierOperator, make_vectors, partial(restore, "line"), call("line")),
    "KAN": Family(_build_kan, make_vectors, classify, call("x")),
    "DeepSets": Family(others.DeepSets, make_sets, regress, call("x", "counts")),
    "graph attention": Family(others.GraphNetwork, make_sets, regress, call("x", "edges")),
    "Siamese, triplets": Family(others.Siamese, make_images, score_density, call("x", "y", "z")),
    "neural ODE": Family(others.NeuralOde, make_vectors, regress, call("x")),
    "DLRM, sparse tables": Family(
        others.Recommender, make_clicks, regress, call("dense", "ids"), build_sgd, 0.0
    ),
    "ConvLSTM": Family(unseen.ConvLstm, *_IMAGES),
    "S4D": Family(_decoder(unseen.DiagonalScan, text.FeedForward), *_TEXT),
    "experts choose": Family(_decoder(text.CausalAttention, unseen.ChoosingExperts), *_TEXT),
    "PaLM block, ALiBi": Family(lambda: text.Decoder([unseen.ParallelBlock() for _ in range(2)]), *_TEXT),
    "rotary, complex": Family(_decoder(unseen.RotatingAttention, text.FeedForward), *_TEXT),
    "PointNet, penalty": Family(unseen.PointNet, make_sets, regress_turned, call("x", "counts")),
    "equilibrium": Family(unseen.Equilibrium, make_vectors, regress, call("x")),
    "universal": Family(lambda: unseen.Universal(text.CausalAttention()), *_TEXT),
    "prefix tuning": Family(_decoder(unseen.PrefixAttention, text.FeedForward), *_TEXT),
    "mixture of depths": Family(
        lambda: text.Decoder([unseen.DepthByToken(text.CausalAttention()) for _ in range(2)]), *_TEXT
    ),
    "Flamingo gates": Family(
        lambda: unseen.GatedCross(text.CausalAttention()), make_images, classify, call("x", "labels")
    ),
    "own result, hooks": Family(
        lambda: unseen.Tapped([text.Layer(text.CausalAttention(), text.FeedForward()) for _ in range(2)]),
        make_text,
        score_found,
        call("ids"),
    ),
    "penalty of weights": Family(
        _decoder(text.CausalAttention, text.FeedForward), make_text, score_penalised, penalise
    ),
    "FT-Transformer": Family(unseen.FeatureTokens, make_vectors, classify, call("x")),
}
