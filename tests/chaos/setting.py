"""Defines what is trained while processes die: a small run with everything that could go wrong in resuming.

Dropout, several DDP buckets, a ragged end of each epoch (also fewer microbatches than ranks), clipping,
a schedule, evaluations that fall between saves and on them, and a tokenizer whose cache is built by the
first start.
"""

from __future__ import annotations

import os
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAVE_EVERY = 4
# Every process of a start can be recognised by this variable of its environment, orphans too.
MARK = "PACELINE_CHAOS_START"

RECIPE = f"""
[model]
kind = "gpt"
layers = 3
hidden = 48
heads = 4
dropout = 0.1
[data]
kind = "text"
files = ["text/*.txt"]
tokenizer = "bpe"
vocab_size = 320
seq_len = 48
cache_dir = "cache"
valid_fraction = 0.1
[train]
epochs = 3
global_batch_size = 24
microbatch_size = 4
eval_every = 5
eval_samples = 16
clip_norm = 0.5
threads_per_rank = 1
timeout_s = 60
[optimizer]
kind = "adamw"
lr = 1e-3
[checkpoint]
every = {SAVE_EVERY}
keep = 3
[ddp]
bucket_cap_mb = 0.05
"""
# What changes for pipelines: blocks for four stages, ragged microbatches, few steps, no buckets of DDP.
_PIPELINE = {
    "layers = 3": "layers = 4",
    "epochs = 3": "steps = 20",
    "global_batch_size = 24": "global_batch_size = 11",
    "microbatch_size = 4": "microbatch_size = 2",
    "[ddp]\nbucket_cap_mb = 0.05\n": "",
}
# What changes for islands, whose share of every global batch is equal.
_ISLANDS = {"epochs = 3": "steps = 30"}
# Starts of a pipeline's run have these layouts in turn, the first one on a single rank.
PIPELINES = ("", "pp=2", "pp=4", "pp=2 dp_replicate=2", "pp=2 dp_shard=2")
_WORDS = re.findall(
    r"\w+", "the quick brown fox jumps over a lazy dog while nobody is dropped from the paceline"
)


def write_setting(folder: Path, case: Case | None = None) -> None:
    """Write the recipe of a case and its text."""
    chance = random.Random(0)
    (folder / "text").mkdir(parents=True)
    for number in range(4):
        words = [chance.choice(_WORDS) + chance.choice(("", "", "s", "ed", ",", ".")) for _ in range(2600)]
        (folder / "text" / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")
    recipe = RECIPE
    changes: dict[str, str] = {}
    if case is not None:
        changes = _PIPELINE if case.layouts else _ISLANDS if case.islands else {}
    for old, new in changes.items():
        assert old in recipe, old
        recipe = recipe.replace(old, new)
    (folder / "recipe.toml").write_text(recipe, encoding="utf-8")


@dataclass(frozen=True)
class Case:
    """A way to run it.

    Attributes:
        reduction: `train.reduction`.
        nproc: ranks, or `None` where each start draws its own number.
        num_workers: loader workers of a rank.
        mode: `checkpoint.mode`.
        asynchronous: `checkpoint.asynchronous`.
        layouts: of the starts, in turn; by default the ranks are replicas.
        dtype: `train.dtype`.
        compress: `compress.kind`; empty for none.
        islands: `islands.codec`; empty for no islands.
    """

    reduction: str
    nproc: int | None
    num_workers: int
    mode: str = "full"
    asynchronous: bool = False
    layouts: tuple[str, ...] = ()
    dtype: str = "fp32"
    compress: str = ""
    islands: str = ""

    @property
    def label(self) -> str:
        """The name in the report."""
        if self.layouts:
            return f"{self.dtype} under pipelines in turn"
        kind = f", {self.compress}" if self.compress else f", islands {self.islands}" if self.islands else ""
        return f"{self.reduction}{kind} on {self.nproc or 'changing numbers of'} ranks"

    @property
    def reference(self) -> str:
        """The uninterrupted run whose bits this one has: with exact reduction the same for any ranks."""
        if self.layouts:
            return f"pipelines-{self.dtype}"
        if self.compress:
            return f"exact-{self.compress}"
        if self.islands:
            return f"islands-{self.islands}"
        return "exact" if self.reduction == "exact" else f"fast-{self.nproc}"

    def words(self, out: str, nproc: int, layout: str = "") -> list[str]:
        """Return the command line after `paceline`."""
        settings = [f"train.reduction={self.reduction}", f"loader.num_workers={self.num_workers}"]
        settings += [f"checkpoint.mode={self.mode}"]
        settings += [f"checkpoint.asynchronous={str(self.asynchronous).lower()}"]
        settings += [f"train.dtype={self.dtype}", *(f"layout.{word}" for word in layout.split())]
        if self.compress:
            # As many slots as 1, 2, 3 and 4 ranks can share, and no fewer microbatches.
            settings += [f"compress.kind={self.compress}", "compress.slots=12", "train.microbatch_size=2"]
        if self.islands:
            settings += ["islands.count=12", "islands.every=3", "islands.warmup_steps=3"]
            settings += [f"islands.codec={self.islands}", "train.microbatch_size=2"]
        words = ["train", "recipe.toml", "--out", out, "--nproc", str(nproc)]
        return words + [word for setting in settings for word in ("--set", setting)]


def environment(mark: str, tmp: Path) -> dict[str, str]:
    """Return the environment of a start: its mark, and a folder of its own for temporary files."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    variables = {key: value for key, value in os.environ.items() if key not in foreign}
    path = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
    return variables | {MARK: mark, "TMPDIR": str(tmp), "PYTHONPATH": path}


PLAIN = [sys.executable, "-m", "paceline"]
FAULTY = [sys.executable, "-m", "tests.chaos.faulty"]
