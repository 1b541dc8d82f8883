"""Judges a profile: which numbers are good, and the one next move for each that is not."""

from __future__ import annotations

import math
from typing import Literal

from paceline.finding import Finding
from paceline.phrases import name_ranks
from paceline.profiling.analysis import IDLE_DATA, IDLE_HOST, IDLE_LAUNCH, IDLE_SYNC, Profile
from paceline.profiling.blame import Blame
from paceline.profiling.rank_trace import BACKWARD, COLLECTION, CORE, DATA, FORWARD, HOST, OPTIMIZER, READING
from paceline.units import format_seconds

Grade = Literal["good", "acceptable", "poor", "excellent", "limited"]

GOOD_EXPOSED, MOST_EXPOSED = 0.2, 0.4
"""Exposed communication below the first share of a step is good, up to the second acceptable."""
GOOD_OVERLAP, EXCELLENT_OVERLAP = 0.5, 0.7
"""From the first hidden share of communication on, overlap is good, above the second excellent."""
MOST_OF_BACKWARD = 0.3
"""Communication in a larger share of the backward makes it a bottleneck."""
MUCH_LOADING = 0.1
"""A loop that loads in a larger share of the step should have workers."""
_MOST_WORKERS = 8
MUCH_REPEATED = 0.05
"""Reductions that could be left out are reported from this share of a step on."""

MUCH_IDLE = 0.1
"""A GPU that is idle for a larger share of the step is reported."""

_IDLE = {
    IDLE_SYNC: (
        "after the host has waited for it (.item(), .cpu(), printing a tensor, torch.cuda.synchronize)",
        "Read values rarely, some steps late, or copy them with non_blocking=True.",
    ),
    IDLE_DATA: (
        "while the loop waits for its data",
        "Give the loader workers (num_workers=4) or lighter samples, and pin_memory=True.",
    ),
    IDLE_LAUNCH: (
        "because the host issues kernels more slowly than they run",
        "Give the kernels more to do: a larger microbatch, torch.compile (mode="
        '"reduce-overhead" records CUDA graphs), fused or foreach optimizers.',
    ),
    IDLE_HOST: (
        "while Python runs code outside of forward, backward, optimizer and loader",
        "Look for what the loop does between these phases, such as logging or saving.",
    ),
}
_MOVES = {
    DATA: "Give that rank's loader workers (num_workers=4) or lighter samples.",
    FORWARD: "Compare that rank's batch and device with the others': the same model computes longer there.",
    BACKWARD: "Compare that rank's batch and device with the others': the same model computes longer there.",
    OPTIMIZER: "Look for work that only that rank does in or after the optimizer's step.",
    COLLECTION: "Collect between steps and on all ranks at once: gc.freeze() after building the model, then "
    "gc.disable() and gc.collect() every some hundred steps.",
    READING: "Read values (.item(), float(), printing a tensor) rarely, and on all ranks in the same step.",
    CORE: "Give ranks fewer threads or workers, or stop other programs: all cores were in use.",
    HOST: "Look for Python code that only that rank runs between the phases, such as logging or saving.",
}
_UNKNOWN = "Record with `paceline profile`, which shows what they do longer."
_WORDS = {
    DATA: "its data loader",
    READING: "reading values of tensors (.item())",
    HOST: "Python code outside of the phases",
    CORE: "waiting for a core, which other threads or programs used",
}


def grade_exposed(share: float) -> Grade:
    """Grade the exposed share of a step."""
    return "good" if share < GOOD_EXPOSED else "acceptable" if share <= MOST_EXPOSED else "poor"


def grade_overlap(share: float) -> Grade:
    """Grade the hidden share of communication."""
    return "excellent" if share > EXCELLENT_OVERLAP else "good" if share >= GOOD_OVERLAP else "limited"


def judge_profile(profile: Profile) -> list[Finding]:
    """Return what costs time, the causes first, each with one next move."""
    found = [_judge_blame(blame, profile.mean_step_ns) for blame in profile.blames]
    loading = _judge_loading(profile)
    found += [*loading, *_judge_idle(profile), *_judge_needless(profile)]
    move = _choose_move(profile, is_loading=bool(loading))
    grade = grade_exposed(profile.exposed_share)
    if grade == "good":
        return found
    saw = (
        f"{profile.exposed_share:.0%} of its step is exposed communication, which is {grade}; "
        f"{_describe_waiting(profile)}"
    )
    # A late rank also makes communication long and its overlap small.
    if profile.waiting_share <= profile.exposed_share / 2:
        if profile.overlap is not None and grade_overlap(profile.overlap) == "limited":
            saw += f"; {profile.overlap:.0%} of communication is hidden behind computation, which is limited"
        if (profile.backward_comm_share or 0.0) > MOST_OF_BACKWARD:
            saw += f"; collectives are under way in {profile.backward_comm_share:.0%} of the backward"
    rule = f"Below {GOOD_EXPOSED:.0%} is good, above {MOST_EXPOSED:.0%} poor."
    found.append(Finding("PL910", name_ranks([profile.exposed_rank]), f"{saw}.", rule, move))
    return found


def _judge_blame(blame: Blame, step_ns: float) -> Finding:
    without = format_seconds((step_ns - blame.gain_ns) / 1e9)
    return Finding(
        "PL913",
        where=name_ranks([blame.rank]),
        saw=f"{name_ranks(blame.waiters)} waited {format_seconds(blame.lost_ns / 1e9)} per step "
        f"({blame.share:.0%} of it) for {name_ranks([blame.rank])}, which took longer in "
        f"{describe_phase(blame.phase)}{describe_place_of(blame)}.",
        rule="All ranks of a collective wait for the last one.",
        fix=f"{_MOVES[blame.phase]} Without this delay a step would take about {without}.",
    )


def _judge_idle(profile: Profile) -> list[Finding]:
    """Return the finding on a GPU that has nothing to do, with its largest cause."""
    shares = profile.idle_shares()
    if sum(shares.values()) < MUCH_IDLE:
        return []
    cause, share = next(iter(shares.items()))
    saw = f"its GPU is idle for {sum(shares.values()):.0%} of the step, for {share:.0%} {_IDLE[cause][0]}"
    rows = [row for row in profile.rows if row.rank == profile.idle_rank]
    count = sum(row.num_kernels for row in rows)
    if cause == IDLE_LAUNCH and count:
        mean_s = sum(row.compute_ns for row in rows) / count / 1e9
        saw += f"; {count / len(rows):,.0f} kernels per step, {format_seconds(mean_s)} each"
    rule = f"A GPU without a kernel, a copy or a collective earns nothing; {MUCH_IDLE:.0%} is much."
    return [Finding("PL909", name_ranks([profile.idle_rank]), f"{saw}.", rule, _IDLE[cause][1])]


def _judge_loading(profile: Profile) -> list[Finding]:
    """Return the finding on ranks that load batches in their loop, if none of them is late by that."""
    late = {blame.rank for blame in profile.blames if blame.phase == DATA}
    ranks = [rank for rank in profile.inline_ranks if rank not in late]
    rows = [row for row in profile.rows if row.rank in ranks]
    loading, total = sum(row.phases.get(DATA, 0) for row in rows), sum(row.total_ns for row in rows)
    if not rows or loading < MUCH_LOADING * total:
        return []
    # So many hide the loading behind the rest of the step.
    workers = min(_MOST_WORKERS, max(1, math.ceil(loading / max(1, total - loading))))
    return [
        Finding(
            "PL917",
            where=name_ranks(ranks),
            saw=f"the loop waits while it loads each batch itself, for {loading / total:.0%} of the step.",
            rule="Loader workers load the next batches while the step computes.",
            fix=f"Set num_workers={workers} in the DataLoader, if cores are free.",
        )
    ]


def _judge_needless(profile: Profile) -> list[Finding]:
    """Return the findings on what DDP repeats in vain."""
    found, needless, ranks = [], profile.needless, name_ranks(profile.ranks)
    if needless.exposed_ns >= MUCH_REPEATED * profile.mean_step_ns:
        call = "model.set_requires_gradient_sync(False)" if needless.is_sharded else "with model.no_sync():"
        found.append(
            Finding(
                "PL918",
                where=ranks,
                saw=f"gradients are reduced in each of the {needless.backwards} backwards of a step; all but "
                f"the last have {format_seconds(needless.exposed_ns / 1e9)} of exposed communication.",
                rule="Microbatches of one optimizer step need one reduction, of the sum of their gradients.",
                fix=f"Run all but the last microbatch under `{call}`, forward included.",
            )
        )
    if needless.setting:
        found.append(
            Finding(
                "PL920",
                where=ranks,
                saw="DDP searches for unused parameters, and every backward so far used the same ones.",
                rule="The search walks through the graph in each step, and costs one more collective.",
                fix=f"If the model always uses the same parameters, give DistributedDataParallel "
                f"{needless.setting}; a backward that leaves others out then ends in an error or a hang.",
            )
        )
    return found


def describe_phase(phase: str) -> str:
    """Return a phase in words: `its data loader`."""
    return _WORDS.get(phase, phase)


def describe_place_of(blame: Blame) -> str:
    """Return the line and the module of a cause: ` at train.py:41 in load`; empty if unknown."""
    if blame.place is None:
        return ""
    return f" at {blame.place}" + (f" (module {blame.place.module})" if blame.place.module else "")


def _describe_waiting(profile: Profile) -> str:
    if not profile.num_matched:
        return "how much of it is waiting for other ranks is not known"
    return f"{profile.waiting_share:.0%} is waiting for other ranks"


def _choose_move(profile: Profile, *, is_loading: bool) -> str:
    """Return the move against exposed communication: against waiting if most of it is that."""
    if profile.waiting_share > profile.exposed_share / 2:
        if profile.blames:
            return f"Speed up {name_ranks([profile.blames[0].rank])} first (PL913)."
        if profile.usual_delay in (FORWARD, BACKWARD):
            return "Give all ranks equal work: they are late in turn, as with batches of unequal cost."
        late = f", mostly by {describe_phase(profile.usual_delay)}" if profile.usual_delay else ""
        return f"The ranks are late in turn{late}. {_MOVES.get(profile.usual_delay, _UNKNOWN)}"
    if is_loading:
        return "Follow PL917 first."
    return "Give each reduction more to compute: a larger microbatch, or several with one reduction."
