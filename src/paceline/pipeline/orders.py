"""Makes the known schedules, for any number of ranks and microbatches.

- `gpipe`: all forwards, then all backwards (Huang et al. 2019, "GPipe").
- `1f1b`: a backward as soon as there is one, so a rank keeps at most as many microbatches as there are ranks
  (Narayanan et al. 2019, "PipeDream").
- `interleaved`: 1f1b with several stages per rank, in groups of as many microbatches as ranks (Narayanan et
  al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2).
- `bfs`: all microbatches through one stage of a rank, then through its next one (Lamy-Poirier 2022,
  "Breadth-First Pipeline Parallelism").
- `zero_bubble`: 1f1b in which gradients of weights fill the waits (Qi et al. 2023, "Zero Bubble Pipeline
  Parallelism", ZB-H1).
- `zbv`: the same with two stages per rank, placed as a V: the last stage is on the first rank (Qi et al.
  2024, "Pipeline Parallelism with Controllable Memory").

The last two divide backwards. If a paper defines the order for some numbers only, it is found by simulating
the step in units of time: every rank takes the most urgent action that it can run.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import PacelineError
from paceline.pipeline.schedule import Action, ActionKind, Schedule
from paceline.pipeline.simulate import simulate
from paceline.recipe.layout import AS_V, LOOPING, SCHEDULES

NAMES: tuple[str, ...] = SCHEDULES
F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT  # noqa: E741


def make_schedule(name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """Return a known schedule.

    Args:
        name: one of `NAMES`.
        num_ranks: of the pipeline, at least 1.
        num_microbatches: of a step, at least 1.
        chunks: stages per rank; default: 2 for the orders that need several, else 1.
    """
    if name not in NAMES:
        raise PacelineError(
            "PL474",
            saw=f"schedule={name!r}.",
            rule=f"A schedule is one of {', '.join(NAMES)}.",
            fix="Use one of these.",
        )
    chunks = check_chunks(name, chunks)
    homes = find_homes(name, num_ranks, chunks)
    if name in ("gpipe", "bfs"):
        actions = [_all_then_all(homes, rank, num_microbatches) for rank in range(num_ranks)]
    elif name in ("1f1b", "interleaved"):
        return _one_by_one(name, homes, num_microbatches)
    else:
        actions = _fill_waits(homes, num_microbatches, num_ranks * chunks)
    return Schedule(name, num_microbatches, homes, tuple(map(tuple, actions)))


def check_chunks(name: str, chunks: int | None) -> int:
    """Return the stages per rank; raise PL475 for a number that the order does not take."""
    if name in LOOPING:
        chunks = 2 if chunks is None else chunks
        if chunks < 2:
            raise PacelineError(
                "PL475",
                saw=f"schedule={name} with chunks={chunks}.",
                rule="It goes around the ranks several times, so each of them holds at least 2 stages.",
                fix="Set chunks=2, or schedule=1f1b.",
            )
        return chunks
    fixed = 2 if name in AS_V else 1
    if chunks not in (None, fixed):
        raise PacelineError(
            "PL475",
            saw=f"schedule={name} with chunks={chunks}.",
            rule=f"Its ranks hold {fixed} stage{'s' * (fixed > 1)} each.",
            fix="Leave chunks out, or set schedule=interleaved.",
        )
    return fixed


def find_homes(name: str, num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of every stage.

    Args:
        chunks: stages per rank of schedules that loop.
    """
    ranks = list(range(num_ranks))
    if name in AS_V:
        return tuple(ranks + ranks[::-1])
    return tuple(ranks * (chunks if name in LOOPING else 1))


def _all_then_all(homes: Sequence[int], rank: int, num_microbatches: int) -> list[Action]:
    own = [stage for stage, home in enumerate(homes) if home == rank]
    microbatches = range(num_microbatches)
    return [Action(F, stage, m) for stage in own for m in microbatches] + [
        Action(B, stage, m) for stage in reversed(own) for m in microbatches
    ]


def _one_by_one(name: str, homes: Sequence[int], num_microbatches: int) -> Schedule:
    """Return forwards and backwards in turn, after as few forwards as let the schedule end in the least time.

    With as many forwards ahead as Narayanan et al. have, groups of fewer microbatches than ranks could leave
    ranks waiting for each other.
    """
    num_ranks, chunks = max(homes) + 1, len(homes) // (max(homes) + 1)
    groups = [
        range(first, min(first + num_ranks, num_microbatches))
        for first in range(0, num_microbatches, num_ranks)
    ]
    best: Schedule | None = None
    best_time = 0.0
    for extra in range(num_microbatches * chunks + 1):
        actions = []
        for rank in range(num_ranks):
            own = [stage for stage, home in enumerate(homes) if home == rank]
            if chunks == 1:
                ahead = num_ranks - rank - 1
            else:
                ahead = 2 * (num_ranks - rank - 1) + (chunks - 1) * num_ranks
            forwards = [Action(F, stage, m) for group in groups for stage in own for m in group]
            backwards = [Action(B, stage, m) for group in groups for stage in reversed(own) for m in group]
            actions.append(_take_turns(forwards, backwards, ahead + extra))
        schedule = Schedule(name, num_microbatches, tuple(homes), tuple(map(tuple, actions)))
        result = simulate(schedule)
        if result.stuck:
            continue
        if best is not None and result.total >= best_time:
            return best
        best, best_time = schedule, result.total
        if num_microbatches % num_ranks == 0 or chunks == 1:
            return best
    assert best is not None  # all forwards first always ends
    return best


def _take_turns(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    found = list(forwards[:ahead])
    for number, backward in enumerate(backwards):
        found += forwards[ahead + number : ahead + number + 1]
        found.append(backward)
    return found


def _fill_waits(homes: Sequence[int], num_microbatches: int, most_kept: int) -> list[list[Action]]:
    """Return an order with divided backwards in which gradients of weights fill the waits.

    Every action takes one unit of time. A rank takes a gradient of inputs if it can, for the stage before
    waits for it; else a forward, as long as it keeps few enough activations; else a gradient of weights.

    Args:
        homes: by stage.
        most_kept: microbatches that a rank keeps at once, each stage of it counted.
    """
    num_stages, num_ranks = len(homes), max(homes) + 1
    owned = [[stage for stage, home in enumerate(homes) if home == rank] for rank in range(num_ranks)]
    end: dict[Action, int] = {}  # the unit after the one in which it ran
    next_of = {(kind, stage): 0 for kind in (F, I, W) for stage in range(num_stages)}
    kept = [0] * num_ranks
    actions: list[list[Action]] = [[] for _ in range(num_ranks)]
    done, now, total = 0, 0, 3 * num_stages * num_microbatches

    def can(kind: ActionKind, stage: int) -> bool:
        microbatch = next_of[kind, stage]
        if microbatch == num_microbatches:
            return False
        if kind is F:
            needed = [Action(F, stage - 1, microbatch)] if stage else []
        elif kind is W:
            needed = [Action(I, stage, microbatch)]
        else:
            needed = [Action(F, stage, microbatch)]
            needed += [Action(I, stage + 1, microbatch)] if stage + 1 < num_stages else []
        return all(end.get(action, now + 1) <= now for action in needed)

    def has_room(rank: int, stage: int) -> bool:
        # What a later stage of this rank needs for the microbatches under way is left free.
        reserved = sum(next_of[F, stage] + 1 - next_of[F, later] for later in owned[rank] if later > stage)
        return kept[rank] + 1 + (reserved if stage == owned[rank][0] else 0) <= most_kept

    while done < total:
        chosen: list[tuple[int, Action]] = []
        for rank in range(num_ranks):
            candidates = [(I, stage) for stage in reversed(owned[rank]) if can(I, stage)]
            candidates += [
                (F, stage) for stage in reversed(owned[rank]) if can(F, stage) and has_room(rank, stage)
            ]
            candidates += [(W, stage) for stage in reversed(owned[rank]) if can(W, stage)]
            if candidates:
                kind, stage = candidates[0]
                chosen.append((rank, Action(kind, stage, next_of[kind, stage])))
        assert chosen, "every rank waits for another"
        now += 1
        for rank, action in chosen:
            next_of[action.kind, action.stage] += 1
            end[action] = now
            kept[rank] += (action.kind is F) - (action.kind is W)
            actions[rank].append(action)
            done += 1
    return actions
