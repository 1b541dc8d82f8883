"""Starts a script or a recipe on ranks with a timer in each, by `paceline run` or `train`.

A rank ends as soon as it has been timed, so nothing is trained to its end. A recipe's run has a folder of its
own that is removed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.bench.rank.timing import ENTRY, WHOLE, RankTimes, TimeSettings, name_result
from paceline.errors import PacelineError
from paceline.launching.rank import requests
from paceline.launching.rank.requests import read_table
from paceline.place import is_launched, usable_cores
from paceline.profiling.analysis import Profile, analyse
from paceline.profiling.read import read_traces
from paceline.recipe import Recipe, dump_recipe
from paceline.recipe.layout import Layout

NUM_WARM_UP = 3
"""Steps that are left out: the first one counts operations, the second one lets DDP rearrange its buckets."""
_TAIL_LINES = 12


@dataclass(frozen=True)
class Measured:
    """A script or a recipe that is measured.

    Attributes:
        words: a script and its arguments; empty for a recipe.
        recipe: of a run; its layout, length and checkpoints play no part.
    """

    words: tuple[str, ...] = ()
    recipe: Recipe | None = None

    @property
    def device(self) -> str:
        """The device that ranks are to use, if it is known."""
        return "auto" if self.recipe is None else self.recipe.train.device

    def choose_threads(self, most_ranks: int) -> int:
        """Return the threads per rank for all numbers of ranks alike: the recipe's, or cores / most ranks."""
        own = "auto" if self.recipe is None else self.recipe.train.threads_per_rank
        return max(1, usable_cores() // most_ranks) if own == "auto" else own

    def run(self, num_ranks: int, threads: int, settings: TimeSettings, *, grow: int = 1) -> Run:
        """Start ranks, and return their times once they have ended.

        Args:
            num_ranks: how many.
            settings: what each of them does.
            grow: factor on a recipe's global batch.
        """
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
            folder = Path(name)
            request = {requests.ENTRY: ENTRY, "settings": asdict(replace(settings, folder=name))}
            requests.write_whole(folder / "request.json", request)
            flags = ["--json", "--bench", str(folder / "request.json")]
            words = self._command(folder, num_ranks, threads, settings, flags, grow)
            with open(folder / "output", "w+b") as output:
                command = [sys.executable, "-m", "paceline", *words]
                subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
                )
                output.seek(0)
                said = output.read().decode(errors="replace")
            ranks = [self._read_rank(folder, rank, said) for rank in range(num_ranks)]
            return Run(ranks, _read_profile(folder / "recording"))

    def _command(
        self,
        folder: Path,
        num_ranks: int,
        threads: int,
        settings: TimeSettings,
        flags: Sequence[str],
        grow: int,
    ) -> list[str]:
        num = str(num_ranks)
        if self.recipe is None:
            more = ["--no-lint", "--log-dir", str(folder / "logs"), "--threads-per-rank", str(threads)]
            return ["run", "--nproc-per-node", num, *flags, *more, *self.words]
        recipe = adapt_recipe(
            self.recipe,
            threads=threads,
            # The timer ends the ranks; the recording may have some steps more.
            num_steps=count_steps(settings) + 1000,
            layout=Layout(dp_replicate=num_ranks),
            grow=grow,
            microbatch_factor=max(1, settings.threads),
        )
        path = folder / "recipe.toml"
        path.write_text(dump_recipe(recipe), encoding="utf-8")
        return ["train", str(path), "--nproc", num, *flags, "--out", str(folder / "run")]

    def _read_rank(self, folder: Path, rank: int, said: str) -> RankTimes:
        table = read_table(folder / name_result(rank))
        times = None if table is None else RankTimes(**table)
        if times is not None and times.block_s.get(WHOLE):
            return times
        tail = "\n".join(map(_read_error, said.strip().splitlines()[-_TAIL_LINES:]))
        steps = "no optimizer step" if times is None or not times.count else f"{times.count} optimizer steps"
        raise PacelineError(
            "PL955",
            saw=f"{steps} of rank {rank} before its end.",
            rule="Steps of optimizers are timed in the ranks that Paceline starts, after some to warm up. A "
            "script may start ranks by mp.spawn, and by nothing else.",
            fix="Let the script take more steps, or lower --steps and --repeats. Its output ends with:\n"
            + (tail or "(nothing)"),
        )


@dataclass(frozen=True)
class Run:
    """The times of all ranks of a job.

    Attributes:
        ranks: by rank.
        profile: of some steps after the last block, if they were recorded.
    """

    ranks: list[RankTimes]
    profile: Profile | None

    def step_s(self, mode: str = WHOLE) -> list[float]:
        """Return the seconds of a step in each block: a step is over when the last rank has finished it."""
        return [
            max(block) for block in zip(*(times.block_s.get(mode, []) for times in self.ranks), strict=False)
        ]

    @property
    def samples(self) -> float:
        """The samples of a step over all ranks; 0 if they are not known."""
        each = [fmean(times.samples[WHOLE]) for times in self.ranks]
        return each[0] if self.ranks[0].is_global else sum(each)

    @property
    def cores(self) -> float:
        """The cores that all ranks together used on average."""
        first = [(sum(t.block_cpu_s[WHOLE]), sum(t.block_s[WHOLE])) for t in self.ranks]
        return sum(cpu for cpu, _ in first) / max(seconds for _, seconds in first)


def count_steps(settings: TimeSettings) -> int:
    """Return the steps that a rank takes until it has been timed."""
    return len(settings.modes) * (settings.warm_up + settings.steps * settings.repeats)


def describe_job(run: Run, threads: int) -> dict[str, Any]:
    """Return what all benchmarks report beside their times."""
    first = run.ranks[0]
    return {
        "num_ranks": len(run.ranks),
        "num_parameters": first.num_parameters,
        "gradient_bytes": first.gradient_bytes,
        "samples_per_step": run.samples,
        "device": first.device,
        "threads_per_rank": threads,
        "num_cores": usable_cores(),
    }


def choose_ranks(nproc: int | None, command: str) -> tuple[int, bool]:
    """Return how many ranks to start, 2 by default, and whether it is a rank of another launcher."""
    joins = is_launched(os.environ)
    if joins and nproc is not None:
        raise PacelineError(
            "PL601",
            saw="--nproc under torchrun, srun or mpirun.",
            rule="The ranks already exist; this process is one of them.",
            fix=f"Leave --nproc out, or start `paceline {command}` by itself.",
        )
    num_ranks = 2 if nproc is None else nproc
    check_counts(nproc=num_ranks)
    return num_ranks, joins


def refuse_one_rank(num_ranks: int) -> None:
    """Raise PL622 for one rank."""
    if num_ranks == 1:
        raise PacelineError(
            "PL622",
            saw="nproc=1.",
            rule="One rank does not communicate.",
            fix="Use two ranks or more: --nproc 2.",
        )


def _read_error(line: str) -> str:
    """Return a line of output; of an error as JSON, what people read of it."""
    with suppress(ValueError, KeyError, TypeError):
        error = json.loads(line)["error"]
        return f"{error['saw']} {error['fix']} [{error['code']}]"
    return line


def _read_profile(folder: Path) -> Profile | None:
    if not folder.is_dir() or not list(folder.glob("rank-*.json")):
        return None
    try:
        return analyse(read_traces([folder]))
    except PacelineError:
        return None  # the times stand without reasons


def adapt_recipe(
    recipe: Recipe,
    *,
    threads: int,
    num_steps: int,
    layout: Layout | None = None,
    grow: int = 1,
    microbatch_factor: int = 1,
) -> Recipe:
    """Return the recipe as a benchmark runs it.

    Args:
        threads: CPU threads of every rank.
        num_steps: length, for the schedule; passes over the data do not end it.
        grow: factor on the global batch.
        microbatch_factor: factor on the microbatch.
    """
    if recipe.asynchronous.staleness:
        raise PacelineError(
            "PL677",
            saw=f"asynchronous.staleness={recipe.asynchronous.staleness} in a measurement.",
            rule="Synchronous steps are measured.",
            fix="Set asynchronous.staleness to 0, or read step_s in metrics.jsonl of a run.",
        )
    train = recipe.train.model_copy(
        update={
            "steps": num_steps,
            "epochs": None,
            "threads_per_rank": threads,
            "global_batch_size": recipe.train.global_batch_size * grow,
            "microbatch_size": recipe.train.microbatch_size * microbatch_factor,
        }
    )
    checkpoint = recipe.checkpoint.model_copy(update={"every": 0})
    return recipe.with_layout(layout or Layout(), train=train, checkpoint=checkpoint)


def check_counts(**counts: int) -> None:
    """Raise PL620 for a number below 1."""
    for name, count in counts.items():
        if count < 1:
            raise PacelineError(
                "PL620",
                saw=f"{name}={count}.",
                rule="Ranks, steps and repeats are numbers of at least 1.",
                fix=f"Use for example {name}=2.",
            )
