"""The table of settings: beside a key's type and meaning (`schema.py`), its name elsewhere and at a resume.

From this table follow which keys may change when a run resumes (`resume.py`), which settings a checkpoint
keeps and ranks compare (`train/arguments.py`), how a recipe becomes a trainer (`train/run.py`), and the marks
of docs/recipe.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.recipe.schema import Recipe


@dataclass(frozen=True)
class Setting:
    """A key of a recipe, or a section for all of its keys.

    Attributes:
        key: of the recipe.
        argument: of `Trainer`, "" if it has none.
        may_change: why it may change between two starts of one run, because it does not change the meaning
            of the steps already taken; "" if it defines the run.
        names: of the settings in a checkpoint that follow from it. One stands for all that begin with it and
            a dot.
        is_local: whether rank 0's value counts, so that ranks do not compare it.
    """

    key: str
    argument: str = ""
    may_change: str = ""
    names: tuple[str, ...] = ()
    is_local: bool = False


_LOOK, _LIMIT = "looking does not change the run", "a limit, not a part of the arithmetic"
_BITS = "changes last bits only, and resuming reports it"
_LAYOUT = "the same numbers on any layout"

SETTINGS = (
    Setting("data", names=("train.data", "valid.data", "loaders.train", "loaders.valid")),
    Setting("data.cache_dir", may_change="where files lie"),
    Setting(
        "train.steps",
        may_change="a run may be made longer or shorter; the schedule is then that of the new length",
    ),
    Setting("train.epochs", may_change="as train.steps"),
    Setting("train.global_batch_size", names=("train.global_batch_size", "valid.global_batch_size")),
    Setting(
        "train.microbatch_size",
        "microbatch_size",
        names=("microbatch_size", "train.microbatch_size", "valid.microbatch_size"),
    ),
    Setting("train.eval_every", may_change=_LOOK),
    Setting("train.eval_samples", may_change=_LOOK),
    Setting("train.dtype", "dtype", names=("dtype",)),
    Setting("train.reduction", "reduction", may_change=_BITS),
    Setting("train.threads_per_rank", may_change=_BITS),
    Setting("train.device", may_change=_BITS),
    Setting("train.clip_norm", "clip_norm", names=("clip_norm",)),
    Setting("train.seed", "seed", names=("seed",)),
    Setting("train.sync_batchnorm", "sync_batchnorm", names=("sync_batchnorm",)),
    Setting("train.compile", "compile", may_change="changes last bits only"),
    Setting("train.max_skipped_in_a_row", "max_skipped_in_a_row", may_change=_LIMIT),
    Setting("train.timeout_s", may_change=_LIMIT),
    Setting("optimizer", names=("optimizer", "schedule")),
    Setting("layout", may_change=_LAYOUT),
    Setting("elastic", may_change=_LAYOUT),
    Setting("ddp", may_change="speed only"),
    Setting("compress.kind", names=("compress.kind",)),
    Setting("compress.density", names=("compress.density",)),
    Setting("compress.rank", names=("compress.rank",)),
    Setting("compress.after_steps", names=("compress.after_steps",)),
    Setting("compress.links", may_change="how sums are distributed; the same numbers for a number of slots"),
    Setting(
        "compress.slots",
        may_change="the checkpoint has the number of slots, and compares it",
        names=("compress.slots",),
    ),
    Setting("shard.reshard_after_forward", may_change="memory and speed only"),
    Setting("shard.prefetch", may_change="memory and speed only"),
    Setting("shard.offload_folder", may_change="where files lie"),
    Setting("loader", may_change="speed only"),
    Setting("checkpoint", may_change="what is kept, not what is computed"),
    Setting("checkpoint.keep", "keep", is_local=True),
    Setting("checkpoint.mode", "checkpoint_mode"),
    Setting("checkpoint.copies", "checkpoint_copies"),
    Setting("checkpoint.asynchronous", "asynchronous_saves"),
    Setting("checkpoint.max_failed", "max_failed_saves"),
    Setting("metrics", may_change="what is written, not what is computed"),
    Setting("metrics.tensorboard", "tensorboard", is_local=True),
    Setting("metrics.peak_flops", "peak_flops", is_local=True),
)

RESUMABLE = {each.key: each.may_change for each in SETTINGS if each.may_change}
"""The keys and sections that may change between two starts of one run, with the reason."""


def read_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `Trainer` that are keys of a recipe."""
    table = {each.argument: each.key.split(".") for each in SETTINGS if each.argument}
    return {name: getattr(getattr(recipe, section), key) for name, (section, key) in table.items()}
