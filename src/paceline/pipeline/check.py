"""Checks a schedule: everything once, and no ranks that wait for each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paceline.errors import PacelineError, RecipeErrors
from paceline.phrases import name_some
from paceline.pipeline.schedule import Action, ActionKind, Schedule
from paceline.pipeline.simulate import simulate


def check_schedule(schedule: Schedule) -> None:
    """Raise unless every rank can do its list, and all lists together are one step.

    Raises:
        RecipeErrors: with all problems: PL472 for actions that are missing or there twice, PL473 for ranks
            that wait for each other.
    """
    problems = list(_check_once(schedule))
    if not problems:
        problems = list(_check_ends(schedule))
    if problems:
        raise RecipeErrors(f"schedule {schedule.name}", problems)


def _check_once(schedule: Schedule) -> Iterator[PacelineError]:
    found = Counter(action for own in schedule.actions for action in own)
    repeated = [action for action, times in found.items() if times > 1]
    forgotten: list[str] = []
    doubled: list[str] = [f"{action} ({found[action]} times)" for action in repeated]
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            has = {kind for kind in ActionKind if Action(kind, stage, microbatch) in found}
            if ActionKind.FORWARD not in has:
                forgotten.append(str(Action(ActionKind.FORWARD, stage, microbatch)))
            halves = has & {ActionKind.INPUT, ActionKind.WEIGHT}
            if ActionKind.BACKWARD in has and halves:
                both = " and ".join(str(Action(kind, stage, microbatch)) for kind in sorted(halves))
                doubled.append(f"{Action(ActionKind.BACKWARD, stage, microbatch)} beside {both}")
            elif ActionKind.BACKWARD not in has:
                missing = {ActionKind.INPUT, ActionKind.WEIGHT} - halves if halves else {ActionKind.BACKWARD}
                forgotten += [str(Action(kind, stage, microbatch)) for kind in sorted(missing)]
    rule = (
        f"Each of the {schedule.num_stages} stages has one forward and one backward (B, or I and W) for each "
        f"of the {schedule.num_microbatches} microbatches."
    )
    if forgotten:
        yield PacelineError(
            "PL472",
            saw=f"{name_some(forgotten, 6)} missing.",
            rule=rule,
            fix="Add them to their rank's line.",
        )
    if doubled:
        yield PacelineError(
            "PL472", saw=f"done twice: {name_some(doubled, 6)}.", rule=rule, fix="Leave one of each out."
        )


def _check_ends(schedule: Schedule) -> Iterator[PacelineError]:
    stuck = simulate(schedule).stuck
    if stuck:
        waits = [f"rank {rank} at {action}" for rank, action in stuck.items()]
        yield PacelineError(
            "PL473",
            saw=f"the ranks wait for each other forever: {name_some(waits, 8)}.",
            rule="A forward needs the forward of the stage before. A backward needs its own forward and the "
            "backward of the stage after; gradients of weights need those of the inputs.",
            fix="Move the actions that they wait for closer to the front of their ranks' lines.",
        )
