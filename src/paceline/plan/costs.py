"""Describes what a model costs on one rank alone, per sample: `ModelCosts`, which every part of a plan reads.

It says nothing of layouts, processors and links. Two makers fill it: `of_transformer` by arithmetic, for
recipes and published models, and `paceline.bench.traced` from any module. Sources of the arithmetic:
Narayanan et al. 2021, appendix (products), and Korthikanti et al. 2022, section 4 (what stays for backward,
what tp and `sequence` divide). What Paceline's own blocks keep is counted exactly, and tests compare it with
the tensors that autograd saves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from paceline.plan.model_state import Sizes
from paceline.plan.parameters import Parameter
from paceline.recipe import Layout

By = Literal["columns", "inner", "heads", ""]
# Kernels of the forward of a block with a gated feed-forward.
BLOCK_CALLS = 28


@dataclass(frozen=True)
class Product:
    """A matrix product of one sample, `[rows, inner] x [inner, columns]`.

    Attributes:
        rows, inner, columns: its sizes.
        by: the size that tp divides.
        times: how often a sample makes it, in one batch (the heads of attention).
        is_attention: both factors are activations, and one kernel makes it with its neighbour.
        share: of the operations that are made (a causal kernel makes half).
        learns: whether backward computes a gradient of the weight, too.
        divided: the axis that divides its rows: cp; for experts ep, of whose ranks those of cp take turns; or
            none, for the rest of a mixture.
    """

    rows: float
    inner: float
    columns: float
    by: By = ""
    times: float = 1
    is_attention: bool = False
    share: float = 1.0
    learns: bool = True
    divided: Literal["cp", "ep", ""] = "cp"

    def divide(self, tp: int) -> Product:
        """Return a rank's part under tp."""
        if self.by == "heads":
            return replace(self, times=self.times / tp)
        return replace(self, **{self.by: getattr(self, self.by) / tp}) if self.by else self

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward."""
        return 2 * self.rows * self.inner * self.columns * self.times * self.share


@dataclass(frozen=True)
class Kept:
    """Bytes that a part keeps, of one sample from forward to backward.

    Attributes:
        split: that tp divides.
        whole: that only `sequence` divides.
        joined: that only cp divides: what `sequence` has gathered for a product, or a product that tp sums.
        mixed: of a mixture, which has whole sequences on every rank of cp.
        routed: of experts, whose rows the ranks of cp that share them take in turns.
    """

    split: float = 0
    whole: float = 0
    joined: float = 0
    mixed: float = 0
    routed: float = 0

    def divide(self, tp: int, cp: int = 1, ep_cp: int = 1, *, sequence: bool = False) -> float:
        """Return the bytes on a rank."""
        own = self.split / tp + self.whole / (tp if sequence else 1) + self.joined
        return own / cp + self.mixed + self.routed / ep_cp


@dataclass(frozen=True)
class ModelPart:
    """A block, or what stands before or behind all blocks.

    Attributes:
        products: of the forward.
        moved: bytes that element-wise work of the forward reads and writes, which tp divides.
        moved_whole: those that only `sequence` divides.
        calls: kernels of the forward.
        kept: for backward, without recompute.
        kept_selective: the same of a block if only products and attention are kept.
        input_bytes: of one sample's input, as block recompute keeps it; `sequence` divides it.
        work_bytes: of temporary results of one sample in backward, which tp divides.
        width_bytes: of one sample's result.
        key_bytes: of one sample's keys and values, which cp exchanges.
        num_sums: sums over tp in forward; a block has as many in backward.
        routed_bytes: of a sample's rows on the way to experts.
        parameters: trained ones.
        frozen: parameters and buffers that are not trained, whole without tp.
    """

    products: tuple[Product, ...] = ()
    moved: float = 0
    moved_whole: float = 0
    calls: int = 0
    kept: Kept = Kept()
    kept_selective: Kept = Kept()
    input_bytes: float = 0
    work_bytes: float = 0
    width_bytes: float = 0
    key_bytes: float = 0
    num_sums: int = 0
    routed_bytes: float = 0
    parameters: tuple[Parameter, ...] = ()
    frozen: Kept = Kept()

    @cached_property
    def num_parameters(self) -> int:
        """The trained numbers."""
        return sum(math.prod(p.shape) for p in self.parameters)

    @cached_property
    def most_numbers(self) -> int:
        """The numbers of its largest trained parameter."""
        return max((math.prod(p.shape) for p in self.parameters), default=0)

    def count_own(self, layout: Layout, *, sharded: bool = False) -> float:
        """Return the trained numbers of a rank of tp and ep, before shards divide them; `sharded`: those that
        they divide, all but experts under ep."""
        if layout.ep == 1:
            return self.num_parameters / layout.tp
        own = (p for p in self.parameters if not (sharded and p.is_expert))
        return sum(math.prod(p.divide(layout.tp, layout.ep)) for p in own)


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a model and of its optimizer step.

    Attributes:
        name: for people.
        before, after: the parts around the blocks.
        blocks: in order; equal ones may be one object.
        tied: weights of `before` that `after` uses, too. Under pp the last stage has them as well, and sends
            their gradient of each microbatch to the first one.
        loss_bytes: of one sample: logits, their logarithms and their gradient, together at one instant.
        sizes: of numbers, and the optimizer's.
        dtype_bytes: of a number in products and in activations between ranks.
        global_batch, microbatch: samples.
        tokens: of a sample; 1 for what is no text.
        clips: whether the gradient's norm is taken.
        bucket_bytes: of DDP.
        prefetch: blocks that are gathered ahead.
        copies_weights: whether autocast keeps a narrow copy of each weight of a step.
        eager: whether kernels start one by one, as without `torch.compile`.
        overlaps: whether sums of gradients and gathers of shards run beside computing.
        selective_again: share of the products that selective recompute makes again: none here, half in
            torchtitan.
        scatters: whether the ranks of tp cut messages between stages, as Megatron-LM's do (Narayanan et al.
            2021, section 4.1).
        is_transformer: as all published runs behind the interval are.
        factor: of all times, from a measured run.
        remarks: what a plan leaves out.
    """

    name: str
    before: ModelPart
    blocks: tuple[ModelPart, ...]
    after: ModelPart
    tied: tuple[Parameter, ...] = ()
    loss_bytes: float = 0
    sizes: Sizes = field(default_factory=Sizes)
    dtype_bytes: int = 4
    global_batch: int = 1
    microbatch: int = 1
    tokens: int = 1
    clips: bool = True
    bucket_bytes: int = 25 << 20
    prefetch: int = 1
    copies_weights: bool = False
    eager: bool = True
    overlaps: bool = True
    selective_again: float = 0.0
    scatters: bool = False
    is_transformer: bool = True
    factor: float = 1.0
    remarks: tuple[str, ...] = ()

    @cached_property
    def parts(self) -> tuple[ModelPart, ...]:
        """All parts in order."""
        return (self.before, *self.blocks, self.after)

    @cached_property
    def operations(self) -> tuple[float, ...]:
        """The operations of products of each part, for one sample."""
        return tuple(sum(product.flops for product in part.products) for part in self.parts)

    @cached_property
    def apart(self) -> ModelPart:
        """The part behind the blocks on a stage that is not the first."""
        return replace(self.after, parameters=(*self.after.parameters, *self.tied))

    @cached_property
    def num_parameters(self) -> int:
        """The trained numbers."""
        return sum(part.num_parameters for part in self.parts)

    def count_tied(self, tp: int) -> float:
        """Return the bytes of a rank's gradients of tied weights."""
        return sum(math.prod(p.divide(tp)) for p in self.tied) * self.sizes.gradient_bytes

    def count_microbatches(self, dp: int) -> int:
        """Return those that the fullest of the data ranks computes per step."""
        return math.ceil(math.ceil(self.global_batch / self.microbatch) / dp)


@dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer.

    Attributes:
        layers, hidden, heads, kv_heads, inner, vocab, tokens: as everywhere.
        gated: whether the feed-forward has three matrices.
        fused: whether attention never stores its scores (FlashAttention).
        causal: whether a token sees only those before it.
        rms: whether norms are RMSNorm, else LayerNorm.
        drops: whether there is dropout.
        plain: whether RMSNorm and rotary positions are several kernels, as torch's are on a CPU.
        residual: bytes of a number in the stream between blocks.
        number: bytes of a number elsewhere.
        experts: of a mixture; 0: there is none.
        expert_inner: width inside an expert.
        per_token: experts that a token visits.
        shared: width of the expert that every token visits.
        dense: first blocks without a mixture.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    tokens: int
    gated: bool = True
    fused: bool = True
    causal: bool = True
    rms: bool = True
    drops: bool = False
    plain: bool = False
    residual: int = 4
    number: int = 4
    experts: int = 0
    expert_inner: int = 0
    per_token: int = 1
    shared: int = 0
    dense: int = 0


def of_transformer(sizes: Transformer, parameters: dict[str, list[Parameter]]) -> tuple[ModelPart, ...]:
    """Return the parts of a transformer: what is before the blocks, each block, what is behind.

    Args:
        sizes: of the model.
        parameters: by block; "before" and "after" for what is outside.
    """
    s, h, v, w = sizes.tokens, sizes.hidden, sizes.vocab, sizes.number
    before = ModelPart(
        moved_whole=2 * s * h * sizes.residual,
        calls=6,
        kept=Kept(whole=8 * s + s * h * w * sizes.drops),
        width_bytes=s * h * w,
        num_sums=1,
        parameters=tuple(parameters["before"]),
    )
    norm = s * ((3 if sizes.rms else 2) * h * sizes.residual + (h * w if w < sizes.residual else 0) + 4)
    # The logits are read and written for the maximum, the logarithm and the gradient.
    after = ModelPart(
        products=(Product(s, h, v, "columns"),),
        moved=s * v * (w + 3 * 4),
        moved_whole=4 * s * h * sizes.residual,
        calls=12,
        kept=Kept(whole=norm - s * h * w, joined=s * h * w),
        width_bytes=s * h * w,
        num_sums=1,
        parameters=tuple(parameters["after"]),
    )
    names = [name for name in parameters if name not in ("before", "after")]
    made: dict[bool, ModelPart] = {}
    blocks = []
    for number, name in enumerate(names):
        mixes = bool(sizes.experts) and number >= sizes.dense
        if mixes not in made:
            made[mixes] = _make_block(sizes, mixes=mixes)
        blocks.append(replace(made[mixes], parameters=tuple(parameters[name])))
    return (before, *blocks, after)


def _make_block(sizes: Transformer, *, mixes: bool) -> ModelPart:
    s, h, w, r = sizes.tokens, sizes.hidden, sizes.number, sizes.residual
    kv = h // sizes.heads * sizes.kv_heads
    share = 0.5 if sizes.causal and sizes.fused else 1.0
    width = h // sizes.heads
    attends = sizes.fused
    score = (
        Product(s, width, s, "heads", sizes.heads, attends, share),
        Product(s, s, width, "heads", sizes.heads, attends, share),
    )
    products = [
        Product(s, h, h + 2 * kv, "columns"),
        *score,
        Product(s, h, h, "inner"),
    ]
    ups = 2 if sizes.gated else 1
    f, rows, e = (sizes.shared, sizes.per_token, sizes.expert_inner) if mixes else (sizes.inner, 0, 0)
    if mixes:
        products += [replace(each, by="", divided="ep") for each in _feed(s * rows, h, e, ups)]
    if f:
        products += [replace(each, divided="" if mixes else "cp") for each in _feed(s, h, f, ups)]
    # Scores are written, scaled, masked, normalised and read, unless they never leave the kernel.
    scores = 0.0 if sizes.fused else s * s * sizes.heads * (8 * w + 1)
    # Kept unless fused: the scores, what is left of them after dropout, and the mask; torch's own code also
    # keeps scaled queries and keys.
    kept_scores = few = s * sizes.heads * 4 if sizes.fused else s * s * sizes.heads * (2 * w + 1)
    if sizes.drops and not sizes.fused:
        few = s * s * sizes.heads * w
        kept_scores = 3 * few + s * (h + kv) * w
    narrow = w < r
    # Gated: gate, up, silu(gate), their product. Else: before and behind the activation.
    inner = 4 if sizes.gated else 2
    split = s * (2 * h + 2 * kv) * w + kept_scores
    feed = s * f * (inner + sizes.drops) * w
    # Both norms keep their input and their result, and RMSNorm what it scales. Under autocast, products keep
    # narrow copies of these. A dropout keeps its mask in the numbers' type.
    narrowed, scaled = (2 if narrow else 0), (3 if narrow else 2) if sizes.rms else 0
    whole = s * (4 * h * r + (8 if sizes.rms else 16) + (narrowed + scaled + 2 * sizes.drops) * h * w)
    # Inputs of products (of selective recompute, what attention and feed-forward add).
    joined, results = 2 * s * h * w, s * ups * f * w
    few += s * (2 * h + 2 * kv) * w
    mixed = routed = some = 0.0
    if mixes:
        # A router keeps its input, probabilities, choices, their weights twice and sums, and two orders of
        # rows. Experts keep each row as it comes and as it goes.
        mixed = feed + s * (h * w + 4 * sizes.experts + rows * (24 + 2 * 4 + h * w) + 4)
        routed, joined = s * rows * (e * inner + h) * w, s * h * w
        some = results + s * (sizes.experts + (h if f else 0)) * w
        feed = results = 0
    # In backward, gradients of both factors of the widest product and of the residual; first, the shared one.
    work = max(ups * f, rows * max(ups * e - h, h) + (h - inner * f if f else 0)) + h
    # Of a turn: half of it negated, cat, two products, a sum. Of a norm: square, mean, two products.
    turns, norms = (10 * w, 20 * r) if sizes.plain and sizes.rms else (4 * w, 10 * r + 4 * w)
    return ModelPart(
        products=tuple(products),
        moved=s * ((h + kv) * turns + (2 * ups + 1) * (f + rows * e) * w) + scores,
        moved_whole=s * h * norms,
        calls=BLOCK_CALLS if sizes.gated else 24,
        kept=Kept(split + feed, whole - 2 * s * h * w, joined, mixed, routed),
        kept_selective=Kept(few + results, s * h * r, joined, some),
        input_bytes=s * h * r,
        work_bytes=s * work * w,
        width_bytes=s * h * w,
        key_bytes=2 * s * kv * w,
        num_sums=2,
        routed_bytes=s * h * sizes.per_token * w if mixes else 0,
    )


def _feed(rows: float, hidden: int, inner: int, ups: int) -> list[Product]:
    return [Product(rows, hidden, inner * ups, "columns"), Product(rows, inner, hidden, "inner")]
