"""Tables of what Paceline has for the keys of a DeepSpeed JSON and of an Accelerate YAML, one row per key.

A key without a row is refused, and so is a value that its row does not know: it might change results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """What one key becomes.

    `to` is a key of a recipe or a flag of `paceline run`, and `why` what a reader should know. `values` are
    those that it takes, with Paceline's (None: left out), or a function; without them, any is left out.
    """

    to: str = ""
    why: str = ""
    values: Mapping[Any, Any] | Callable[[Any], Any] | None = None
    is_refused: bool = False


@dataclass(frozen=True)
class Imported:
    """What became of one key of a file."""

    key: str
    value: Any
    state: Literal["mapped", "left out", "refused"]
    says: str
    to: str = ""
    becomes: Any = None


def _refuse(why: str, *harmless: Any) -> Row:
    return Row(why=why, values=dict.fromkeys([*harmless, False]), is_refused=True)


def _leave(why: str) -> Row:
    return Row(why=why)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)  # YAML and hand-written JSON have "1e-4" as text


def _count(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _each(names: str, row: Row) -> dict[str, Row]:
    return dict.fromkeys(names.split(), row)


_SPEED, _LOOK = _leave("changes speed or memory only"), _leave("changes what is reported only")
_SCALE = _leave("the scale of fp16 is found while training; the first steps may be skipped differently")
_NONE_YET = "Paceline has nothing like it"
_OFFLOAD = Row("layout.offload", "of parameters and optimizer state together", {"cpu": "cpu", "none": None})
_FOLLOWS = Row("accumulation", "follows from the global batch, the microbatch and the ranks", _count)
_HERE = "not the warm-up of recipes, which rises linearly from 0; pass Trainer(schedule=...)"
_DECAY = (
    "recipes decay matrices only, and norms and biases not; a Trainer's optimizer decays what you give it"
)

DEEPSPEED: dict[str, Row] = {
    "train_batch_size": Row("train.global_batch_size", "", _count),
    "train_micro_batch_size_per_gpu": Row("train.microbatch_size", "", _count),
    "gradient_accumulation_steps": _FOLLOWS,
    "gradient_clipping": Row("train.clip_norm", "", _number),
    "bf16.enabled": Row("train.dtype", "autocast over weights in fp32", {True: "bf16"}),
    "bf16.check_grad_overflow": _SPEED,
    "fp16.enabled": Row("train.dtype", "autocast over weights in fp32", {True: "fp16"}),
    "fp16.auto_cast": _leave("forwards always run under autocast"),
    **_each("fp16.*loss_scale* fp16.initial_scale_power fp16.*hysteresis", _SCALE),
    "zero_optimization.stage": Row("layout.zero", "", {0: 0, 1: 1, 2: 2, 3: 3}),
    "zero_optimization.offload_optimizer.device": _OFFLOAD,
    "zero_optimization.offload_param.device": _OFFLOAD,
    "zero_optimization.offload_optimizer.ratio": _refuse("all of the state is moved, or none", 1, 1.0),
    "zero_optimization.offload_*": _SPEED,
    "zero_optimization.zero_quantized_*": _refuse("values are sent as they are, which changes results"),
    "zero_optimization.mics_shard_size": Row("layout.dp_shard", "shards within groups of ranks", _count),
    "zero_optimization.mics_*": _SPEED,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _leave(
        "`paceline checkpoint export` writes whole weights from any checkpoint"
    ),
    **_each(
        """zero_optimization.allgather_* zero_optimization.overlap_comm zero_optimization.reduce_scatter
        zero_optimization.reduce_bucket_size zero_optimization.contiguous_gradients
        zero_optimization.sub_group_size zero_optimization.round_robin_gradients
        zero_optimization.stage3_max_* zero_optimization.stage3_prefetch_bucket_size
        zero_optimization.stage3_param_persistence_threshold zero_optimization.memory_efficient_linear
        zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.ignore_unused_parameters
        optimizer.params.torch_adam optimizer.params.fused optimizer.legacy_fusion sparse_gradients
        disable_allgather zero_force_ds_cpu_optimizer aio.*""",
        _SPEED,
    ),
    **_each(
        """steps_per_print wall_clock_breakdown dump_state memory_breakdown tensorboard.* wandb.*
        csv_monitor.* comet.* flops_profiler.* comms_logger.*""",
        _LOOK,
    ),
    "optimizer.type": Row(
        "optimizer.kind", "", {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "sgd": "sgd"}
    ),
    "optimizer.params.amsgrad": _refuse("recipes have no AMSGrad; pass Trainer(optimizer=...)"),
    "optimizer.params.lr": Row("optimizer.lr", "", _number),
    "optimizer.params.betas": Row("optimizer.betas", "", lambda value: [float(each) for each in value]),
    "optimizer.params.eps": Row("optimizer.eps", "", _number),
    "optimizer.params.weight_decay": Row("optimizer.weight_decay", _DECAY, _number),
    "optimizer.params.momentum": Row("optimizer.momentum", "", _number),
    "optimizer.params.nesterov": Row("optimizer.nesterov", "", {True: True, False: False}),
    "optimizer.params.adam_w_mode": Row(
        "", "decay is decoupled; pass Trainer(optimizer=...) for torch.optim.Adam", {True: None}
    ),
    "scheduler.type": Row(
        "optimizer.schedule",
        "one step ahead of DeepSpeed's, whose first step has the rate of the start",
        {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"},
    ),
    "scheduler.params.warmup_num_steps": Row("optimizer.warmup_steps", "", _count),
    "scheduler.params.total_num_steps": Row("train.steps", "", _count),
    "scheduler.params.warmup_max_lr": Row("optimizer.lr", "", _number),
    "scheduler.params.cos_min_ratio": Row("optimizer.min_lr_ratio", "", _number),
    **_each("scheduler.params.warmup_min_lr scheduler.params.warmup_min_ratio", Row("", _HERE, {0: None})),
    "scheduler.params.warmup_type": Row("", _HERE, {"linear": None}),
    **_each(
        "communication_data_type data_types.grad_accum_dtype",
        Row("", "gradients are summed in fp32", {"fp32": None}),
    ),
    "activation_checkpointing.*": _leave(
        "takes effect by calls in a model's code; here it is recompute=block"
    ),
    **_each("prescale_gradients gradient_predivide_factor", _leave("sums over samples are divided once")),
    "zero_allow_untested_optimizer": _leave("any optimizer may be sharded"),
    "tensor_parallel.autotp_size": Row("layout.tp", "", lambda size: _count(size) or None),
    "compile.*": _leave("Trainer(compile=True) compiles the model"),
    **_each(
        "checkpoint.* zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint",
        _leave("checkpoints load under any layout"),
    ),
    "elasticity.*": _refuse("a batch does not depend on the ranks; see [elastic] in docs/recipe.md"),
}

_STRATEGY: dict[Any, Any] = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}
_STRATEGY |= {"HYBRID_SHARD": "3 in each node"}
_STRATEGY |= dict.fromkeys(("HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2"), "2 in each node")
_SHARDING = Row(
    "layout.zero",
    "",
    # By number too, as older files have it, and by whether FSDP 2 frees parameters after the forward.
    _STRATEGY | {False: 2} | dict(enumerate(dict.fromkeys(_STRATEGY.values()), start=1)),
)

ACCELERATE: dict[str, Row] = {
    "distributed_type": Row(
        "layout",
        "shown below",
        # YAML reads a bare NO as false.
        {each: each for each in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")} | {False: "NO"},
    ),
    "compute_environment": Row("", "it is not this machine", {"LOCAL_MACHINE": None}),
    "num_processes": Row("--nproc-per-node", "of all machines", _count),
    "num_machines": Row("--nnodes", "", _count),
    "machine_rank": Row("--node-rank", "", _count),
    "main_process_ip": Row("--master-addr", "", str),
    "main_process_port": Row("--master-port", "", _count),
    "rdzv_backend": Row("--rdzv-backend", "", {"static": None, "c10d": "c10d"}),
    "mixed_precision": Row(
        "train.dtype",
        "autocast over weights in fp32, under FSDP and DeepSpeed too",
        {"no": "fp32", "bf16": "bf16", "fp16": "fp16", False: "fp32"},
    ),
    "use_cpu": Row("train.device", "", {True: "cpu", False: None}),
    "gradient_accumulation_steps": _FOLLOWS,
    "gpu_ids": Row("CUDA_VISIBLE_DEVICES", "", lambda ids: None if ids == "all" else str(ids)),
    "downcast_bf16": _refuse("it is for TPUs", "no"),
    "fsdp_config.fsdp_sharding_strategy": _SHARDING,
    "fsdp_config.fsdp_reshard_after_forward": _SHARDING,
    "fsdp_config.fsdp_offload_params": Row("layout.offload", "", {True: "cpu", False: None}),
    "fsdp_config.fsdp_activation_checkpointing": Row("layout.recompute", "", {True: "block", False: None}),
    "fsdp_config.fsdp_state_dict_type": Row(
        "checkpoint.mode",
        "checkpoints of either mode load under any layout",
        {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded"},
    ),
    "fsdp_config.fsdp_version": _leave("sharding is torch's fully_shard, FSDP 2"),
    "fsdp_config.fsdp_use_orig_params": _leave("parameters keep their names and shapes"),
    "fsdp_config.fsdp_sync_module_states": _leave("all ranks begin with the weights of one seed"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": _leave("paceline.pretrained reads a rank's part only"),
    "deepspeed_config.zero_stage": DEEPSPEED["zero_optimization.stage"],
    "deepspeed_config.gradient_accumulation_steps": _FOLLOWS,
    "deepspeed_config.gradient_clipping": DEEPSPEED["gradient_clipping"],
    "deepspeed_config.offload_optimizer_device": _OFFLOAD,
    "deepspeed_config.offload_param_device": _OFFLOAD,
    "deepspeed_config.deepspeed_config_file": Row("", "import that file too, for all but the command", {}),
    "deepspeed_config.zero3_init_flag": _leave(
        "parameters are built on the meta device where that is needed"
    ),
    **{
        f"parallelism_config.parallelism_config_{axis}_size": Row(f"layout.{axis}", "", _count)
        for axis in ("dp_replicate", "dp_shard", "tp", "cp")
    },
    "dynamo_config.dynamo_backend": Row(
        "train.compile", "", {"INDUCTOR": True, "inductor": True, "NO": None, "no": None}
    ),
    **_each(
        """fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_transformer_layer_cls_to_wrap
        fsdp_config.fsdp_min_num_params""",
        _leave("blocks are the model's repeated layers, found by themselves"),
    ),
    **_each(
        """fsdp_config.fsdp_backward_prefetch* fsdp_config.fsdp_forward_prefetch enable_cpu_affinity
        fsdp_config.fsdp_limit_all_gathers deepspeed_config.offload_*_nvme_path dynamo_config.*""",
        _SPEED,
    ),
    **_each(
        """deepspeed_config.deepspeed_multinode_launcher mpirun_config.* same_network
        main_training_function""",
        _leave("Paceline starts ranks by itself"),
    ),
    "debug": _leave("collectives that do not match are always found (docs/hangs.md)"),
    "tpu_*": _refuse("TPUs are not supported"),
}


def translate(config: Mapping[str, Any], table: Mapping[str, Row]) -> list[Imported]:
    """Return what becomes of each key of a file."""
    return [_judge(key, value, table) for key, value in _flatten(config)]


def _judge(key: str, value: Any, table: Mapping[str, Row]) -> Imported:
    row = table.get(key) or next((table[each] for each in table if fnmatchcase(key, each)), None)
    if (key.endswith(".enabled") and value is False) or value in ({}, [], None):
        return Imported(key, value, "left out", "it is off, or not set")
    if row is None:
        return Imported(key, value, "refused", _NONE_YET)
    if row.values is None:
        return Imported(key, value, "left out", row.why)
    if value == "auto":
        return Imported(key, value, "refused", "its number is elsewhere, in TrainingArguments; write it here")
    try:
        word = value.lower() if table is DEEPSPEED and isinstance(value, str) else value
        becomes = row.values(word) if callable(row.values) else row.values[word]
    except (KeyError, TypeError, ValueError, OverflowError):
        known = [] if callable(row.values) or row.is_refused else [*row.values]
        takes = f"known: {', '.join(map(str, known))}" if known else ""
        says = "; ".join(filter(None, (row.why, takes))) or "not such a value"
        return Imported(key, value, "refused", says)
    if becomes is None or not row.to:
        return Imported(key, value, "left out", "as here" if not row.is_refused else "it is off")
    return Imported(key, value, "mapped", row.why, row.to, becomes)


def _flatten(config: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Return all keys with dots between levels; a section that is switched off is one key."""
    if above and config.get("enabled") is False:
        return [(f"{above}enabled", False)]
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        name = f"{above}{key}"
        is_section = isinstance(value, dict) and value and name.count(".") < 9
        found += _flatten(value, f"{name}.") if is_section else [(name, value)]
    return found
