"""Builds the parts of a trainer from the user's arguments, and checks these arguments."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import PacelineError
from paceline.huggingface.factory import Pretrained
from paceline.mesh import Mesh
from paceline.parallel.batchnorm import RunningStatistics
from paceline.parallel.blocks import find_blocks
from paceline.parallel.construct.build import construct
from paceline.parallel.construct.hand_out import Construction, place_values
from paceline.parallel.experts.mixtures import count_experts
from paceline.parallel.objective import Trial
from paceline.parallel.order import LaidOut, Settings, align_with_main, parallelize
from paceline.parallel.tensor.trace import cut_batch
from paceline.recipe import Layout
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.legal import Rules
from paceline.recipe.ranks import DdpSection, ShardSection
from paceline.seeds import derive_seed
from paceline.torch_seams.trees import learn_mapping
from paceline.train.factories import check_optimizer, check_schedule
from paceline.train.foreign import refuse_compiled
from paceline.train.kernels import REGISTER, rounds_by_place
from paceline.train.precision import Precision
from paceline.train.runners.routed import RoutedRunner
from paceline.train.runners.runner import Runner
from paceline.train.runners.sharded import ShardedRunner
from paceline.train.runners.staged import StagedRunner
from paceline.train.runners.whole import WholeRunner
from paceline.train.settings import BuiltOptimizer
from paceline.train.several import join_optimizers, list_parts
from paceline.train.update import Update, Updated
from paceline.train.whole_steps import build_whole_steps

log = logging.getLogger(__name__)

Named = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[Named], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
ScheduleFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Model = nn.Module | Callable[[], nn.Module]
UpdateModel = Callable[[str, Callable[[dict[str, nn.Module], Any], Any]], Updated]


@dataclass(frozen=True)
class UpdateSettings:
    """The settings that all updates of a trainer share; see the arguments of `Trainer`.

    Attributes:
        mesh: the ranks, or `None` in a world of one.
        precision: dtype and device.
        statistics: BatchNorm's, of all models.
        laying_out: how models are laid out over the mesh.
        schedule: from an optimizer to its learning-rate scheduler.
        clip_norm: global gradient norm to clip to.
        seed: base of the microbatches' seeds.
    """

    mesh: Mesh | None
    precision: Precision
    statistics: RunningStatistics
    laying_out: Settings
    schedule: ScheduleFactory | None
    clip_norm: float
    seed: int


@dataclass(frozen=True)
class Built:
    """A model before it is laid out.

    Attributes:
        model: on its device; or on the meta device, if a factory built it.
        construction: the source of the values of a model on the meta device.
    """

    model: nn.Module
    construction: Construction | None


def build_model(
    name: str, model: Model, precision: Precision, seed: int, group: dist.ProcessGroup | None
) -> Built:
    """Place a module on its device in its dtype, or build a factory's, without values yet; collective.

    Args:
        model: module or factory.
        precision: dtype and device.
        group: all ranks; `None` in a world of one.
    """
    if isinstance(model, nn.Module):
        precision.place_model(model)
        return Built(model, None)
    read = model.open if isinstance(model, Pretrained) else None
    factory = model.build if isinstance(model, Pretrained) else model
    construction = construct(
        refuse_compiled(factory), derive_seed(seed, "model", name), precision.cast_model, group, read
    )
    return Built(construction.model, construction)


def build_update(name: str, built: Built, factory: OptimizerFactory, settings: UpdateSettings) -> Update:
    """Lay out a model over the ranks and build its optimizer and schedule; collective."""
    model, laying_out = built.model, settings.laying_out
    device = settings.precision.device
    laid_out = parallelize(model, settings.mesh, laying_out, device, built.construction)
    optimizer = join_optimizers(name, factory(list(model.named_parameters())))
    check_optimizer(name, optimizer, model)
    if laid_out.stages is not None:
        laid_out.stages.vacate()
    if laying_out.exact and (laying_out.layout.dp_shard > 1 or laying_out.layout.ep > 1):
        for part in list_parts(optimizer):
            _check_kernels(part, laying_out.layout)
    as_built = BuiltOptimizer(optimizer, {id(p): place for place, p in enumerate(model.parameters())})
    schedule = settings.schedule(optimizer) if settings.schedule is not None else None
    check_schedule(name, schedule)
    update = Update(
        name,
        model,
        build_runner(name, model, laid_out, settings),
        laid_out.placement,
        settings.mesh,
        optimizer,
        schedule,
        as_built,
        is_exact=laying_out.exact,
        statistics=settings.statistics,
        precision=settings.precision,
        clip_norm=settings.clip_norm,
        whole_steps=build_whole_steps(optimizer, model, laid_out.placement, settings.mesh),
    )
    if update.not_updated:
        log.warning(
            "%d parameters of %s require a gradient, but the optimizer does not have them: %s ...",
            len(update.not_updated),
            name,
            ", ".join(update.not_updated[:3]),
        )
    return update


def build_updates(
    built: Mapping[str, Built],
    factories: Mapping[str, OptimizerFactory],
    settings: UpdateSettings,
    world_size: int,
) -> dict[str, Update]:
    """Lay out all models and build their optimizers; collective.

    Args:
        built: the models by name; those without an optimizer factory are filled in and never updated.
        factories: of optimizers, by name of the model.
        world_size: ranks.
    """
    for each in built.values():
        refuse_illegal(each, settings.laying_out, settings.precision, world_size)
    updates = {name: build_update(name, built[name], make, settings) for name, make in factories.items()}
    for name in built.keys() - updates.keys():
        if (construction := built[name].construction) is not None:
            place_values(construction, settings.precision.device)
        if settings.mesh is not None:
            align_with_main(built[name].model)
    return updates


def build_runner(name: str, model: nn.Module, laid_out: LaidOut, settings: UpdateSettings) -> Runner:
    """Build the runner of a laid-out model's microbatches; only this function chooses the kind of runner."""
    common = {
        "statistics": settings.statistics,
        "precision": settings.precision,
        "seed": settings.seed,
        "track_used": settings.laying_out.tracks_use,
    }
    if laid_out.stages is not None:
        assert settings.mesh is not None
        # The sums of gradients say which parameters were used.
        return StagedRunner(name, model, laid_out, settings.mesh, **{**common, "track_used": False})
    if laid_out.shards is not None:
        assert settings.mesh is not None
        return ShardedRunner(name, model, laid_out, settings.mesh, **common)
    kind = WholeRunner if laid_out.experts is None else RoutedRunner
    return kind(name, model, laid_out, settings.mesh, **common)


def refuse_illegal(built: Built, settings: Settings, precision: Precision, world_size: int) -> None:
    """Raise if the layout breaks rules, with all reasons.

    Args:
        settings: the layout, resolved, and what goes with it.
        precision: dtype and device.
        world_size: ranks.
    """
    blocks = [name for name, _ in find_blocks(built.model) if name]
    model = ModelFacts(
        max_rows=max((p.shape[0] for p in built.model.parameters() if p.dim()), default=None),
        num_blocks=len(blocks),
        num_experts=count_experts(built.model),
    )
    run = RunFacts(
        dtype=precision.name,
        reduction="exact" if settings.exact else "fast",
        device=precision.device.type,
        ddp=DdpSection(**asdict(settings.ddp)),
        shard=ShardSection(**asdict(settings.shard)),
        compile=settings.compile,
    )
    Rules(model, run).refuse(settings.layout, world_size)


def check_several(layout: Layout) -> None:
    """Raise PL423 for several models in a layout that divides a model."""
    if layout.divides_model:
        raise PacelineError(
            "PL423",
            saw=f"named models with layout {layout}.",
            rule="Several models must be replicated, because communication in the middle of their common "
            "loss would have no fixed order.",
            fix="Use dp_replicate for all ranks, or train one model.",
        )


def make_trial(
    example: Any,
    forward: Callable[[Any, Any], Any],
    loss: Callable[[Any, Any], Any] | None,
    precision: Precision,
) -> Callable[[nn.Module], Any] | None:
    """Return what runs a model on a batch of a few samples, and its loss if there is one; `None` without."""
    learn_mapping(example)
    if example is None:
        return None

    def attempt(call: Callable[[Any, Any], Any], given: Any) -> Any:
        with precision.autocast():
            return call(given, precision.place_batch(cut_batch(example)))

    run = partial(attempt, forward)
    return run if loss is None else Trial(run, partial(attempt, loss))


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model on a batch (the default `forward`): a dict as keywords, a tuple as arguments."""
    named = dict(batch) if isinstance(batch, Mapping) else {}
    parts = () if named else batch if isinstance(batch, (tuple, list)) else (batch,)
    try:
        return model(*parts, **named)
    except TypeError:
        called = getattr(model, "forward", model)
        try:
            inspect.signature(called).bind(*parts, **named)
        except TypeError as error:
            picked = f"batch[{next(iter(named))!r}]" if named else "batch[0]"
            raise PacelineError(
                "PL400",
                saw=f"no forward=, and a {type(model).__name__} that does not take the batch: {error}.",
                rule="By default the model is called with every field or item of the batch.",
                fix=f"Pass forward=lambda model, batch: model({picked}).",
            ) from None
        raise


def check_functions(
    names: Mapping[str, Any] | None,
    step: object,
    forward: object,
    loss: object,
    optimizer: object,
    metrics: object,
) -> None:
    """Raise if models, losses and optimizers do not fit together.

    Args:
        names: the named models, or `None` for one model.
    """
    several = names is not None
    if several and (step is None or forward is not None or loss is not None or metrics):
        raise PacelineError(
            "PL406",
            saw="several models with "
            + ("no step=." if step is None else "forward=, loss= or metrics= together with step=."),
            rule="With named models, step(update) states which losses are computed and in which order.",
            fix='Pass step=lambda update: update("student", loss) and leave the others out.',
        )
    if not several and (loss is None or step is not None):
        raise PacelineError(
            "PL406",
            saw="one model with " + ("no loss=." if loss is None else "step=."),
            rule="One model trains on loss(output, batch); step= is for a dict of named models.",
            fix="Pass loss=lambda output, batch: (sum_of_losses, weight).",
        )
    if several != isinstance(optimizer, Mapping):
        raise PacelineError(
            "PL404",
            saw=f"{'several models' if several else 'one model'} with optimizer={type(optimizer).__name__}.",
            rule="Named models need a dict of optimizers with the same names; one model needs one function.",
            fix="Pass both as dicts, or neither.",
        )
    if names is not None and isinstance(optimizer, Mapping):
        for name in optimizer.keys() - names.keys():
            raise PacelineError(
                "PL404",
                saw=f"an optimizer for {name!r}, which is not one of the models {', '.join(names)}.",
                rule="Optimizers and models share their names.",
                fix="Use the same names in both dicts.",
            )


def check_loss_over(loss_over: str, *, has_step: bool, has_metrics: bool) -> None:
    """Raise PL415 if the loss cannot be computed on the whole global batch."""
    if loss_over == "global_batch" and (has_step or has_metrics):
        word = "step=" if has_step else "metrics="
        raise PacelineError(
            "PL415",
            saw=f'loss_over="global_batch" with {word}.',
            rule="The forward of one model runs twice per step, with its loss in between.",
            fix=f"Leave {word} out, or compute the loss on microbatches.",
        )


def check_numbers(**limits: tuple[float | None, int]) -> None:
    """Raise PL400 for an argument below its minimum; `None` stands for an omitted argument.

    Args:
        limits: by name of the argument, its value and its minimum.
    """
    for name, (value, least) in limits.items():
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value < math.inf:
            raise PacelineError(
                "PL400",
                saw=f"{name}={value!r}.",
                rule=f"It is a number of at least {least}.",
                fix=f"Set {name} to {least} or more, or leave it out.",
            )


def _check_kernels(optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    if type(optimizer).__name__ not in ("Adam", "AdamW"):
        return
    fused = [p for group in optimizer.param_groups if group.get("fused") for p in group["params"]]
    uneven = next((p for p in fused if rounds_by_place(p)), None)
    if uneven is not None:
        raise PacelineError(
            "PL448",
            saw=f"{type(optimizer).__name__}(fused=True) on CPU with reduction=exact and layout {layout}, "
            f"over a parameter of shape {list(uneven.shape)}.",
            rule="torch's fused CPU kernel rounds the last elements of a tensor differently from the rest. "
            f"If the rows of a tensor are not a multiple of {REGISTER} numbers, its shards end at other "
            "elements.",
            fix="Leave fused=True out, at least for such parameters, or train with reduction='fast'.",
        )
