"""Checks the arguments of public calls against their annotations, and explains those of other tools."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.errors import PacelineError

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
        'schedule=paceline.schedule("cosine", num_steps=1000, warmup_steps=100), or any function from an '
        "optimizer to a scheduler",
        "scheduler lr_scheduler lr_scheduler_type warmup warmup_steps warmup_ratio schedulers lr_scaling",
    ),
    (
        "loss=lambda output, batch: (sum_of_losses, weight)",
        "loss_fn criterion loss_function loss_func compute_loss",
    ),
    ("loader=trainer.loader(data, global_batch_size=64, shuffle=False)", ""),
    ("nproc=", "nprocs nproc_per_node num_processes world_size"),
    ('dtype="bf16"', "mixed_precision precision amp fp16 bf16 torch_dtype use_amp"),
    ("clip_norm=1.0", "max_grad_norm gradient_clip_val gradient_clipping clip_grad clip_grad_norm max_norm"),
    (
        'layout="dp_shard=4 tp=2", and the number of ranks of the launcher',
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
    ("ema=0.999", "ema_decay use_ema averaged_model swa"),
    (
        "the loop: for batch in loader: step = trainer.step(batch)",
        "callbacks logger log_every_n_steps logging_steps report_to log_with",
    ),
    ("nothing: workers live as long as the loader", "persistent_workers"),
    ("nothing: the loader seeds random numbers by sample", "generator worker_init_fn"),
    ("seed= of Trainer or of paceline.start", "random_seed manual_seed"),
    ("nn.BatchNorm, with a larger microbatch_size=", "sync_bn use_sync_bn sync_batchnorm"),
    ("forward=lambda model, batch: model(...)", "forward_fn training_step step_fn"),
)


_NONE = inspect.Parameter.empty
_PLAIN = (str, int, float, list, tuple, dict, type(None))


def explain_arguments(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public call, so that it refuses arguments which it does not take.

    An unknown name raises PL929, with what to use here. A value that is not of the annotated type raises
    PL400: without this, it would fail far inside, or do nothing.
    """

    @functools.wraps(call)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        check_arguments(call, args, kwargs)
        return call(*args, **kwargs)

    return explained


def check_arguments(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_whole: bool = True,
) -> None:
    """Raise PL929 or PL400 for arguments that a call does not take.

    Args:
        call: a function, or a method as its class has it.
        args, kwargs: the arguments; of a method with the object or its class in front.
        is_whole: whether these are all arguments, none of which may be missing.
    """
    signature, hints = _read(call)
    owner = None
    if "self" in signature.parameters:
        owner = args[0] if isinstance(args[0], type) else type(args[0])
    called = f"{owner.__name__}.{call.__name__}".removesuffix(".__init__") if owner else call.__name__
    try:
        given = (signature.bind if is_whole else signature.bind_partial)(*args, **kwargs).arguments
    except TypeError as error:
        raise _name_error(called, owner, signature, kwargs, str(error)) from None
    for name, value in given.items():
        if name not in hints or _fits(value, hints[name]):
            continue
        default = signature.parameters[name].default
        # Some of the texts go on after the name, and have no value.
        example = next((ours for ours, _ in _WORDS if re.match(f"{name}=[^ ,]", ours)), "such a value")
        shown = repr(value) if isinstance(value, _PLAIN) else f"{type(value).__name__}(...)"
        raise PacelineError(
            "PL400",
            saw=f"{called}({name}={shown}).",
            rule=f"{name} takes {signature.parameters[name].annotation}.",
            fix=f"Pass {example}."
            if default is _NONE
            else f"Leave {name}= out for {default!r}, or pass {example}.",
        )


@functools.cache
def _read(call: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    return inspect.signature(call), get_type_hints(call)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type; an item of a wrong type in a list or dict is not."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if hint is bool:
        return isinstance(value, (bool, int)) and value in (0, 1)
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if origin is None:
        # A type variable or a protocol says too little.
        return not isinstance(hint, type) or getattr(hint, "_is_protocol", False) or isinstance(value, hint)
    if not isinstance(value, origin) or (isinstance(value, (str, bytes)) and bool(inner)):
        return False
    if issubclass(origin, Mapping):
        return all(_fits(key, inner[0]) and _fits(each, inner[1]) for key, each in value.items())
    if origin is tuple and ... not in inner:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    # Not those of an iterator, which would be used up, or of a loader.
    return (
        not isinstance(value, Collection) or len(inner) != 1 or all(_fits(each, inner[0]) for each in value)
    )


def _name_error(
    name: str, owner: type | None, signature: inspect.Signature, kwargs: Mapping[str, Any], reason: str
) -> PacelineError:
    to_build = inspect.signature(owner).parameters if owner else {}
    known = [key for key in signature.parameters if key != "self"]
    unknown = [key for key in kwargs if key not in known]
    positional = [
        key for key in known if signature.parameters[key].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    return PacelineError(
        "PL929",
        saw=f"{name}({', '.join(f'{key}=...' for key in unknown)}): {reason}.",
        rule=f"{name} takes {', '.join(positional) or 'nothing'} in order, and the rest by name.",
        fix=" ".join(
            f"Pass {key}= to {owner.__name__}." if owner and key in to_build else _explain(key, known)
            for key in unknown
        )
        or f"Its names are {', '.join(known)}.",
    )


def _explain(word: str, known: list[str]) -> str:
    # "world_size" is another thing for a loader than for a launcher.
    for ours, words in sorted(_WORDS, key=lambda each: each[0].partition("=")[0] not in known):
        if word.lower() in words.split():
            return f"For {word}=, use {ours}."
    near = difflib.get_close_matches(word, known, 1)
    return (
        f"For {word}=, use {near[0]}=." if near else f"Leave {word}= out; the names are {', '.join(known)}."
    )
