"""Compares ways to run the same steps: in starts of their own that take turns, or in blocks of one start.

- `overhead`: without the sums of gradients, in blocks of one start.
- `buckets`: sizes of the buckets in which DDP sums gradients.
- `dp`: threads of one process, as in `nn.DataParallel`, against ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.bench.rank.timing import ALONE, WHOLE, TimeSettings
from paceline.bench.spread import Spread
from paceline.bench.starts import NUM_WARM_UP, Measured, Run, check_counts, describe_job, refuse_one_rank
from paceline.errors import PacelineError
from paceline.launching.local import check_launch

DEFAULT_SIZES = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0)
_TORCH_MIB = 25.0
_MIB = 1 << 20
THREADS, RANKS = "threads", "ranks"


@dataclass(frozen=True)
class Variant:
    """The result of one way.

    Attributes:
        step_s: seconds per step, over starts.
        ratio: time of a sample over that of the first way, in the same round.
        samples_per_s: throughput, over starts; 0 if samples are not known.
        cores: that all processes together used on average.
        peak_bytes: the most resident memory of a process.
        moved_bytes: per step, between threads of a process.
    """

    step_s: Spread
    ratio: Spread
    samples_per_s: Spread
    cores: float
    peak_bytes: int
    moved_bytes: float


@dataclass(frozen=True)
class Variants:
    """The results of all ways; `dataclasses.asdict` of it is JSON-able.

    Attributes:
        ways: by name; the first one is what the others are compared with.
        num_ranks, num_parameters, gradient_bytes, samples_per_step, device, threads_per_rank, num_cores: as
            `starts.describe_job` has them.
        num_steps: per start.
        num_repeats: starts of each way.
    """

    ways: dict[str, Variant]
    num_ranks: int
    num_parameters: int
    gradient_bytes: int
    samples_per_step: float
    device: str
    threads_per_rank: int
    num_cores: int
    num_steps: int
    num_repeats: int


def _measure(starts: Mapping[str, Callable[[], Run]], threads: int, steps: int, repeats: int) -> Variants:
    """Start all ways in order, then in reverse order, and so on."""
    runs: dict[str, list[Run]] = {name: [] for name in starts}
    for number in range(repeats):
        for name in starts if number % 2 == 0 else reversed([*starts]):
            runs[name].append(starts[name]())
    times = {name: [run.step_s()[0] for run in each] for name, each in runs.items()}
    first_s = [run.step_s()[0] / (run.samples or 1.0) for run in next(iter(runs.values()))]
    return Variants(
        ways={
            name: _summarise(each, times[name], [s * (each[0].samples or 1.0) for s in first_s])
            for name, each in runs.items()
        },
        **describe_job(max((each[0] for each in runs.values()), key=lambda run: len(run.ranks)), threads),
        num_steps=steps,
        num_repeats=repeats,
    )


def _summarise(runs: Sequence[Run], times: Sequence[float], base: Sequence[float]) -> Variant:
    return Variant(
        step_s=Spread.of(times),
        ratio=Spread.of(one / other for one, other in zip(times, base, strict=False)),
        samples_per_s=Spread.of(runs[0].samples / seconds for seconds in times),
        cores=fmean(run.cores for run in runs),
        peak_bytes=max(times.peak_bytes for run in runs for times in run.ranks),
        moved_bytes=runs[0].ranks[0].moved_bytes,
    )


def _check(job: Measured, num_ranks: int, steps: int, repeats: int) -> int:
    check_counts(steps=steps, repeats=repeats, nproc=num_ranks)
    refuse_one_rank(num_ranks)
    check_launch(num_ranks)
    return job.choose_threads(num_ranks)


def measure_overhead(job: Measured, num_ranks: int, *, steps: int = 5, repeats: int = 10) -> Variants:
    """Time whole steps against compute alone, in blocks that alternate in one start.

    A block of compute alone takes the same steps without the sums of gradients (`bench.rank.timing`). The
    difference within a pair of blocks is the cost of communication, without what overlaps with compute.
    Compute alone counts as long as on the slowest rank: waiting for a rank with more samples is no such cost.

    Args:
        job: what to run.
        num_ranks: how many, 2 or more.
        steps: in a block.
        repeats: pairs of blocks.
    """
    threads = _check(job, num_ranks, steps, repeats)
    run = job.run(num_ranks, threads, TimeSettings(NUM_WARM_UP, steps, repeats, (WHOLE, ALONE)))
    times = {mode: run.step_s(mode) for mode in (WHOLE, ALONE)}
    if not times[ALONE] or not all(each.left_out for each in run.ranks):
        raise PacelineError(
            "PL956",
            saw="no communication of the script that a step can do without.",
            rule="Steps are compared with steps that do not sum gradients: by DDP, `all_reduce` or a Trainer "
            "of replicas. Shards must communicate to compute.",
            fix="See `paceline profile` for the exposed share of communication.",
        )
    ways = {mode: _summarise([run], times[mode], times[WHOLE]) for mode in times}
    return Variants(
        ways=ways,
        **describe_job(run, threads),
        num_steps=steps,
        num_repeats=min(map(len, times.values())),
    )


def measure_buckets(
    job: Measured,
    num_ranks: int,
    sizes: Sequence[float] = DEFAULT_SIZES,
    *,
    steps: int = 20,
    repeats: int = 6,
) -> Variants:
    """Time steps with buckets of several sizes.

    Args:
        job: what to run; it must use DDP.
        num_ranks: how many, 2 or more.
        sizes: in MiB; the job's own is the first way. One at most holds all gradients.
        steps: of a start.
        repeats: starts of each size.
    """
    threads = _check(job, num_ranks, steps, repeats)

    def start(size: float | None) -> Callable[[], Run]:
        return lambda: job.run(num_ranks, threads, TimeSettings(NUM_WARM_UP, steps, 1, bucket_mib=size))

    first = job.run(num_ranks, threads, TimeSettings(1, 1, 1)).ranks[0]
    _refuse_without_ddp(first.gradient_bytes)
    own = first.bucket_mib or _TORCH_MIB
    starts = {f"{own:g}": start(None)}
    starts |= {f"{size:g}": start(size) for size in keep_distinct(sizes, own, first.gradient_bytes)}
    return _measure(starts, threads, steps, repeats)


def _refuse_without_ddp(gradient_bytes: int) -> None:
    if not gradient_bytes:
        raise PacelineError(
            "PL957",
            saw="no DistributedDataParallel module and no Trainer.",
            rule="Buckets are DDP's, and what is divided over threads is the module in it.",
            fix="Wrap the model: model = DistributedDataParallel(model).",
        )


def keep_distinct(sizes: Sequence[float], own: float, gradient_bytes: int) -> list[float]:
    """Return the sizes besides the job's own, with one at most that holds all gradients."""
    ordered = sorted(set(map(float, sizes)))
    whole = [size for size in ordered if size * _MIB >= gradient_bytes]
    keeps_whole = own * _MIB < gradient_bytes
    return [
        size for size in ordered if size != own and (size not in whole or (keeps_whole and size == whole[0]))
    ]


def measure_dp(job: Measured, num_ranks: int, *, steps: int = 20, repeats: int = 6) -> Variants:
    """Time steps on ranks against the same batch divided over as many threads of one process.

    Args:
        job: what to run.
        num_ranks: ranks, and threads, 2 or more.
        steps: of a start.
        repeats: starts of each.
    """
    threads = _check(job, num_ranks, steps, repeats)

    def start_threads() -> Run:
        run = job.run(1, threads, TimeSettings(NUM_WARM_UP, steps, 1, threads=num_ranks))
        _refuse_without_ddp(run.ranks[0].gradient_bytes)
        return run

    def start_ranks() -> Run:
        return job.run(num_ranks, threads, TimeSettings(NUM_WARM_UP, steps, 1))

    return _measure({THREADS: start_threads, RANKS: start_ranks}, threads, steps, repeats)
