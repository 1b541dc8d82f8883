"""Measures the waits of a pipeline per schedule: by formula, simulated with measured times, and measured.

Every rank records when it does its actions. One step's run is compared with a simulation of the same schedule
in which each action takes the mean of the step's times of its kind and stage. What remains is what a
simulation leaves out: messages, uneven actions, and other processes on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.ranks import (
    NUM_WARM_UP,
    Bench,
    adapt_recipe,
    check_counts,
    choose_threads,
    open_bench,
)
from paceline.bench.spread import Spread
from paceline.data import build_data, prepare_data
from paceline.errors import PacelineError
from paceline.launching.local import check_launch, launch
from paceline.pipeline.orders import NAMES, make_schedule
from paceline.pipeline.schedule import Schedule
from paceline.pipeline.simulate import Simulation, Span, find_formula, simulate
from paceline.pipeline.timeline import join_spans, measure_costs
from paceline.place import usable_cores
from paceline.recipe import Layout, Recipe
from paceline.recipe.layout import LOOPING
from paceline.recipe.legal import refuse_layout
from paceline.train.run import build_trainer
from paceline.train.trainer import Trainer


@dataclass(frozen=True)
class ScheduleWaits:
    """The idle shares of one schedule.

    Attributes:
        name: of the schedule.
        stages_per_rank: the number of them.
        formula: for equal stages; `None` for an order without one.
        equal: simulated with equal times for a forward, a gradient of inputs and gradients of weights.
        simulated: with the measured times of each step.
        measured: of the same steps.
        difference: measured less simulated, step by step.
        step_s: seconds from the first action of a step to the end of its last one.
    """

    name: str
    stages_per_rank: int
    formula: float | None
    equal: float
    simulated: Spread
    measured: Spread
    difference: Spread
    step_s: Spread


@dataclass(frozen=True)
class PipelineWaits:
    """The result of `measure_pipeline`.

    Attributes:
        schedules: in the order of the request.
        num_ranks: of the pipeline.
        num_microbatches: of a step.
        num_parameters: of the model.
        microbatch_size: samples per forward.
        device: `"cpu"` or `"cuda"`.
        threads_per_rank: the same on all.
        num_cores: that this process may use.
        num_steps: that were recorded.
    """

    schedules: list[ScheduleWaits]
    num_ranks: int
    num_microbatches: int
    num_parameters: int
    microbatch_size: int
    device: str
    threads_per_rank: int
    num_cores: int
    num_steps: int


@dataclass(frozen=True)
class MeasuredRun:
    """A recorded step beside its simulation, to be drawn.

    Attributes:
        schedule: of the step.
        planned: simulated with the times of the run.
        measured: the run whose idle share is the median.
    """

    schedule: Schedule
    planned: Simulation
    measured: Simulation

    def list_both(self) -> list[tuple[str, Simulation]]:
        """Return both with their titles, for a picture."""
        return [(f"{self.schedule.name}, planned", self.planned), ("measured", self.measured)]


def measure_pipeline(
    recipe: Recipe,
    num_ranks: int,
    names: Sequence[str] = (),
    *,
    chunks: int = 2,
    steps: int = 10,
) -> tuple[PipelineWaits, list[MeasuredRun]]:
    """Record steps of a recipe under `pp` with several schedules.

    Call it in a process that is not a rank itself: it starts ranks of its own.

    Args:
        recipe: what to train. Its layout, length and checkpoints play no part.
        num_ranks: of the pipeline, 2 or more.
        names: of schedules, or paths of lists; default: all that are made for these numbers.
        chunks: stages per rank of schedules that loop.
        steps: recorded steps per schedule.

    Raises:
        PacelineError: PL620 for numbers below 1, PL480 for one rank, PL474 and PL475 for schedules that do
            not go with these numbers, PL320 to PL326 for ranks that cannot be started; for models that cannot
            be cut as `Trainer`.
    """
    check_counts(steps=steps, nproc=num_ranks)
    if num_ranks == 1:
        raise PacelineError(
            "PL480",
            saw="nproc=1.",
            rule="A pipeline has two ranks or more; one rank waits for no other stage.",
            fix="Use two ranks or more: --nproc 2.",
        )
    num_microbatches = -(-recipe.train.global_batch_size // recipe.train.microbatch_size)
    schedules = _list_schedules(names, num_ranks, num_microbatches, chunks)
    threads = choose_threads(recipe, num_ranks)
    adapted = adapt_recipe(recipe, threads=threads, num_steps=NUM_WARM_UP + steps)
    layouts = []
    for name, schedule in schedules.items():
        # Orders without `chunks` of their own have them by their name.
        own = chunks if schedule.name in LOOPING else 1
        layout = Layout(dp_replicate=1, pp=num_ranks, schedule=name, chunks=own)
        refuse_layout(adapted, layout, num_ranks)
        layouts.append(layout)
    check_launch(num_ranks, recipe.train.device)
    prepare_data(recipe)
    found: list[_RankRecord] = launch(
        _run, num_ranks, (adapted, layouts, steps), device=recipe.train.device, hang_after_s=None
    )
    runs = [
        [join_spans([rank.spans[place][step] for rank in found]) for step in range(steps)]
        for place in range(len(layouts))
    ]
    waits = [_summarise(schedule, own) for schedule, own in zip(schedules.values(), runs, strict=True)]
    drawn = [_choose(schedule, own) for schedule, own in zip(schedules.values(), runs, strict=True)]
    return PipelineWaits(
        schedules=waits,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_parameters=found[0].num_parameters,
        microbatch_size=recipe.train.microbatch_size,
        device=found[0].device,
        threads_per_rank=threads,
        num_cores=usable_cores(),
        num_steps=steps,
    ), drawn


def _list_schedules(
    names: Sequence[str], num_ranks: int, num_microbatches: int, chunks: int
) -> dict[str, Schedule]:
    found = {}
    for name in names or NAMES:
        try:
            own = chunks if name in LOOPING else None
            found[name] = make_schedule(name, num_ranks, num_microbatches, own)
        except PacelineError:
            if names:
                raise
    return found


@dataclass(frozen=True)
class _RankRecord:
    """One rank's actions, by schedule and step."""

    spans: list[list[list[Span]]]
    device: str
    num_parameters: int


def _run(recipe: Recipe, layouts: list[Layout], steps: int) -> _RankRecord:
    recipes = [recipe.with_layout(layout) for layout in layouts]
    spans = []
    with open_bench(recipes[0]) as bench:
        trainer = bench.trainer
        for number, own in enumerate(recipes):
            if number:
                assert own.train.steps is not None
                trainer = build_trainer(own, build_data(own), own.train.steps)
            spans.append(_record(bench, trainer, steps))
            trainer.close()
        return _RankRecord(spans, bench.world.device.type, bench.num_parameters)


def _record(bench: Bench, trainer: Trainer, steps: int) -> list[list[Span]]:
    for _ in range(NUM_WARM_UP):
        trainer.step(next(bench.shares))
    found = []
    for _ in range(steps):
        share = next(bench.shares)  # reading data belongs to no action
        bench.synchronise()
        with trainer.recording_actions() as timeline:
            trainer.step(share)
        found.append(timeline.spans)
    return found


def _summarise(schedule: Schedule, runs: Sequence[Simulation]) -> ScheduleWaits:
    simulated = [simulate(schedule, measure_costs(run)).idle_share for run in runs]
    measured = [run.idle_share for run in runs]
    return ScheduleWaits(
        name=schedule.name,
        stages_per_rank=schedule.num_stages // schedule.num_ranks,
        formula=find_formula(schedule),
        equal=simulate(schedule).idle_share,
        simulated=Spread.of(simulated),
        measured=Spread.of(measured),
        difference=Spread.of(a - b for a, b in zip(measured, simulated, strict=True)),
        step_s=Spread.of(run.total for run in runs),
    )


def _choose(schedule: Schedule, runs: Sequence[Simulation]) -> MeasuredRun:
    """Return the run whose idle share is the median."""
    ordered = sorted(runs, key=lambda run: run.idle_share)
    measured = ordered[len(ordered) // 2]
    return MeasuredRun(schedule, simulate(schedule, measure_costs(measured)), measured)
