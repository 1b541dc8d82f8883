"""The one visible function that lays out a model: every transformation, in order, with its reason."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.parallel.exact import ExactReduction
from paceline.parallel.replicate import CommHook, Replica
from paceline.recipe.schema import DdpSection

log = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    mesh: Mesh | None,
    *,
    ddp: DdpSection,
    exact: ExactReduction | None = None,
    comm_hook: tuple[Any, CommHook] | None = None,
    sync_batchnorm: bool = False,
    compile: bool = False,
) -> Replica | None:
    """Applies every parallelism of the mesh to a model, in place, in the one order that works.

    Collective: every rank of the mesh must call it with the same model structure.

    Args:
        model: on its device, in its final dtype.
        mesh: the ranks, or `None` for a world of one.
        ddp: settings of the replication.
        exact: sums the gradients over the ranks, in place of the library's all-reduce.
        comm_hook: the user's `(state, hook)` for the gradients.
        sync_batchnorm: turn BatchNorm into `SyncBatchNorm`.
        compile: `torch.compile` the model.

    Returns:
        What reduces the gradients, or `None` where there is nobody to reduce with.

    Raises:
        PacelineError: PL422 for `sync_batchnorm` off CUDA, PL420 with nothing to train.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise PacelineError(
            "PL420",
            saw=f"none of the {sum(1 for _ in model.parameters())} parameters of {type(model).__name__} "
            "requires a gradient.",
            rule="An update needs at least one parameter to train.",
            fix="Set requires_grad on the parameters to train before handing the model over.",
        )
    if sync_batchnorm:
        # First: it replaces modules, and everything after holds on to modules or parameters.
        _synchronise_batchnorm(model, mesh)
    if compile:
        # Before DDP: the model alone is one graph; collectives stay outside of it, in DDP's hooks.
        _compile(model)
        log.info("compile: torch.compile over the whole model")
    if mesh is None:
        if comm_hook is not None:
            log.warning("comm_hook is not used: one rank has nobody to communicate with")
        return None
    # Last: DDP broadcasts what the parameters are by now, and hooks these very tensors.
    replica = Replica(model, mesh.dp_replicate, ddp, exact, comm_hook)
    log.info(
        "replicate: DistributedDataParallel over dp_replicate=%d, %s reduction",
        mesh.dp_replicate.size,
        "fast" if exact is None else "exact",
    )
    return replica


def _compile(model: nn.Module) -> None:
    call = model._call_impl

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)  # type: ignore[no-untyped-call]

    # What Module.compile() does, with a frame of ours in between: the compiler passes over the frames of
    # torch.nn's own classes, so that an nn.Sequential would stay as it is without a word.
    model._compiled_call_impl = torch.compile(forward)


def _synchronise_batchnorm(model: nn.Module, mesh: Mesh | None) -> None:
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise PacelineError(
            "PL422",
            saw=f"sync_batchnorm is on, the model is on {device.type}.",
            rule="torch's SyncBatchNorm has CUDA kernels only.",
            fix="Leave sync_batchnorm off: statistics are then per microbatch, the same on every layout.",
        )
    group = mesh.dp.group if mesh is not None else None
    for name, child in model.named_children():
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(child, group)  # type: ignore[no-untyped-call]
        setattr(model, name, converted)
    log.info("sync_batchnorm: statistics over all ranks")
