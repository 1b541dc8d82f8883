"""Explains arguments and models of other tools in Paceline's words."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch_seams.modules import find_compiled

P = ParamSpec("P")
R = TypeVar("R")

# What to use here, and the words for it of Accelerate, DeepSpeed, Lightning, torch and transformers.
_WORDS = (
    (
        "global_batch_size= of trainer.loader, the samples of all ranks per step, and "
        "microbatch_size= of Trainer, the samples per forward; the number of accumulated microbatches"
        " follows from both",
        "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum_steps "
        "batch_size per_device_train_batch_size per_device_eval_batch_size train_batch_size "
        "micro_batch_size train_micro_batch_size_per_gpu",
    ),
    (
        "optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4)",
        "lr learning_rate weight_decay optimizers optim optimizer_cls params model_parameters",
    ),
    (
        "schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, ...)",
        "scheduler lr_scheduler lr_scheduler_type warmup_steps warmup_ratio schedulers",
    ),
    (
        "loss=lambda output, batch: (sum_of_losses, weight)",
        "loss_fn criterion loss_function loss_func compute_loss",
    ),
    ('dtype="bf16"', "mixed_precision precision amp fp16 bf16 torch_dtype use_amp"),
    ("clip_norm=1.0", "max_grad_norm gradient_clip_val gradient_clipping clip_grad clip_grad_norm max_norm"),
    (
        'layout=, for example "dp_shard=4 tp=2", and the number of ranks of the launcher',
        "strategy plugins fsdp fsdp_config fsdp_plugin deepspeed deepspeed_plugin devices num_nodes "
        "accelerator tensor_parallel_size pipeline_parallel_size device_map device_mesh mesh "
        "parallelism num_processes",
    ),
    ("paceline.start(device=...)", "device device_id device_ids no_cuda use_cpu cpu backend"),
    ("epochs= of trainer.loader, and break", "max_steps num_train_epochs max_epochs num_epochs steps epochs"),
    (
        "trainer.resume(folder), and trainer.save() in the loop",
        "output_dir default_root_dir save_dir project_dir resume_from_checkpoint save_steps "
        "save_strategy enable_checkpointing ckpt_path checkpoint",
    ),
    ("keep=", "save_total_limit total_limit"),
    (
        "trainer.keep_best(value), which counts evaluations that were not better",
        "save_top_k patience early_stopping early_stopping_patience load_best_model_at_end "
        "metric_for_best_model",
    ),
    (
        "trainer.loader(DataLoader(data, batch_size=64, sampler=...)), with a batch of all ranks together",
        "sampler batch_sampler weights",
    ),
    (
        "trainer.loader(dataset, global_batch_size=...), which divides and shuffles the data by itself",
        "train_dataset eval_dataset train_dataloader train_dataloaders val_dataloaders dataloader "
        "loader train_loader dataset data num_replicas rank world_size "
        "split_batches dispatch_batches",
    ),
    ("trainer.evaluate(loader, metrics={...})", "compute_metrics metrics eval_steps val_check_interval"),
    (
        'ddp={"find_unused_parameters": True, ...}',
        "find_unused_parameters bucket_cap_mb gradient_as_bucket_view",
    ),
    (
        'layout="... recompute=block"',
        "gradient_checkpointing activation_checkpointing use_checkpoint checkpointing",
    ),
    ("compile=True", "torch_compile compile_model"),
    ("ema=0.999", "ema_decay use_ema averaged_model swa"),
    (
        "the loop: for batch in loader: step = trainer.step(batch)",
        "callbacks logger log_every_n_steps logging_steps report_to log_with",
    ),
    ("collate=", "collate_fn data_collator collator"),
    ("prefetch=", "prefetch_factor"),
    ("num_workers=", "workers dataloader_num_workers num_data_workers"),
    ("nothing: workers live as long as the loader", "persistent_workers"),
    ("nothing: the loader seeds random numbers by sample", "generator worker_init_fn"),
    ("seed= of Trainer or of paceline.start", "random_seed manual_seed"),
    ('sync_batchnorm=True, or dp ranks with reduction="exact"', "sync_bn use_sync_bn"),
    ("forward=lambda model, batch: model(...)", "forward_fn training_step step_fn"),
)


def explain_arguments(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a call so that arguments which it does not take raise PL929, with what to use here."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _argument_error(type(args[0]), call.__name__, signature, kwargs, str(error)) from None
        return call(*args, **kwargs)

    return explained


def _argument_error(
    owner: type, call: str, signature: inspect.Signature, kwargs: Mapping[str, Any], reason: str
) -> PacelineError:
    name = f"{owner.__name__}.{call}".removesuffix(".__init__")
    to_build = inspect.signature(owner).parameters
    known = [key for key in signature.parameters if key != "self"]
    unknown = [key for key in kwargs if key not in known]
    positional = [
        key for key in known if signature.parameters[key].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    return PacelineError(
        "PL929",
        saw=f"{name}({', '.join(f'{key}=...' for key in unknown)}): {reason}.",
        rule=f"{name} takes {', '.join(positional)} in order, and the rest by name.",
        fix=" ".join(
            f"Pass {key}= to {owner.__name__}." if key in to_build else _explain(key, known)
            for key in unknown
        )
        or f"Its names are {', '.join(known)}.",
    )


def _explain(word: str, known: list[str]) -> str:
    for ours, words in _WORDS:
        if word.lower() in words.split():
            return f"For {word}=, use {ours}."
    near = difflib.get_close_matches(word, known, 1)
    return (
        f"For {word}=, use {near[0]}=." if near else f"Leave {word}= out; the names are {', '.join(known)}."
    )


def open_models(model: Any, compiles: bool) -> tuple[Any, bool]:
    """Return the modules that `Trainer` trains, without the wrappers of `torch.compile`.

    Args:
        model: a module, a factory, or a dict of these.
        compiles: whether the trainer compiles them.

    Returns:
        The models, and whether to compile them after they are laid out.

    Raises:
        PacelineError: PL929 for a model that another tool has laid out.
    """
    if isinstance(model, Mapping):
        opened = {name: open_models(each, compiles) for name, each in model.items()}
        return {name: each for name, (each, _) in opened.items()}, any(found for _, found in opened.values())
    if not isinstance(model, nn.Module):
        return model, compiles
    while found := find_compiled(model):  # its parameters have a prefix
        name, module = found
        if name:
            model.set_submodule(name, module)
        model, compiles = model if name else module, True
    wrapped = isinstance(model, (DistributedDataParallel, nn.DataParallel, FSDPModule))
    if wrapped or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise PacelineError(
            "PL929",
            saw=f"a model that is laid out already, a {type(model).__name__}.",
            rule="The trainer lays out the model itself and sums its gradients; both would count twice.",
            fix='Pass the module as it was before, with layout="dp_replicate=2", "dp_shard=2" or another.',
        )
    return model, compiles


def refuse_compiled(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a factory that raises PL929 for a compiled model, whose names would have a prefix."""

    @functools.wraps(factory)
    def build() -> nn.Module:
        model = factory()
        if isinstance(model, nn.Module) and find_compiled(model) is not None:
            raise PacelineError(
                "PL929",
                saw="a factory that returns a model compiled by torch.compile.",
                rule="The model is laid out first, and compiled then.",
                fix="Return the model uncompiled, and pass Trainer(compile=True).",
            )
        return model

    return build
