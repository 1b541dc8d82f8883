"""The one visible function that lays out a model: every transformation, in order, with its reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm.buckets import broadcast_tensors
from paceline.errors import PacelineError
from paceline.mesh import Axis, Mesh
from paceline.parallel.blocks import find_blocks
from paceline.parallel.compress import Compression, CompressSettings
from paceline.parallel.construct.hand_out import Construction, place_values
from paceline.parallel.context.apply import apply_context
from paceline.parallel.context.context_plan import ContextPlan
from paceline.parallel.context.find import find_context_plan
from paceline.parallel.context.row_exchange import Rows
from paceline.parallel.dropout.replacements import Masks, apply_dropout
from paceline.parallel.experts.list_trial import open_loops
from paceline.parallel.experts.mixtures import list_mixtures, open_experts
from paceline.parallel.experts.shared import ExpertLayout
from paceline.parallel.placement import Placement
from paceline.parallel.recompute import apply_recompute, disable_caches
from paceline.parallel.replicate import Replica, ReplicaSettings
from paceline.parallel.shard.setup import ShardSettings
from paceline.parallel.shard.shards import Shards
from paceline.parallel.stages.compiling import compile_call
from paceline.parallel.stages.stages import Stages
from paceline.parallel.sums.buckets import BucketSums
from paceline.parallel.sums.gradients import check_dense
from paceline.parallel.tensor.apply import apply_plan, divide_stretches
from paceline.parallel.tensor.attention import open_attention
from paceline.parallel.tensor.split_plan import SplitPlan, find_plan
from paceline.recipe.layout import Layout
from paceline.torch_seams.modules import set_compiled_call

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The settings for laying out a model, besides the degrees of its mesh.

    Attributes:
        layout: resolved; in a world of one, only `recompute` applies.
        ddp: settings of the replication.
        shard: settings of the sharding.
        exact: whether to sum gradients in an order that does not depend on dp.
        compress: the settings of the compression, if gradients are compressed.
        compile: whether to `torch.compile` the model; each of its blocks under pp, dp_shard, tp or recompute.
        example: calls the model on a batch of a few samples; needed for cp, tp and pp.
        keeps_gradients: whether gradients are kept for longer than until the next sum, which overwrites
            buckets.
    """

    layout: Layout
    ddp: ReplicaSettings = field(default_factory=ReplicaSettings)
    shard: ShardSettings = field(default_factory=ShardSettings)
    exact: bool = False
    compress: CompressSettings | None = None
    compile: bool = False
    example: Callable[[nn.Module], Any] | None = None
    keeps_gradients: bool = False

    @property
    def tracks_use(self) -> bool:
        """Whether ranks agree in every step on the parameters that were used."""
        return self.layout.dp_shard > 1 or self.ddp.find_unused_parameters


@dataclass(frozen=True)
class LaidOut:
    """The result of laying out a model.

    Attributes:
        replica: sums the gradients over dp_replicate, if its ranks hold copies of the parameters.
        shards: gathers parameters and sums gradients, if the ranks of dp_shard hold parts.
        exact: sums a rank's own microbatches in the order of the tree, unless `shards` does.
        placement: where the model's parts are.
        plan: how tp splits it.
        lent: the exact reduction's group, borrowed from the mesh.
        stages: those of pp, if there are several ranks of it.
        experts: those of the mixtures, if the ranks of ep share them.
    """

    replica: Replica | None
    shards: Shards | None
    exact: BucketSums | None
    placement: Placement
    masks: Masks
    plan: SplitPlan | None
    lent: dist.ProcessGroup | None
    settings: Settings
    stages: Stages | None = None
    experts: ExpertLayout | None = None


def parallelize(
    model: nn.Module,
    mesh: Mesh | None,
    settings: Settings,
    device: torch.device,
    construction: Construction | None = None,
) -> LaidOut:
    """Apply every parallelism of the mesh to a model, in place, in the one order that works.

    Collective: every rank must call it with the same model structure.

    Args:
        model: on the device, in its final dtype; or on the meta device, see `construction`.
        mesh: the ranks, or `None` for a world of one.
        settings: how the model is laid out.
        construction: the source of the values of a model on the meta device.
    """
    _check_trains(model)
    check_dense(model)
    layout = settings.layout
    if layout.divides_model or layout.cp > 1 or layout.recompute != "none":
        _refuse_scripts(model, layout)
    if mesh is not None:
        _refuse_synchronised(model)
    if mesh is not None and construction is None:
        # Before any rank drops parts that another one keeps: rank 0's weights are broadcast.
        align_with_main(model)
    # Before tp, which asks it which dropouts see parts, and before recompute, which runs forwards again.
    masks = apply_dropout(model)
    _open_experts(model, settings)
    plan, context = None, None
    if layout.cp > 1:
        assert mesh is not None
        # Planned on the whole model, before tp splits it.
        context = _plan_sequences(model, mesh, settings, masks, list_mixtures(model))
    if layout.tp > 1:
        assert mesh is not None
        # On whole modules: stages and sharding cut the remaining parts, and blocks must be recomputed with
        # their collectives.
        plan = _split(model, mesh, settings, masks)
    # Before replication, which leaves out what is not on all of its ranks.
    experts = None if mesh is None or layout.ep == 1 else _share_experts(model, mesh, settings, device)
    if layout.recompute != "none":
        # Before sharding: a block is gathered again before it is recomputed.
        apply_recompute(model, find_blocks(model), layout.recompute)
        log.info("recompute: %s", layout.recompute)
    rows: list[Rows] = []
    if mesh is not None:
        # After recompute, whose second forward of a block must begin with the same input as the first one:
        # the sequence that is not divided yet.
        rows = _divide_activations(model, mesh, plan, context, masks)
    if layout.pp > 1:
        assert mesh is not None
        return _cut(model, mesh, settings, masks, plan, context, rows, device, construction, experts)
    splits = {**(plan.splits if plan else {}), **(experts.splits if experts else {})}
    placement = Placement(model, mesh, splits, _list_partial(plan, context))
    replica: Replica | None = None
    shards: Shards | None = None
    exact: BucketSums | None = None
    lent: dist.ProcessGroup | None = None
    if settings.compile:
        # Before sharding and replication, whose collectives stay outside of the graphs.
        _compile(model, layout, plan)
    if layout.dp_shard > 1:
        assert mesh is not None
        lent = mesh.borrow_group(mesh.dp) if settings.exact else None
        # Last except for the values: it replaces every parameter, and its hooks enclose all others.
        shards = Shards(
            model,
            mesh,
            settings.shard,
            zero=layout.zero,
            offload=layout.offload,
            exact_group=lent,
            apart=() if experts is None else experts.splits,
        )
    if construction is not None:
        # Each rank knows its part now: it gets one whole tensor at a time and keeps its part of it.
        _fill(model, construction, placement, device)
    if experts is not None:
        experts.complete()
    if layout.dp_shard == 1:
        # Last: DDP hooks these very tensors.
        apart = [] if experts is None else experts.parameters
        replica, exact, lent = _replicate(model, mesh, settings, device, apart)
    return LaidOut(replica, shards, exact, placement, masks, plan, lent, settings, experts=experts)


def align_with_main(model: nn.Module) -> None:
    """Set every rank's parameters and buffers to rank 0's; collective over the world."""
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, each in named:
        if each.layout != torch.strided or each.is_quantized or each.is_nested:
            kind = f"{each.dtype}, layout {each.layout}".replace("torch.", "")
            raise PacelineError(
                "PL727",
                saw=f"{name} is no dense, plain tensor ({kind}).",
                rule="On several ranks, parameters and buffers are sent as their bytes, one after another.",
                fix="Register the dense tensors that it is made of (such as indices and values), and make it "
                "from them in the forward.",
            )
    broadcast_tensors([each for _, each in named])


def _check_trains(model: nn.Module) -> None:
    if any(p.requires_grad for p in model.parameters()):
        return
    raise PacelineError(
        "PL420",
        saw=f"none of the {sum(1 for _ in model.parameters())} parameters of {type(model).__name__} "
        "requires a gradient.",
        rule="An update needs at least one parameter to train.",
        fix="Set requires_grad on the parameters to train before passing the model to Paceline.",
    )


def _refuse_scripts(model: nn.Module, layout: Layout) -> None:
    """Raise PL728 for modules that can be neither hooked nor cut."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise PacelineError(
                "PL728",
                saw=f"{name or 'the model'} is scripted or traced (torch.jit), with layout {layout}.",
                rule="Such a module runs as a program of its own, which takes no hooks and shows none of its "
                "operations.",
                fix="Pass the module that torch.jit was given, or use dp_replicate alone.",
            )


def _divide_activations(
    model: nn.Module, mesh: Mesh, plan: SplitPlan | None, context: ContextPlan | None, masks: Masks
) -> list[Rows]:
    """Cut the activations between the blocks along the sequence, over tp or cp; return the rows of cp."""
    if plan is not None:
        divide_stretches(model, plan, mesh.tp)
    return [] if context is None else apply_context(model, context, mesh.cp, masks)


def _list_partial(plan: SplitPlan | None, context: ContextPlan | None) -> dict[str, tuple[str, ...]]:
    """Return, by name of a parameter, the axes along which each rank has an addend of its gradient."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(plan.partial if plan else (), ("tp",))
    for name in context.partial if context else ():
        found[name] = (*found.get(name, ()), "cp")
    return dict(sorted(found.items()))


def _plan_sequences(
    model: nn.Module, mesh: Mesh, settings: Settings, masks: Masks, mixtures: Sequence[str]
) -> ContextPlan:
    open_attention(model)
    disable_caches(model, "cp", "it would hold the keys of some heads or positions")
    if settings.example is None:
        raise PacelineError(
            "PL463",
            saw=f"cp={mesh.cp.size} without an example batch.",
            rule="To find where cp can divide sequences, one forward is traced.",
            fix="Pass example=batch: tensors as the training loop provides them, with a few samples.",
        )
    plan = find_context_plan(
        model,
        settings.example,
        mesh.cp.size,
        masks,
        tp=mesh.tp.size,
        by=settings.layout.cp_by,
        mixtures=mixtures,
    )
    log.info("%s", plan.describe())
    return plan


def _open_experts(model: nn.Module, settings: Settings) -> None:
    layout = settings.layout
    if settings.exact or layout.ep > 1:
        # In a world of one too: these are the products that ranks of ep compute for each other.
        open_experts(model)
    if layout.tp > 1 or layout.cp > 1 or layout.pp > 1:
        open_loops(model)


def _split(model: nn.Module, mesh: Mesh, settings: Settings, masks: Masks) -> SplitPlan:
    open_attention(model)
    plan = find_plan(
        model,
        settings.example,
        mesh.tp.size,
        masks,
        sequence=settings.layout.sequence,
    )
    apply_plan(model, plan, mesh.tp, masks)
    log.info("%s", plan.describe())
    return plan


def _share_experts(model: nn.Module, mesh: Mesh, settings: Settings, device: torch.device) -> ExpertLayout:
    repeats = settings.layout.recompute != "none"
    blocks = [name for name, _ in find_blocks(model)] if repeats else []
    experts = ExpertLayout(model, mesh, is_exact=settings.exact, device=device, recomputed=blocks)
    log.info("%s", experts.describe())
    return experts


def _cut(
    model: nn.Module,
    mesh: Mesh,
    settings: Settings,
    masks: Masks,
    plan: SplitPlan | None,
    context: ContextPlan | None,
    rows: list[Rows],
    device: torch.device,
    construction: Construction | None,
    experts: ExpertLayout | None,
) -> LaidOut:
    """Cut a model into stages, on the whole model; then drop, or never make, what is on other ranks."""
    # After cp, tp and recompute: the trial forward must take the path that later ones take.
    has_modes = plan is not None or context is not None
    stages = Stages(model, mesh, settings.example, masks, device, rows, has_modes=has_modes)
    if settings.compile:
        stages.compile()  # not for the trial forward, which computes nothing
    named = dict(model.named_parameters())
    names = {id(tensor): name for name, tensor in (*named.items(), *model.named_buffers())}
    twice = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    holders = {name: stages.holders[names[id(t)]] for name, t in twice if names[id(t)] in stages.holders}
    splits = {**(plan.splits if plan else {}), **(experts.splits if experts else {})}
    placement = Placement(model, mesh, splits, _list_partial(plan, context), holders)
    shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    stages.drop_others()
    is_sharded = settings.layout.dp_shard > 1
    apart = {} if experts is None else experts.splits
    if construction is not None:
        # Of other stages nothing is on the meta device any more. One whole tensor exists at a time.
        cut = {name: shape for name, shape in shapes.items() if name not in apart}
        cut_rows = partial(_cut_rows, cut, mesh.dp_shard) if is_sharded else lambda _, part: part

        def keep(name: str, whole: Tensor) -> Tensor:
            """Return what this rank keeps: trial forwards read the buffers of every stage."""
            return cut_rows(name, placement.part(name, whole, whole)) if name in shapes else whole

        place_values(construction, device, keep)
    if is_sharded:
        ahead = settings.shard.prefetch > 0
        stages.shard(mesh, shapes, zero=settings.layout.zero, prefetch=ahead, apart=apart)
    if experts is not None:
        first = {name: stages.users[weight][0] for name, weight in experts.names.items()}
        experts.complete({name: stage for name, stage in first.items() if stage in stages.own})
    lent = mesh.borrow_group(mesh.dp) if settings.exact and mesh.dp.size > 1 else None
    return LaidOut(None, None, None, placement, masks, plan, lent, settings, stages, experts)


def _cut_rows(shapes: Mapping[str, torch.Size], axis: Axis, name: str, whole: Tensor) -> Tensor:
    """Return this rank's rows of a parameter; what has no shape here is whole on every rank."""
    if not shapes.get(name):
        return whole
    most = -(-len(whole) // axis.size)
    return whole[axis.rank * most : (axis.rank + 1) * most]


def _replicate(
    model: nn.Module,
    mesh: Mesh | None,
    settings: Settings,
    device: torch.device,
    apart: Sequence[Tensor],
) -> tuple[Replica | None, BucketSums | None, dist.ProcessGroup | None]:
    """Sum the gradients of replicas, or of one rank's microbatches; return the group that was borrowed."""
    replicas = mesh is not None and mesh.replicas.size > 1
    exact: BucketSums | None = None
    lent: dist.ProcessGroup | None = None
    if settings.exact:
        lent = mesh.borrow_group(mesh.dp) if replicas and mesh is not None else None
        compression = None
        if settings.compress is not None:
            log.info("compress: %s in %d slots", settings.compress.kind, settings.compress.slots)
            compression = Compression(settings.compress, model)
        exact = BucketSums(model, lent, device, apart, compression)
    if not replicas:
        return None, exact, lent
    assert mesh is not None
    replicating = mesh.layout.list_several(shares_data=True, divides_model=False)
    ddp = replace(settings.ddp, gradient_as_bucket_view=False) if settings.keeps_gradients else settings.ddp
    replica = Replica(model, mesh.replicas, ddp, exact, apart)
    log.info(
        "replicate: DistributedDataParallel over %s, %s reduction",
        " ".join(f"{axis}={degree}" for axis, degree in replicating.items()),
        "exact" if settings.exact else "fast",
    )
    return replica, exact, lent


def _fill(model: nn.Module, construction: Construction, placement: Placement, device: torch.device) -> None:
    if any(isinstance(p, DTensor) for p in model.parameters()):
        # fully_shard keeps references to its parameters, which get memory in place.
        model.to_empty(device=device)
        placement.fill(construction, device)
    else:
        place_values(construction, device, lambda name, whole: placement.part(name, whole, whole))


def _compile(model: nn.Module, layout: Layout, plan: SplitPlan | None) -> None:
    # Collectives, and parts that are recomputed separately, must not be in the middle of a graph.
    by_block = layout.dp_shard > 1 or layout.tp > 1 or layout.recompute != "none"
    blocks = (find_blocks(model) if by_block else []) or [("", model)]
    # The compiler cannot read positions in the source, by which tp recognises calls.
    changed = list(plan.sites) if plan is not None else []
    kept = {
        block
        for block, _ in blocks
        for name in changed
        if f"{name}.".startswith(f"{block}." if block else "")
    }
    for name, module in blocks:
        if name not in kept:
            set_compiled_call(module, compile_call(module))
    what = f"{len(blocks) - len(kept)} of {len(blocks)} blocks" if by_block else "the whole model"
    log.info("compile: torch.compile over %s", what)
    if kept:
        log.warning(
            "compile: %d blocks run uncompiled, because tp changes calls in the code of %s",
            len(kept),
            ", ".join(name or "the model" for name in changed[:8]),
        )


def _refuse_synchronised(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise PacelineError(
                "PL422",
                saw=f"{name or 'the model'} is an nn.SyncBatchNorm.",
                rule="Its statistics are of the microbatches that ranks happen to run at once, so results "
                "would depend on the number of ranks.",
                fix="Use nn.BatchNorm: its statistics are per microbatch, the same on every layout.",
            )
