"""Predicts a recorded step on other numbers of ranks, links and sizes of buckets.

Only what ranks exchange changes: each rank keeps its own work and its own share of the batch (weak scaling).
Collectives of backward become ready one after the other, evenly over it, as DDP's buckets do, and take turns
on one stream. The other collectives are waited for. Gathers and sums of shards are counted as they were: the
whole vector has the same size on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.plan.cluster import Cluster
from paceline.plan.step import expose
from paceline.plan.traffic import StepCall


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step of the rank that waits least for others.

    Attributes:
        num_ranks: with which it was recorded.
        step_s: its seconds.
        work_s: without what it waited for others or for a collective.
        backward_s: of `work_s`.
        calls: its collectives; the size of each does not depend on the ranks.
        backward_share: of the communication that was under way in backward.
    """

    num_ranks: int
    step_s: float
    work_s: float
    backward_s: float
    calls: tuple[StepCall, ...]
    backward_share: float


@dataclass(frozen=True)
class Projection:
    """A recorded step on a number of ranks.

    Attributes:
        num_ranks: of the prediction.
        step_s: its seconds.
        comm_s: of all collectives.
        exposed_s: that no work hides.
    """

    num_ranks: int
    step_s: float
    comm_s: float
    exposed_s: float

    @property
    def efficiency(self) -> float:
        """The share of the step that is the rank's own work: throughput per rank over that of one rank."""
        return 1 - self.exposed_s / self.step_s


def change_buckets(step: RecordedStep, bucket_bytes: float) -> RecordedStep:
    """Return the step with its sums in buckets of another size."""
    total = sum(call.num_bytes * call.times for call in step.calls if call.operation == "all_reduce")
    if not total:
        return step
    count = max(1, round(total / bucket_bytes))
    others = [call for call in step.calls if call.operation != "all_reduce"]
    call = StepCall("", "all_reduce", total / count, step.num_ranks, count)
    return replace(step, calls=(*others, call))


def project(step: RecordedStep, cluster: Cluster, contention: float) -> Projection:
    """Return the step on all ranks of a cluster."""
    times: list[float] = []
    for call in step.calls:
        once = cluster.time(call.operation, call.num_bytes, cluster.num_ranks)
        times += [once] * int(call.times)
    comm_s, share = sum(times), step.backward_share
    pieces, nothing = [step.backward_s / len(times)] * len(times), [0.0] * len(times)
    inside = [share * once for once in times]
    exposed = expose(pieces, nothing, inside, 0, None if cluster.processor.is_cpu else contention)
    exposed += (1 - share) * comm_s
    return Projection(cluster.num_ranks, step.work_s + exposed, comm_s, exposed)
