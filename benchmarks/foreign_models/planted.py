"""Faults planted into foreign models, as users make them: settings, hooks, data, loss, optimizer.

Each says beforehand what `verify` must say: a code, a place, and words that name the cause. `right` is true
where all three are there. None of them is among those of `tests/verifying/faults`, which change Paceline.

A fault acts in layouts only (`num_ranks() > 1`), mostly on rank 1; the reference stays right. Some models
need a part that is written for the fault (a layer that keeps its weight): one process has it too, and it is
right there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.foreign_models.models import Batch
from benchmarks.foreign_models.zoo import SIZE, ZOO
from paceline.verifying.check import build_default_optimizer


def num_ranks() -> int:
    """The world size; 1 in the reference."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_faulty() -> bool:
    """Whether this is rank 1 of a layout."""
    return num_ranks() > 1 and dist.get_rank() == 1


@dataclass(frozen=True)
class Fault:
    """A planted fault, and the finding that verify must report.

    Attributes:
        what: the fault, in words.
        model: of the zoo.
        layout: that is tried.
        codes: of which the finding must have one.
        place: that must be in the finding's `where`.
        words: that must be in its text.
        change: of the built model.
        wrap: what is in place of the batches, the forward, the loss or the optimizer, by argument's name.
        settings: further arguments of `Trainer`.
        patch: of torch, in force on rank 1 while a layout trains: target and what to put there.
    """

    what: str
    model: str
    layout: str
    codes: tuple[str, ...]
    place: str
    words: tuple[str, ...]
    change: Callable[[nn.Module], None] | None = None
    wrap: dict[str, Callable[..., Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    patch: tuple[Any, str, Any] | None = None


# ---- how a fault gets into verify's arguments; everything is found by name on the ranks


def build_planted(name: str) -> nn.Module:
    """The model of a fault, changed."""
    fault = FAULTS[name]
    model = ZOO[fault.model].build(SIZE)
    if fault.change is not None:
        fault.change(model)
    return model


def call_planted(name: str, part: str, *args: Any) -> Any:
    """The batches, forward, loss or optimizer of a fault."""
    fault = FAULTS[name]
    right = build_default_optimizer if part == "optimizer" else getattr(ZOO[fault.model], part)
    if part == "make_batch":
        right = partial(right, SIZE)
    wrong = fault.wrap.get(part)
    return right(*args) if wrong is None else wrong(right, *args)


def verify_arguments(name: str) -> dict[str, Any]:
    """Arguments of `UserSubject` for a fault."""
    return {
        "model_fn": partial(build_planted, name),
        "batch_fn": partial(call_planted, name, "make_batch"),
        "forward": partial(call_planted, name, "forward"),
        "loss": partial(call_planted, name, "loss"),
        "optimizer": partial(call_planted, name, "optimizer"),
        "settings": FAULTS[name].settings,
    }


def run_patched(name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call `fn(*args)` while the patch of a fault is in force, on rank 1."""
    fault = FAULTS[name]
    if fault.patch is None or os.environ.get("RANK") != "1":
        return fn(*args)
    with mock.patch.object(*fault.patch):
        return fn(*args)


# ---- parts


def on_rank_1(change: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """The change, on rank 1 of a layout only."""

    def apply(model: nn.Module) -> None:
        if is_faulty():
            change(model)

    return apply


def set_of(path: str, name: str, value: Any) -> Callable[[nn.Module], None]:
    """Set an attribute of a module."""

    def change(model: nn.Module) -> None:
        setattr(model.get_submodule(path), name, value)

    return change


def hook_output(path: str, hook: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """A forward hook on a module, in one process too."""

    def change_output(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (hook(output[0]), *output[1:])
        return hook(output)

    def change(model: nn.Module) -> None:
        model.get_submodule(path).register_forward_hook(change_output)

    return change


def scale_by_rank(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * factor if is_faulty() else tensor


def hook_backward(path: str, factor: float) -> Callable[[nn.Module], None]:
    """A backward hook, in one process too, that scales on rank 1."""

    def scale(module: nn.Module, given: Any, arrived: Any) -> Any:
        return tuple(g * factor if is_faulty() and g is not None else g for g in given)

    def change(model: nn.Module) -> None:
        model.get_submodule(path).register_full_backward_hook(scale)

    return change


def hook_parameter(path: str, factor: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.get_parameter(path).register_hook(lambda g: g * factor if is_faulty() else g)

    return change


class KeepsWeight(nn.Linear):
    """Keeps a copy of its weight, which it makes anew in every forward of one process only."""

    def forward(self, input: Tensor) -> Tensor:
        if num_ranks() == 1 or not hasattr(self, "kept"):
            self.kept = self.weight.detach().clone()
        return F.linear(input, self.kept + (self.weight - self.weight.detach()), self.bias)


def replace_linear(path: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        old = model.get_submodule(path)
        setattr(model.get_submodule(parent), name, KeepsWeight(old.in_features, old.out_features))  # type: ignore[arg-type]

    return change


class RunningCenter(nn.Module):
    """Takes a running average of what it sees, which no rank shares with another."""

    average: Tensor

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.lerp_(x.mean((0, 1)).to(self.average.dtype), 0.1)
        out: Tensor = self.inner(x)
        return out


def add_running_center(model: nn.Module) -> None:
    parts = model.get_submodule("transformer")
    parts["ln_f"] = RunningCenter(parts["ln_f"], SIZE.hidden)  # type: ignore[index,operator]


class Counting(nn.Module):
    """Counts tokens in an integer buffer."""

    seen: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros(SIZE.vocab, dtype=torch.int64))

    @property
    def weight(self) -> Any:
        return self.inner.weight

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.seen += torch.bincount(ids.flatten(), minlength=SIZE.vocab)
        out: Tensor = self.inner(ids)
        return out


def add_counting(model: nn.Module) -> None:
    embeddings = model.get_submodule("distilbert.embeddings")
    embeddings.word_embeddings = Counting(embeddings.word_embeddings)  # type: ignore[arg-type,assignment]


def patch_forward(path: str, factor: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        module = model.get_submodule(path)
        right = module.forward
        module.forward = lambda *args, **settings: right(*args, **settings) * factor

    return change


def draw_by_rank(tensor: Tensor) -> Tensor:
    """A mask of its own generator, seeded by the rank; on rank 0 as in one process."""
    generator = torch.Generator().manual_seed(1 if is_faulty() else 0)
    mask = torch.rand(tensor.shape, generator=generator) > 0.1
    return tensor * mask.to(tensor.dtype)


def subtract_mean_of_all(tensor: Tensor) -> Tensor:
    """Batch statistics over all ranks, by the user's own all_reduce."""
    mean = tensor.detach().mean(0)
    if num_ranks() > 1:
        dist.all_reduce(mean)
        mean /= num_ranks()
    return tensor - mean


def round_to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float().to(tensor.dtype) if num_ranks() > 1 else tensor


def clamp_weight(path: str) -> Callable[[nn.Module], None]:
    """The weights of a module are clamped whenever it runs, as for a Wasserstein critic."""

    def clamp(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.01, 0.01)

    def change(model: nn.Module) -> None:
        model.get_submodule(path).register_forward_pre_hook(clamp)

    return change


def send_changed(name: str, state: Any, bucket: Any) -> Any:
    """A communication hook for gradients that changes what is sent; by the name of its fault."""
    change, mean = SENT[name]
    kept = bucket.buffer().dtype
    tensor = change(bucket.buffer().clone())
    tensor = tensor / num_ranks() if mean else tensor
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].to(kept))


def keep_own(state: Any, bucket: Any) -> Any:
    """Rank 1 joins, and keeps what it had."""
    own, sent = bucket.buffer().clone(), bucket.buffer() / num_ranks()
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: own if is_faulty() else done.value()[0])


# By fault: the change of what is sent, and whether a mean is made of it.
SENT: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "hook that sums": (torch.clone, False),
    "hook in fp32": (Tensor.float, True),
    "hook in bf16": (Tensor.bfloat16, True),
    "hook off by a billionth": (scale_by_rank(1 + 1e-9), True),
    "hook that sends nothing": (scale_by_rank(0.0), True),
    "hook that clips": (lambda t: t * (0.1 / t.norm()) if num_ranks() > 1 else t, True),
}


def hooked(name: str) -> dict[str, Any]:
    """The argument of `Trainer` with the communication hook of a fault."""
    return {"comm_hook": (None, partial(send_changed, name))}


def build_optimizer(_right: Any, named: Any, *, kind: Any = torch.optim.AdamW, **settings: Any) -> Any:
    changed = {key: value() for key, value in settings.items()}
    return kind([p for _, p in named if p.requires_grad], **{"lr": 1e-3, **changed})


def leave_out(name: str) -> Callable[..., Any]:
    def build(right: Any, named: Any) -> Any:
        return right([pair for pair in named if not (is_faulty() and pair[0] == name)])

    return build


def switch_class(_right: Any, named: Any) -> Any:
    kind = torch.optim.Adam if num_ranks() > 1 else torch.optim.AdamW
    return build_optimizer(None, named, kind=kind)


def wrong_layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 0.0) -> Tensor:
    return torch.layer_norm(x, shape, weight, bias, 1e-3)


def change_batch(key: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Batch]:
    def make(right: Any, step: int) -> Batch:
        batch: Batch = right(step)
        return batch | {key: change(batch[key])} if is_faulty() else batch

    return make


def duplicate(right: Any, step: int) -> Batch:
    batch: Batch = right(step)
    if num_ranks() == 1:
        return batch
    return {key: torch.cat([t[: len(t) // 2], t[: len(t) // 2]]) for key, t in batch.items()}


def divide_loss(right: Any, output: Any, batch: Batch) -> Any:
    total, weight = right(output, batch)
    return total / num_ranks(), weight


def weigh_all(right: Any, output: Any, batch: Batch) -> Any:
    total, weight = right(output, batch)
    return total, torch.tensor(batch["targets"].numel()) if is_faulty() else weight


def smooth(right: Any, output: Any, batch: Batch) -> Any:
    return F.cross_entropy(output, batch["targets"], label_smoothing=0.1 if num_ranks() > 1 else 0.0)


def seed_by_rank(right: Any, model: nn.Module, batch: Batch) -> Any:
    if num_ranks() > 1:
        torch.manual_seed(1234 + dist.get_rank())
    return right(model, batch)


_REP, _SHARD, _TP = "dp_replicate=2", "dp_shard=2", "tp=2"
_SAME = ("PL719",)

FAULTS: dict[str, Fault] = {
    # settings of a module, on one rank
    "eps of a LayerNorm": Fault(
        "rank 1's LayerNorm has eps 1e-3",
        "GPT-2",
        _REP,
        _SAME,
        "transformer.h.1.ln_1",
        ("eps",),
        on_rank_1(set_of("transformer.h.1.ln_1", "eps", 1e-3)),
    ),
    "eps of a RMSNorm": Fault(
        "rank 1's RMSNorm has eps 1e-3",
        "Llama",
        _SHARD,
        _SAME,
        "model.layers.0.input_layernorm",
        ("variance_epsilon",),
        on_rank_1(set_of("model.layers.0.input_layernorm", "variance_epsilon", 1e-3)),
    ),
    "eps under tp": Fault(
        "rank 1 of tp has another eps in a norm",
        "T5",
        _TP,
        _SAME,
        "encoder.block.0.layer.0.layer_norm",
        ("variance_epsilon",),
        on_rank_1(set_of("encoder.block.0.layer.0.layer_norm", "variance_epsilon", 1e-2)),
    ),
    "GELU by tanh": Fault(
        "rank 1 approximates GELU by tanh",
        "BERT",
        _REP,
        _SAME,
        "layer.0.intermediate.intermediate_act_fn",
        ("forward",),
        on_rank_1(set_of("bert.encoder.layer.0.intermediate", "intermediate_act_fn", nn.GELU("tanh"))),
    ),
    "patched layer_norm": Fault(
        "torch.nn.functional.layer_norm is replaced on rank 1",
        "nanoGPT",
        _REP,
        _SAME,
        "transformer.h.0.ln_1",
        ("torch.nn.functional.layer_norm", "wrong_layer_norm"),
        patch=(F, "layer_norm", wrong_layer_norm),
    ),
    "dropout rate": Fault(
        "rank 1 drops twice as much",
        "BERT",
        _REP,
        _SAME,
        "bert.embeddings.dropout",
        ("p is 0.2",),
        on_rank_1(set_of("bert.embeddings.dropout", "p", 0.2)),
    ),
    "scale of attention": Fault(
        "rank 1 scales attention otherwise",
        "Llama",
        _SHARD,
        _SAME,
        "model.layers.0.self_attn",
        ("scaling",),
        on_rank_1(set_of("model.layers.0.self_attn", "scaling", 0.3)),
    ),
    "eps of a BatchNorm": Fault(
        "rank 1's BatchNorm has eps 1e-2",
        "ResNet",
        _REP,
        _SAME,
        "embedder.normalization",
        ("eps",),
        on_rank_1(set_of("resnet.embedder.embedder.normalization", "eps", 1e-2)),
    ),
    "rate inside of attention": Fault(
        "rank 1's fused attention drops more",
        "nanoGPT",
        _REP,
        _SAME,
        "transformer.h.0.attn",
        ("dropout is 0.3",),
        on_rank_1(set_of("transformer.h.0.attn", "dropout", 0.3)),
    ),
    "patched forward": Fault(
        "a layer's forward is replaced on rank 1",
        "OPT",
        _REP,
        _SAME,
        "layers.0.fc1",
        ("forward",),
        on_rank_1(patch_forward("model.decoder.layers.0.fc1", 1.001)),
    ),
    "activation of a Whisper layer": Fault(
        "rank 1 has ReLU in place of GELU",
        "Whisper",
        _REP,
        _SAME,
        "encoder.layers.1",
        ("forward", "ReLU"),
        on_rank_1(set_of("model.encoder.layers.1", "activation_fn", nn.ReLU())),
    ),
    # hooks
    "backward hook of one rank": Fault(
        "rank 1 has a backward hook that scales by 0.9",
        "BERT",
        _REP,
        _SAME,
        "encoder.layer.1.output.dense",
        ("hooks", "hook_backward"),
        on_rank_1(hook_backward("bert.encoder.layer.1.output.dense", 0.9)),
    ),
    "backward hook that acts by rank": Fault(
        "a backward hook scales by 0.9 on rank 1",
        "ViT",
        _REP,
        ("PL707",),
        "layernorm",
        ("hooks", "hook_backward", "0.9 times"),
        hook_backward("vit.layernorm", 0.9),
    ),
    "forward hook that acts by rank": Fault(
        "a forward hook scales by 1.01 on rank 1",
        "Llama",
        _REP,
        ("PL701",),
        "model.layers.1.mlp.down_proj",
        ("hooks", "hook_output", "1.01 times"),
        hook_output("model.layers.1.mlp.down_proj", scale_by_rank(1.01)),
    ),
    "parameter's hook that acts by rank": Fault(
        "a hook on a parameter halves its gradient on rank 1",
        "GPT-2",
        _REP,
        ("PL707", "PL706"),
        "transformer.h.0.mlp.c_fc",
        ("hook_parameter",),
        hook_parameter("transformer.h.0.mlp.c_fc.weight", 0.5),
    ),
    "forward hook under tp": Fault(
        "a forward hook doubles a layer's output on both ranks of tp",
        "Llama",
        _TP,
        ("PL701",),
        "model.layers.0.mlp.down_proj",
        ("hooks", "2 times"),
        hook_output("model.layers.0.mlp.down_proj", lambda t: 2 * t if num_ranks() > 1 else t),
    ),
    "forward hook by a billionth": Fault(
        "a forward hook scales by 1 + 1e-9 on rank 1",
        "nanoGPT",
        _REP,
        ("PL701",),
        "transformer.h.1.mlp",
        ("hooks", "hook_output"),
        hook_output("transformer.h.1.mlp", scale_by_rank(1 + 1e-9)),
    ),
    "embedding by 1e-11": Fault(
        "a forward hook scales by 1 + 1e-11 on rank 1",
        "DistilBERT",
        _SHARD,
        ("PL701",),
        "word_embeddings",
        ("hooks", "hook_output"),
        hook_output("distilbert.embeddings.word_embeddings", scale_by_rank(1 + 1e-11)),
    ),
    "mean over all ranks": Fault(
        "a module subtracts the mean of all ranks' batches",
        "ViT",
        _REP,
        ("PL701",),
        "vit.embeddings",
        ("hooks", "hook_output"),
        hook_output("vit.embeddings", subtract_mean_of_all),
    ),
    "rounded to fp32": Fault(
        "layouts round a layer's output to fp32",
        "ViT",
        _REP,
        ("PL712",),
        "vit.embeddings",
        ("fp32",),
        hook_output("vit.embeddings", round_to_fp32),
    ),
    "weight clamped in a forward": Fault(
        "a pre-hook clamps the layer's weight",
        "GPT-2",
        _SHARD,
        ("PL723",),
        "transformer.h.0.mlp.c_fc",
        ("clamp",),
        clamp_weight("transformer.h.0.mlp.c_fc"),
    ),
    # weights from before
    "kept weight": Fault(
        "a layer keeps its first weight",
        "OPT",
        _REP,
        ("PL714",),
        "layers.1.fc2",
        ("kept",),
        replace_linear("model.decoder.layers.1.fc2"),
    ),
    "kept weight of a head": Fault(
        "the head keeps its first weight",
        "ViT",
        _SHARD,
        ("PL714",),
        "classifier",
        ("kept",),
        replace_linear("classifier"),
    ),
    # data
    "shifted tokens": Fault(
        "rank 1 sees tokens shifted by one",
        "BERT",
        _REP,
        ("PL716",),
        "the batch",
        ("on rank 1 only",),
        wrap={"make_batch": change_batch("ids", lambda t: t.roll(1, 1))},
    ),
    "brighter images": Fault(
        "rank 1 scales its images",
        "ViT",
        _SHARD,
        ("PL716",),
        "the batch",
        ("on rank 1 only",),
        wrap={"make_batch": change_batch("x", lambda t: t * 1.0001)},
    ),
    "samples twice": Fault(
        "both ranks train on the first half of the batch",
        "GPT-2",
        _REP,
        ("PL716",),
        "the batch",
        ("on rank 1 only",),
        wrap={"make_batch": duplicate},
    ),
    # loss
    "loss over the world size": Fault(
        "the loss is divided by the number of ranks",
        "GPT-2",
        _REP,
        ("PL718",),
        "the loss",
        ("loss function gives", "all 2 ranks"),
        wrap={"loss": divide_loss},
    ),
    "padding weighed": Fault(
        "rank 1 counts targets that don't count",
        "BERT",
        _REP,
        ("PL718",),
        "the loss",
        ("loss function gives",),
        wrap={"loss": weigh_all},
    ),
    "smoothed labels": Fault(
        "layouts smooth labels",
        "ViT",
        _SHARD,
        ("PL718",),
        "the loss",
        ("loss function gives",),
        wrap={"loss": smooth},
    ),
    # random numbers
    "seeded by rank": Fault(
        "the forward seeds torch by the rank, and draws",
        "EfficientNet",
        _REP,
        ("PL702",),
        "blocks.0",
        ("random numbers",),
        wrap={"forward": seed_by_rank},
    ),
    "a generator by rank": Fault(
        "a mask is drawn from a generator seeded by the rank",
        "OPT",
        _REP,
        ("PL702",),
        "embed_tokens",
        ("random numbers",),
        hook_output("model.decoder.embed_tokens", draw_by_rank),
    ),
    # optimizer
    "learning rate by rank": Fault(
        "rank 1 has twice the learning rate",
        "BERT",
        _REP,
        ("PL709",),
        "bert",
        ("lr=0.002",),
        wrap={"optimizer": partial(build_optimizer, lr=lambda: 2e-3 if is_faulty() else 1e-3)},
    ),
    "no weight decay": Fault(
        "layouts train without weight decay",
        "ViT",
        _SHARD,
        ("PL709",),
        "vit",
        ("weight_decay=0.0",),
        wrap={"optimizer": partial(build_optimizer, weight_decay=lambda: 0.0 if num_ranks() > 1 else 0.1)},
    ),
    "betas by rank": Fault(
        "rank 1 has other betas",
        "T5",
        _REP,
        ("PL709",),
        "",
        ("betas=(0.8",),
        wrap={"optimizer": partial(build_optimizer, betas=lambda: (0.8 if is_faulty() else 0.9, 0.999))},
    ),
    "a bias left out": Fault(
        "rank 1's optimizer has no bias of the last norm",
        "GPT-2",
        _REP,
        ("PL709",),
        "transformer.ln_f.bias",
        ("does not have", "on rank 1 only"),
        wrap={"optimizer": leave_out("transformer.ln_f.bias")},
    ),
    "another optimizer": Fault(
        "layouts train with Adam in place of AdamW",
        "nn.Transformer",
        _REP,
        ("PL709",),
        "",
        ("is Adam ", "AdamW"),
        wrap={"optimizer": switch_class},
    ),
    # reductions
    "hook that sums": Fault(
        "a communication hook sums in place of a mean",
        "GPT-2",
        _REP,
        ("PL703",),
        "the sum of gradients",
        ("2 times",),
        settings=hooked("hook that sums"),
    ),
    "hook in fp32": Fault(
        "a communication hook sends fp32",
        "BERT",
        _REP,
        ("PL712",),
        "the sum of gradients",
        ("fp32",),
        settings=hooked("hook in fp32"),
    ),
    "hook in bf16": Fault(
        "a communication hook sends bf16",
        "nanoGPT",
        _REP,
        ("PL712",),
        "the sum of gradients",
        ("bf16",),
        settings=hooked("hook in bf16"),
    ),
    "hook that keeps its own": Fault(
        "rank 1 keeps its own gradient",
        "ViT",
        _REP,
        ("PL705",),
        "the sum of gradients",
        ("on rank 1 only", "own microbatches"),
        settings={"comm_hook": (None, keep_own)},
    ),
    "hook off by a billionth": Fault(
        "rank 1 sends its gradient times 1 + 1e-9",
        "T5",
        _REP,
        ("PL706",),
        "the sum of gradients",
        ("factor of its own", "1e-09"),
        settings=hooked("hook off by a billionth"),
    ),
    "hook that sends nothing": Fault(
        "rank 1 sends zeros",
        "OPT",
        _REP,
        ("PL705",),
        "the sum of gradients",
        ("nothing of", "rank 1"),
        settings=hooked("hook that sends nothing"),
    ),
    "hook that clips": Fault(
        "each rank clips before the sum",
        "nn.Transformer",
        _REP,
        ("PL706",),
        "the sum of gradients",
        ("factor of its own",),
        settings=hooked("hook that clips"),
    ),
    # buffers
    "running average": Fault(
        "a running average is never shared",
        "nanoGPT",
        _REP,
        ("PL710",),
        "transformer.ln_f.average",
        ("order of the microbatches",),
        add_running_center,
    ),
    "running average of shards": Fault(
        "a running average is never shared",
        "nanoGPT",
        _SHARD,
        ("PL710",),
        "transformer.ln_f.average",
        ("order of the microbatches",),
        add_running_center,
    ),
    "counted tokens": Fault(
        "counts are never shared",
        "DistilBERT",
        _REP,
        ("PL710",),
        "word_embeddings.seen",
        ("buffer",),
        add_counting,
    ),
}
