"""Defines every key of a recipe, with its type, range and meaning.

The docstring under a field is its documentation; `docs/recipe.md` is generated from them.
A run gets the default of every key that its recipe leaves out; defaults are set nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from paceline.recipe.compress import CompressSection as CompressSection
from paceline.recipe.hf_model import HfModel
from paceline.recipe.islands import AsynchronousSection, IslandsSection
from paceline.recipe.layout import Layout
from paceline.recipe.own_sections import OwnData, OwnModel
from paceline.recipe.ranks import DdpSection as DdpSection
from paceline.recipe.ranks import LayoutSection as LayoutSection
from paceline.recipe.ranks import ShardSection as ShardSection
from paceline.recipe.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, broken_rule
from paceline.recipe.section import Section as Section

# Ten times the largest trained models. Beyond it, a typing mistake would compute for minutes in silence.
Layers = Annotated[int, Field(gt=0, le=10_000)]
Width = Annotated[int, Field(gt=0, le=1 << 20)]


def _check_heads(hidden: int, heads: int, *, even: bool) -> None:
    if hidden % heads != 0:
        choices = [n for n in range(1, hidden + 1) if hidden % n == 0 and not (even and hidden // n % 2)]
        near = sorted(sorted(choices, key=lambda n: abs(n - heads))[:8])
        raise broken_rule(
            "PL102",
            f"model.heads={heads} does not divide model.hidden={hidden}.",
            "Every head has the same width, hidden / heads.",
            f"Set heads to {' or '.join(map(str, near))}."
            if near
            else "Make hidden a multiple of 2 x heads.",
        )
    if even and (hidden // heads) % 2 != 0:
        raise broken_rule(
            "PL103",
            f"model.hidden={hidden} / model.heads={heads} gives heads of width {hidden // heads}.",
            "Rotary position embeddings rotate pairs of features, so the width of a head must be even.",
            "Choose hidden and heads such that hidden / heads is even.",
        )


def default_ffn_hidden(hidden: int) -> int:
    """Return 8/3 of `hidden`, rounded up to a multiple of 32.

    SwiGLU's three matrices then hold about as many weights as the two of a plain feed-forward of width 4 x
    `hidden`."""
    return -(-8 * hidden // (3 * 32)) * 32


class DecoderFields(Section):
    """The fields that every kind of decoder has."""

    layers: Layers = 4
    """Number of blocks."""
    hidden: Width = 128
    """Width of the residual stream."""
    heads: Width = 4
    """Query heads; must divide `hidden`."""
    kv_heads: Width | None = None
    """Key and value heads (grouped-query attention); must divide `heads`. Default: `heads`."""
    ffn_hidden: Width | None = None
    """Width inside the feed-forward. Default: 8/3 of `hidden`, rounded up to a multiple of 32."""
    dropout: Probability = 0.0
    """Dropout on the embedding, attention weights and both outputs of a block."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the output head."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _check(self) -> DecoderFields:
        _check_heads(self.hidden, self.heads, even=True)
        if self.kv_heads is not None and self.heads % self.kv_heads != 0:
            raise broken_rule(
                "PL104",
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}.",
                "Every key and value head serves the same number of query heads.",
                f"Set kv_heads to one of "
                f"{', '.join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)}.",
            )
        return self


class GptModel(DecoderFields):
    """A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

    kind: Literal["gpt"]
    """`"gpt"`."""


class MoeModel(DecoderFields):
    """A decoder like `gpt` whose feed-forwards are mixtures of experts."""

    kind: Literal["moe"]
    """`"moe"`."""
    experts: Annotated[int, Field(gt=0, le=65_536)] = 8
    """Experts of a mixture."""
    experts_per_token: PositiveInt = 2
    """Experts that the router chooses for each token; at most `experts`."""
    expert_hidden: Width | None = None
    """Width inside an expert. Default: 8/3 of `hidden`, rounded up to a multiple of 32."""
    shared_hidden: Width | None = None
    """Width inside the expert that all tokens go through besides. Default: there is none."""
    dense_layers: NonNegativeInt = 0
    """First blocks that have one feed-forward, of width `ffn_hidden`, in place of a mixture; less than
    `layers`."""
    balance: Literal["loss", "bias", "global"] = "loss"
    """Method that keeps experts equally full (`docs/experts.md`): `"loss"`, an auxiliary loss per microbatch;
    `"bias"`, a number per expert that the router adds when it chooses; `"global"`, the auxiliary loss with
    the shares of the last step's global batch."""
    balance_loss: NonNegativeFloat | None = None
    """Weight of the auxiliary loss in training: with E experts, E times the sum over experts of (share of the
    choices x mean probability), per microbatch, a mean over the mixtures (Fedus et al. 2021, section 2.2).
    Default: 0.01, or 0 with `balance = "bias"`."""
    bias_rate: PositiveFloat | None = None
    """Distance that the bias moves per step; only with `balance = "bias"`. Default: 0.001."""

    @model_validator(mode="after")
    def _check_experts(self) -> MoeModel:
        if self.experts_per_token > self.experts:
            raise broken_rule(
                "PL650",
                f"model.experts_per_token={self.experts_per_token} with model.experts={self.experts}.",
                "A token goes to several different experts.",
                f"Set experts_per_token to {self.experts} or less, or add experts.",
            )
        if self.dense_layers >= self.layers:
            raise broken_rule(
                "PL651",
                f"model.dense_layers={self.dense_layers} with model.layers={self.layers}.",
                "At least one block has experts.",
                f'Set dense_layers to {self.layers - 1} or less, or kind = "gpt" for no experts.',
            )
        if self.bias_rate is not None and self.balance != "bias":
            raise broken_rule(
                "PL660",
                f'model.bias_rate={self.bias_rate:g} with model.balance="{self.balance}".',
                "It moves the bias of routers, and there is none.",
                'Set balance = "bias", or leave bias_rate out.',
            )
        if self.balance == "global" and self.balance_loss == 0:
            raise broken_rule(
                "PL664",
                'model.balance="global" with model.balance_loss=0.',
                "It is an auxiliary loss, and this weight switches it off.",
                "Leave balance_loss out; its default is 0.01.",
            )
        return self


class EncoderModel(Section):
    """A bidirectional transformer built of `nn.TransformerEncoderLayer`."""

    kind: Literal["encoder"]
    """`"encoder"`."""
    layers: Layers = 4
    """Number of `nn.TransformerEncoderLayer`s."""
    hidden: Width = 128
    """Width (`d_model`)."""
    heads: Width = 4
    """Attention heads; must divide `hidden`."""
    ffn_hidden: Width | None = None
    """Width inside the feed-forward (`dim_feedforward`). Default: 4 x `hidden`."""
    dropout: Probability = 0.1
    """Dropout inside every layer."""
    norm_first: bool = True
    """Apply norms before attention and feed-forward (pre-norm), not after them."""

    @model_validator(mode="after")
    def _check(self) -> EncoderModel:
        _check_heads(self.hidden, self.heads, even=False)
        return self


class ResnetModel(Section):
    """A ResNet with BatchNorm for small images (He et al. 2016, section 4.2)."""

    kind: Literal["resnet"]
    """`"resnet"`."""
    blocks: list[Layers] = Field(default=[1, 1, 1], min_length=1, max_length=4)
    """Residual blocks per stage; every stage after the first halves the image and doubles the width."""
    width: Width = 16
    """Channels of the first stage."""


ModelSection = Annotated[
    GptModel | MoeModel | EncoderModel | ResnetModel | HfModel | OwnModel, Field(discriminator="kind")
]


class TokenFiles(Section):
    """The fields that every kind of text data has."""

    files: list[str] = Field(default=["python-stdlib"], min_length=1)
    """Paths and globs (`**` allowed), or `"python-stdlib"`: the `.py` files of the running Python's
    standard library. Relative paths are relative to the working folder."""
    seq_len: PositiveInt = 128
    """Tokens per sample."""
    tokenizer: str = "bytes"
    """`"bytes"` (256 tokens), `"bpe"` (byte-level BPE, trained on the training split), or the path
    of a `tokenizer.json`."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary that `tokenizer = "bpe"` trains; refused with the other tokenizers."""
    valid_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the files' text, by size, held out for validation; if there are several files, whole files."""
    cache_dir: str = "~/.cache/paceline"
    """Folder in which token files are kept between runs."""

    @model_validator(mode="after")
    def _check(self) -> TokenFiles:
        if (self.tokenizer == "bpe") != (self.vocab_size is not None):
            raise broken_rule(
                "PL105",
                f"data.tokenizer={self.tokenizer!r} with data.vocab_size={self.vocab_size}.",
                "vocab_size is the vocabulary size that a BPE tokenizer is trained to.",
                'Set both tokenizer="bpe" and vocab_size=4096, or neither.',
            )
        if self.tokenizer == "bpe" and self.vocab_size is not None and self.vocab_size < 257:
            raise broken_rule(
                "PL106",
                f"data.vocab_size={self.vocab_size}.",
                "A byte-level BPE starts from 256 bytes.",
                "Set vocab_size to 257 or more.",
            )
        return self


class TextData(TokenFiles):
    """Text for predicting the next token."""

    kind: Literal["text"]
    """`"text"`."""


class MaskedTextData(TokenFiles):
    """Text for predicting masked tokens (BERT's objective; Devlin et al. 2019, section 3.1)."""

    kind: Literal["masked_text"]
    """`"masked_text"`."""
    mask_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens to predict. Of these, 80% are replaced by the mask token, 10% by a random token,
    and 10% are kept. The choice depends only on (seed, epoch, sample)."""


class DigitsData(Section):
    """1,797 handwritten digits of 8 x 8 pixels, part of this package (UCI optdigits, CC BY 4.0)."""

    kind: Literal["digits"]
    """`"digits"`."""
    valid_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the images held out for validation."""


DataSection = Annotated[TextData | MaskedTextData | DigitsData | OwnData, Field(discriminator="kind")]


class LoaderSection(Section):
    """The settings of data loading; these change speed, never the result."""

    num_workers: NonNegativeInt = 0
    """Loader processes per rank; 0 loads in the rank itself."""
    prefetch: PositiveInt = 2
    """Global batches that each worker loads ahead."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Page-locked memory for faster copies to a GPU; `"auto"`: on CUDA."""


class TrainSection(Section):
    """The training run."""

    steps: PositiveInt | None = None
    """Total number of optimizer steps; set either this or `epochs`."""
    epochs: PositiveInt | None = None
    """Number of passes over the training data; set either this or `steps`."""
    global_batch_size: PositiveInt = 16
    """Samples per optimizer step over all ranks."""
    microbatch_size: PositiveInt = 4
    """Samples per forward on a rank. Ranks share out whole microbatches, so this size affects the result."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    """Type to compute in. `"fp64"`, `"fp32"`: for everything. `"bf16"`, `"fp16"`: autocast over fp32 weights;
    fp16 also scales gradients."""
    reduction: Literal["fast", "exact"] = "exact"
    """Order in which gradients are summed over microbatches and ranks. `"exact"` does not depend on the
    number of ranks, so the weights have the same bits on any number of ranks (`docs/exact.md`). `"fast"`
    uses accumulation and the library's all-reduce. It keeps fewer gradients in memory if a rank has several
    microbatches, and supports communication hooks."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights, the order of samples, and dropout."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0 turns clipping off."""
    max_skipped_in_a_row: PositiveInt = 10
    """Stop after this many consecutive steps with a non-finite loss or gradient, each of which is skipped."""
    eval_every: NonNegativeInt = 0
    """Evaluate on the validation data every this many steps, and at the end; 0: at the end only."""
    patience: NonNegativeInt = 0
    """Stop after this many evaluations in a row without a lower validation loss, and keep the checkpoint of
    the lowest one; 0: never."""
    eval_samples: PositiveInt | None = None
    """Number of validation samples to evaluate on, from the first one on. Default: all."""
    overfit_batches: NonNegativeInt = 0
    """Train on the samples of the first so many global batches alone: a sound model learns them by heart; 0:
    on all."""
    deterministic: bool = True
    """Use deterministic kernels only; an operation without one is an error."""
    compile: bool = False
    """Compile the model with `torch.compile`."""
    threads_per_rank: PositiveInt | Literal["auto"] = "auto"
    """CPU threads per rank. `"auto"`: 1 with the exact reduction, otherwise the machine's cores divided by
    its ranks. The number affects the last bits of results, so checkpoints record it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. `"auto"`: CUDA if there is a device for every local rank, otherwise the CPU."""
    timeout_s: PositiveFloat = 600.0
    """Seconds after which a collective that not all ranks have joined is an error."""

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        if self.microbatch_size > self.global_batch_size:
            raise broken_rule(
                "PL108",
                f"train.microbatch_size={self.microbatch_size} is more than "
                f"train.global_batch_size={self.global_batch_size}.",
                "A global batch is divided into microbatches.",
                f"Set microbatch_size to {self.global_batch_size} or less.",
            )
        if self.patience and not self.eval_every:
            raise broken_rule(
                "PL846",
                f"train.patience={self.patience} with train.eval_every=0.",
                "It counts evaluations, and the only one would be at the end.",
                "Set train.eval_every, for example to 100 steps.",
            )
        if self.steps is None and self.epochs is None:
            raise broken_rule(
                "PL107",
                "neither train.steps nor train.epochs is set.",
                "Exactly one of them sets the length of the run.",
                "Set train.steps=100, or train.epochs=1.",
            )
        if self.steps is not None and self.epochs is not None:
            raise broken_rule(
                "PL107",
                f"both train.steps={self.steps} and train.epochs={self.epochs} are set.",
                "Exactly one of them sets the length of the run.",
                "Leave one out; from the command line: --set train.steps=none.",
            )
        return self


class ScheduleFields(Section):
    """The learning rate over time."""

    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after the warm-up: constant, or falling to `min_lr_ratio` at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0 (excluded) to `lr`."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step, as a share of `lr`."""
    lr_scaling: Literal["none", "linear"] = "none"
    """`"linear"`: `lr` times global batch / `base_batch_size` (Goyal et al. 2017, section 2.1). The
    global batch does not depend on the number of ranks, so neither does the rate."""
    base_batch_size: PositiveInt | None = None
    """Global batch size for which `lr` was chosen; needed with `lr_scaling = "linear"`."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleFields:
        if (self.lr_scaling == "linear") != (self.base_batch_size is not None):
            raise broken_rule(
                "PL109",
                f"optimizer.lr_scaling={self.lr_scaling!r} with "
                f"optimizer.base_batch_size={self.base_batch_size}.",
                "Linear scaling multiplies lr by global_batch_size / base_batch_size, so it needs that "
                "number; nothing else uses it.",
                "Set both or neither.",
            )
        return self


class AdamW(ScheduleFields):
    """AdamW (Loshchilov and Hutter 2019). Weight decay applies to matrices only, not to norms and biases."""

    kind: Literal["adamw"]
    """`"adamw"`."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """Decay rates of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""


class Sgd(ScheduleFields):
    """Stochastic gradient descent with momentum. Weight decay applies to matrices only."""

    kind: Literal["sgd"]
    """`"sgd"`."""
    lr: PositiveFloat = 0.1
    """Peak learning rate."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum."""
    nesterov: bool = False
    """Nesterov's momentum; needs `momentum` above 0."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty."""

    @model_validator(mode="after")
    def _check_nesterov(self) -> Sgd:
        if self.nesterov and self.momentum == 0:
            raise broken_rule(
                "PL114",
                "optimizer.nesterov=true with optimizer.momentum=0.",
                "Nesterov's method looks ahead along the momentum.",
                "Set momentum=0.9, or nesterov=false.",
            )
        return self


class Muon(ScheduleFields):
    """Muon (Jordan et al. 2024) for matrices of blocks; AdamW for embeddings, heads, norms and biases.

    Each matrix is updated whole, whatever the layout. Weight decay applies to matrices only."""

    kind: Literal["muon"]
    """`"muon"`."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate, of the matrices and of AdamW."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the learning rate of a matrix. `"match_rms_adamw"`: updates are as large as AdamW's, so that
    one rate suits both (Liu et al. 2025, section 2.2). `"original"`: the square root of rows / columns, at
    least 1."""
    adamw_lr: PositiveFloat | None = None
    """Peak learning rate of AdamW, if it differs."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Momentum of the matrices."""
    nesterov: bool = True
    """Nesterov's momentum."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz steps that make an update orthogonal."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """Decay rates of AdamW's two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of AdamW's second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""


OptimizerSection = Annotated[AdamW | Sgd | Muon, Field(discriminator="kind")]


class CheckpointSection(Section):
    """The settings of checkpoints."""

    every: NonNegativeInt = 50
    """Save every this many steps, and at the end; 0: at the end only."""
    keep: PositiveInt = 3
    """Number of checkpoints to keep on disk; the newest valid one is always kept."""
    mode: Literal["full", "sharded"] = "full"
    """Ranks that write. `"full"`: rank 0 gathers and writes whole tensors. `"sharded"`: every rank writes its
    share, into a folder that all of them see. Checkpoints of either kind load under any layout."""
    asynchronous: bool = False
    """Write checkpoints while training continues. During the next forward and backward, each rank copies its
    share into memory, from which a thread writes it."""
    max_failed: PositiveInt = 3
    """Number of failed saves in a row that ends the run (PL508). Fewer are reported, and training continues.
    The save at the end of a run, or when it is stopped, must succeed."""


class MetricsSection(Section):
    """The settings of metrics and event files."""

    sinks: list[str] = Field(default=["tensorboard"])
    """What gets the metrics beside `metrics.jsonl`: `"csv"`, `"tensorboard"`, `"wandb"`, `"mlflow"`, or names
    of entry points `paceline.sinks` of other packages."""
    peak_flops: PositiveFloat | None = None
    """Peak FLOP/s of one rank's device in the training dtype; MFU is a share of it. Default: the known value
    for common GPUs; none for CPUs."""


class Recipe(Section):
    """A complete run."""

    model: ModelSection
    data: DataSection
    train: TrainSection
    optimizer: OptimizerSection = AdamW(kind="adamw")
    layout: LayoutSection = LayoutSection()
    shard: ShardSection = ShardSection()
    ddp: DdpSection = DdpSection()
    compress: CompressSection = CompressSection()
    islands: IslandsSection = IslandsSection()
    asynchronous: AsynchronousSection = AsynchronousSection()
    loader: LoaderSection = LoaderSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        needs = {
            "gpt": ("text",),
            "moe": ("text",),
            "encoder": ("masked_text",),
            "resnet": ("digits",),
            "hf": ("text",),
            "own": ("text", "masked_text", "digits", "own"),
        }
        if self.data.kind not in needs[self.model.kind]:
            raise broken_rule(
                "PL116",
                f"model.kind={self.model.kind!r} with data.kind={self.data.kind!r}.",
                "gpt, moe and hf predict the next token of text, encoder the masked tokens of masked_text, "
                "resnet the class of images (digits). A model of your own takes all.",
                f"Set data.kind to {' or '.join(repr(kind) for kind in needs[self.model.kind])}.",
            )
        if self.train.steps is not None and self.optimizer.warmup_steps > self.train.steps:
            raise broken_rule(
                "PL117",
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} is more than "
                f"train.steps={self.train.steps}.",
                "The warm-up is the first part of the run.",
                f"Set warmup_steps to {self.train.steps} or less.",
            )
        if self.optimizer.kind == "muon" and self.model.kind in ("resnet", "hf", "own"):
            raise broken_rule(
                "PL116",
                f"optimizer.kind='muon' with model.kind={self.model.kind!r}.",
                "Muon updates the matrices of a model's blocks. A resnet has none, and other models name "
                "them in different ways.",
                "Set optimizer.kind to 'sgd' or 'adamw'.",
            )
        if isinstance(self.model, HfModel) and (parts := self.model.find_broken(self.data)):
            raise broken_rule(*parts)
        if self.train.steps is not None and (parts := self.islands.find_broken(self.train.steps)):
            raise broken_rule(*parts)
        return self

    def with_layout(self, layout: Layout, **changed: Section) -> Recipe:
        """Return the recipe with this layout, and with other changed sections by name."""
        return self.model_copy(update={"layout": LayoutSection.of(layout), **changed})
