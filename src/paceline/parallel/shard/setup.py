"""Applies `fully_shard` to a model's blocks and then to the model: checks it first, and sets its options."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from paceline.errors import PacelineError
from paceline.parallel.blocks import separable_blocks
from paceline.parallel.parameter_hooks import check_hooks, move_hooks
from paceline.phrases import name_some
from paceline.torch_seams.fsdp import list_records, unmark
from paceline.torch_seams.installed import require
from paceline.torch_seams.modules import own_parameters

log = logging.getLogger(__name__)

# A module outside of the blocks of at least so many bytes gets a message of its own. Smaller ones would cost
# more time in further messages than they save in memory.
_TABLE_BYTES = 16 << 20
_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ShardSettings:
    """The settings of `fully_shard`; the recipe's `[shard]` explains each.

    They change speed and memory, not the result, except for `param_dtype` and `reduce_dtype`.
    """

    prefetch: int = 1
    param_dtype: Literal["none", "bf16", "fp16"] = "none"
    reduce_dtype: Literal["auto", "fp32"] = "auto"


@dataclass
class Unit:
    """The parameters that are gathered, freed and reduced together: of a block, or all outside of the blocks.

    Attributes:
        name: of the module; "" for the model itself.
        module: sharded.
        parameters: its own shards by full name, without those of other units.
        is_table: whether it is outside of the blocks and gathered with the model, in a message of its own.
    """

    name: str
    module: FSDPModule
    parameters: list[tuple[str, nn.Parameter]]
    is_table: bool = False


def apply_sharding(
    model: nn.Module,
    mesh: DeviceMesh,
    settings: ShardSettings,
    *,
    zero: int,
    offload: str,
    apart: Collection[str] = (),
) -> list[Unit]:
    """Shard a model in place; its parameters become DTensors, cut along their first dimension.

    Parameters without a dimension are not changed and stay whole on every rank, and so do those of `apart`.

    Args:
        model: on its device, or on the meta device.
        mesh: one-dimensional, over the ranks that share one copy.
        zero: what is sharded: 1 the optimizer's state, 2 gradients too, 3 parameters too.
        offload: "none" or "cpu".
        apart: full names of parameters that are not sharded.

    Returns:
        The blocks in the order of the definition, and the model last.
    """
    require("fsdp")
    blocks = separable_blocks(model)
    tables = _find_tables(model, blocks)
    _check_parameters(model, [*blocks, *tables], apart)
    before = dict(model.named_parameters())
    check_hooks(before.items())
    arguments: dict[str, Any] = {"mesh": mesh, "offload_policy": _offload_policy(mesh, offload)}
    # Those without a dimension are kept whole on every rank, see `scalars.py`.
    arguments["ignored_params"] = {p for name, p in before.items() if not p.dim() or name in apart}
    for name, block in [*blocks, *tables, ("", model)]:
        fully_shard(
            block,
            # The root's parameters are needed again as soon as backward begins.
            reshard_after_forward=(name, block) in blocks and zero == 3,
            mp_policy=_precision_policy(settings, is_root=not name),
            **arguments,
        )
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    for module in modules.values():
        module.__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]  # torch's own error names no way out
    _hide_mark(model, [block for _, block in blocks])
    move_hooks(before, model)
    units = _collect_units(model, modules, apart, {name for name, _ in tables})
    for unit in units:
        # With a factor of 1 the operation is a plain sum; without force it would be "multiply, then sum".
        unit.module.set_gradient_divide_factor(1.0)
        unit.module.set_force_sum_reduction_for_comms(True)
    _set_prefetch(units, settings.prefetch)
    return units


def copied_model_error(saw: str) -> PacelineError:
    """Return PL929, for a copy of a model whose parts are on several ranks."""
    return PacelineError(
        "PL929",
        saw=f"{saw}.",
        rule="Each rank has a part of the model, which cannot be copied as a module.",
        fix="For an average of weights (AveragedModel), pass Trainer(ema=0.999), or track "
        "paceline.Average(trainer.model, 0.999). For a whole copy, call trainer.gather_into(plain).",
    )


def _refuse_copy(memo: object) -> NoReturn:
    raise copied_model_error("copy.deepcopy of a model under dp_shard")


def _hide_mark(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Remove torch's mark of sharded modules from those that call the blocks.

    Hugging Face's models that drop layers check for it, and then run the dropped layers as well, so that all
    ranks gather the same parameters. That gives other numbers than one process has. Here ranks gather the
    blocks that they leave out.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            unmark(module)


def _find_tables(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the large modules outside of the blocks, if there are several: an embedding and a head."""
    inside = {id(module) for _, block in blocks for module in block.modules()}
    owners = Counter(id(p) for module in model.modules() for p in own_parameters(module).values())
    found = []
    for name, module in model.named_modules():
        own = [p for p in own_parameters(module).values() if p is not None]
        is_alone = name and id(module) not in inside and all(owners[id(p)] == 1 for p in own)
        if is_alone and sum(p.nbytes for p in own) >= _TABLE_BYTES and not list(module.children()):
            found.append((name, module))
    return found if len(found) > 1 else []


def _collect_units(
    model: nn.Module, modules: dict[str, FSDPModule], apart: Collection[str], tables: Collection[str]
) -> list[Unit]:
    units = [Unit(name, module, [], name in tables) for name, module in modules.items() if name]
    units.append(Unit("", modules[""], []))
    homes = {id(record.sharded_param): unit for unit in units for record in list_records(unit.module)}
    for name, parameter in model.named_parameters():
        if parameter.dim() and name not in apart:
            homes[id(parameter)].parameters.append((name, parameter))
    return units


def _check_parameters(model: nn.Module, blocks: list[tuple[str, nn.Module]], apart: Collection[str]) -> None:
    named = [(name, p) for name, p in model.named_parameters() if name not in apart]
    strided = [name for name, p in named if not p.is_contiguous()]
    if strided:
        raise PacelineError(
            "PL440",
            saw=f"parameters whose memory is not in the order of their dimensions: {name_some(strided, 8)}.",
            rule="Sharding splits every parameter along its first dimension into contiguous pieces of "
            "memory, which a model in channels_last does not have.",
            fix="Call model.to(memory_format=torch.contiguous_format) before passing it to Paceline, or use "
            "dp_shard=1.",
        )
    inside = {id(p) for _, block in blocks for p in block.parameters()}
    outside = [(name, p) for name, p in named if id(p) not in inside]
    groups = [("the model outside of its blocks", outside)]
    groups += [(name, list(block.named_parameters(name))) for name, block in blocks]
    for where, parameters in groups:
        dtypes: dict[torch.dtype, str] = {}
        for name, parameter in parameters:
            if parameter.requires_grad and parameter.dim() and name not in apart:
                dtypes.setdefault(parameter.dtype, name)
        if len(dtypes) > 1:
            shown = ", ".join(f"{name} is {str(dtype)[6:]}" for dtype, name in dtypes.items())
            raise PacelineError(
                "PL442",
                saw=f"trained parameters of {where} have several types: {shown}.",
                rule="Gradients of a block are summed over ranks as one vector, of one type.",
                fix="Convert the model to one type (trained parameters; frozen ones may have their own): "
                "keep complex weights as real pairs, and call torch.view_as_complex in the forward. Or use "
                "dp_shard=1.",
            )


def _precision_policy(settings: ShardSettings, *, is_root: bool) -> MixedPrecisionPolicy:
    param_dtype = _DTYPES[settings.param_dtype]
    wants_fp32 = settings.reduce_dtype == "fp32" or param_dtype is not None
    return MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=torch.float32 if wants_fp32 else None,
        # The loss is computed from this output; between blocks activations stay narrow.
        output_dtype=torch.float32 if is_root and param_dtype is not None else None,
        cast_forward_inputs=True,
    )


def _offload_policy(mesh: DeviceMesh, offload: str) -> OffloadPolicy:
    if offload != "cpu":
        return OffloadPolicy()
    if mesh.device_type == "cpu":
        log.info("shard: offload=cpu changes nothing for a model that is on the CPU")
        return OffloadPolicy()
    return CPUOffloadPolicy()


def _set_prefetch(units: list[Unit], ahead: int) -> None:
    """Set what is gathered early: in forward the next blocks, in backward the previous ones."""
    *blocks, root = [unit.module for unit in units if not unit.is_table]
    root.set_modules_to_forward_prefetch(blocks[:ahead])
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + ahead])
        before = blocks[max(0, place - ahead) : place][::-1]
        # An empty list means torch's own choice; a block that is already gathered means none.
        block.set_modules_to_backward_prefetch(before or [block])
    prefetch_last(units, ahead)


def prefetch_last(units: list[Unit], ahead: int) -> None:
    """Gather the last blocks as soon as backward begins.

    Args:
        units: the blocks, and the model last.
        ahead: number of blocks; 0 for none.
    """
    *blocks, root = [unit.module for unit in units if not unit.is_table]
    root.set_modules_to_backward_prefetch(blocks[::-1][:ahead] or [root])
