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
class RecipeKey:
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
    RecipeKey("data", names=("train.data", "valid.data", "loaders.train", "loaders.valid")),
    RecipeKey("data.cache_dir", may_change="where files lie"),
    RecipeKey(
        "train.steps",
        may_change="a run may be made longer or shorter; the schedule is then that of the new length",
    ),
    RecipeKey("train.epochs", may_change="as train.steps"),
    RecipeKey("train.global_batch_size", names=("train.global_batch_size", "valid.global_batch_size")),
    RecipeKey(
        "train.microbatch_size",
        "microbatch_size",
        names=("microbatch_size", "train.microbatch_size", "valid.microbatch_size"),
    ),
    RecipeKey("train.eval_every", may_change=_LOOK),
    RecipeKey("train.patience", may_change="as train.steps"),
    RecipeKey("train.eval_samples", may_change=_LOOK),
    RecipeKey("train.dtype", "dtype", names=("dtype",)),
    RecipeKey("train.reduction", "reduction", may_change=_BITS),
    RecipeKey("train.threads_per_rank", may_change=_BITS),
    RecipeKey("train.device", may_change=_BITS),
    RecipeKey("train.clip_norm", "clip_norm", names=("clip_norm",)),
    RecipeKey("train.seed", "seed", names=("seed",)),
    RecipeKey("train.compile", "compile", may_change="changes last bits only"),
    RecipeKey("train.max_skipped_in_a_row", "max_skipped_in_a_row", may_change=_LIMIT),
    RecipeKey("train.timeout_s", may_change=_LIMIT),
    RecipeKey("optimizer", names=("optimizer", "schedule")),
    RecipeKey("layout", may_change=_LAYOUT),
    RecipeKey("ddp", may_change="speed only"),
    RecipeKey("compress.kind", names=("compress.kind",)),
    RecipeKey(
        "compress.slots",
        may_change="the checkpoint has the number of slots, and compares it",
        names=("compress.slots",),
    ),
    RecipeKey("islands", names=("islands",)),
    RecipeKey("asynchronous"),
    RecipeKey("shard.prefetch", may_change="memory and speed only"),
    RecipeKey("loader", may_change="speed only"),
    RecipeKey("checkpoint", may_change="what is kept, not what is computed"),
    RecipeKey("checkpoint.keep", "keep", is_local=True),
    RecipeKey("checkpoint.mode", "checkpoint_mode"),
    RecipeKey("checkpoint.asynchronous", "asynchronous_saves"),
    RecipeKey("checkpoint.max_failed", "max_failed_saves"),
    RecipeKey("metrics", may_change="what is written, not what is computed"),
    RecipeKey("metrics.sinks", "sinks", is_local=True),
    RecipeKey("metrics.peak_flops", "peak_flops", is_local=True),
)

RESUMABLE = {each.key: each.may_change for each in SETTINGS if each.may_change}
"""The keys and sections that may change between two starts of one run, with the reason."""


def read_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `Trainer` that are keys of a recipe."""
    table = {each.argument: each.key.split(".") for each in SETTINGS if each.argument}
    return {name: getattr(getattr(recipe, section), key) for name, (section, key) in table.items()}
