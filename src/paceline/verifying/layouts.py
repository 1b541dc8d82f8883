"""Runs on the ranks of a layout: the same steps, each rank comparing its own parts with the reference.

Every rank reads the reference from one memory map and cuts its own part out of it, so comparing costs no
communication, and each difference is known by its rank. If the modules of a step were watched in the
reference, they are here too, which shows where a layout goes wrong.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import PacelineError
from paceline.recipe import Layout
from paceline.torch_seams.modules import own_parameters
from paceline.train.same_settings import ranks_may_differ
from paceline.train.trainer import Trainer
from paceline.verifying.closeness import (
    Difference,
    Noise,
    divide,
    find_factor,
    find_rounding,
    looks_masked,
    measure_distance,
)
from paceline.verifying.observe import holds, is_elsewhere, take_local, take_part
from paceline.verifying.parts import find_part, find_places
from paceline.verifying.reference import Facts, Reference, WatchedFacts, key_after, key_of, list_process
from paceline.verifying.run_steps import KINDS, run_steps
from paceline.verifying.settings import SettingDifference, compare_settings
from paceline.verifying.subject import Opened, Subject
from paceline.verifying.watch import EVENT, EVENT_GRADIENT, Event, Watch, describe_modules
from paceline.world import start

_NO_NOISE = Noise(0.0, 0.0, 0.0, 0.0)
# Maximum number of differences that a rank reports; a wrong layout differs nearly everywhere after step 1.
_MAX_LISTED, _MAX_EVENTS = 2000, 400


@dataclass(frozen=True, kw_only=True)
class EventDifference:
    """A tensor at a module's boundary that differs from the reference's.

    Attributes:
        order: of the event in the reference's forward.
        microbatch: number in the global batch.
        gradient: whether it is the gradient of that tensor.
        rank, size, tolerance, scale, factor, rounded_to: as in `Difference`.
        looks_masked: whether other elements are 0 and the rest agrees, as with two dropout masks.
        stale: the step after which the weight had this value, if that is an earlier step than expected.
        is_received: whether the rank has it from another stage, which has the module.
    """

    order: int
    microbatch: int
    event: Event
    gradient: bool
    rank: int
    size: float
    tolerance: float
    scale: float
    factor: float | None
    looks_masked: bool
    rounded_to: str
    stale: int | None = None
    is_received: bool = False


@dataclass
class Observed:
    """The observations of one rank in the watched step.

    Attributes:
        differences: of events, in the order in which they came.
        settings: those that differ from one process's.
        other_draws: modules whose forward drew other random numbers of the same shapes than in one process.
        stale_copies: by module, the attribute that holds a weight as it was after an earlier step, and that
            step.
        ran, losses, batches: as in `Watch`.
        types, outside: as in `WatchedFacts`.
    """

    rank: int = 0
    differences: list[EventDifference] = field(default_factory=list)
    settings: list[SettingDifference] = field(default_factory=list)
    other_draws: list[str] = field(default_factory=list)
    stale_copies: dict[str, tuple[str, int]] = field(default_factory=dict)
    ran: list[int] = field(default_factory=list)
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    batches: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)


@dataclass
class Compared:
    """The differences that one rank found in one layout.

    Attributes:
        num_compared: tensors and numbers.
        worst: the largest difference in units of its tolerance, and the key of its tensor or number.
        worst_noise: the same in units of ordinary rounding.
        same_bits: whether nothing differed by a single bit.
        differences: those beyond tolerance, in the order in which a run produces them.
        forward_bits: whether the loss of the first step had the bits of one process, which only the same
            forwards give.
        refused: the code and text of the error that every rank met while building.
        seconds: the time that the layout took on this rank.
        observed: in the watched step.
    """

    num_compared: int = 0
    worst: tuple[float, str] = (0.0, "")
    worst_noise: float = 0.0
    same_bits: bool = True
    differences: list[Difference] = field(default_factory=list)
    forward_bits: bool | None = None
    refused: PacelineError | None = None
    seconds: float = 0.0
    observed: Observed = field(default_factory=Observed)


class Comparer:
    """A comparison of this rank's parts with the reference's, as a run produces them.

    Args:
        reference: whole tensors.
        bits: whether the layout promises the reference's bits; then no difference counts as rounding.
    """

    def __init__(self, reference: Reference, trainer: Trainer, *, bits: bool) -> None:
        self.found = Compared()
        self._reference, self._trainer, self._bits = reference, trainer, bits
        self._rank = trainer.world.rank
        self._seen: set[str] = set()
        self._places = find_places(trainer.layout, self._rank)
        self.found.observed.rank = self._rank

    def number(self, step: int, kind: str, value: float) -> None:
        key = key_of(step, kind)
        expected = self._reference.facts.numbers[key]
        size = 0.0 if value == expected or (math.isnan(value) and math.isnan(expected)) else math.inf
        if size and math.isfinite(value) and math.isfinite(expected):
            size = abs(value - expected)
        if (step, kind) == (1, "loss"):
            self.found.forward_bits = size == 0
        noise = self._reference.facts.noise[key]
        factor = value / expected if expected and math.isfinite(value) else None
        self._note(step, kind, "", size, noise, factor=factor)

    def tensor(self, step: int, kind: str, name: str, owner: str, tensor: Tensor) -> None:
        key = key_of(step, kind, name)
        self._seen.add(key)
        if kind in (EVENT, EVENT_GRADIENT):
            self._compare_event(key, step, name, tensor, is_gradient=kind == EVENT_GRADIENT)
            return
        if key not in self._reference.keys:
            self._note(step, kind, name, math.inf, _NO_NOISE, note="one process has none")
            return
        expected = self._take_part(owner, self._reference.tensor(key))
        size, noise = measure_distance(expected, tensor), self._reference.facts.noise[key]
        if size <= self._allow(noise):
            self._note(step, kind, name, size, noise)
            return
        self._note(
            step,
            kind,
            name,
            size,
            noise,
            factor=find_factor(expected, tensor),
            rounded_to=find_rounding(expected, tensor, self._scales(step)),
            note=_compare_kinds(expected, tensor),
        )

    def _compare_event(self, key: str, step: int, name: str, tensor: Tensor, *, is_gradient: bool) -> None:
        facts, listed = self._reference.facts, self.found.observed.differences
        if key not in self._reference.keys or facts.watched is None:
            return
        expected, noise = find_part(self._reference.tensor(key), tensor, self._places), facts.noise[key]
        if expected is None or len(listed) >= _MAX_EVENTS:
            return
        size, (microbatch, _, text) = measure_distance(expected, tensor), name.partition("/")
        if size <= noise.tolerance:
            return
        event = Event.parse(text)
        listed.append(
            EventDifference(
                order=facts.watched.order[text],
                microbatch=int(microbatch),
                event=event,
                gradient=is_gradient,
                rank=self._rank,
                size=size,
                tolerance=noise.tolerance,
                scale=noise.scale,
                factor=find_factor(expected, tensor),
                looks_masked=looks_masked(expected, tensor, noise.tolerance),
                rounded_to=find_rounding(expected, tensor),
                stale=self._find_step(event.weight, tensor, step) if event.is_weight else None,
                is_received=not is_gradient and is_elsewhere(self._trainer, event.module),
            )
        )

    def _find_step(self, name: str, tensor: Tensor, now: int) -> int | None:
        """Return the earlier step after which the reference had such a weight; `None` if there is none."""
        for step in range(now - 2, -1, -1):
            key = key_after(step, name)
            if key in self._reference.keys:
                part = find_part(self._reference.tensor(key), tensor, self._places)
                tolerance = self._reference.facts.noise[key].tolerance
                if part is not None and measure_distance(part, tensor) <= tolerance:
                    return step
        return None

    def observe(self, watch: Watch, watched: WatchedFacts) -> None:
        """Add what `watch` has seen and how this process differs from the reference's, once all steps ran."""
        found, trainer = self.found.observed, self._trainer
        found.ran, found.losses, found.batches = watch.ran, watch.losses, watch.batches
        found.types, found.outside = watch.types.forward, watch.types.outside
        for key, digests in watch.types.draws.items():
            expected = watched.draws.get(key, [])
            shapes = [[digest.rpartition(" ")[0] for digest in each] for each in (expected, digests)]
            if shapes[0] == shapes[1] and expected != digests:
                found.other_draws.append(key.partition("/")[2])
        for owner, settings in list_process(trainer).items():
            found.settings += compare_settings(self._rank, owner, watched.settings.get(owner, {}), settings)
        for name, module in describe_modules(trainer.model).items():
            if (there := watched.modules.get(name)) is not None:
                found.settings += compare_settings(self._rank, name, there.settings, module.settings)
                hooks = [{"hooks": ", ".join(facts.hooks)} for facts in (there, module)]
                found.settings += compare_settings(self._rank, name, *hooks)
        for name in {d.event.module for d in found.differences if d.event.side == "out"}:
            inner = trainer.model.get_submodule(name)
            copies = {key: value for key, value in vars(inner).items() if isinstance(value, Tensor)}
            for key, value in copies.items():
                for weight in own_parameters(inner):
                    full = f"{name}.{weight}" if name else weight
                    if (step := self._find_step(full, take_local(value), watch.step)) is not None:
                        found.stale_copies[name] = key, step

    def _scales(self, step: int) -> tuple[float, ...]:
        """Return the numbers that a reduction's sum may be divided by: 1 and the global batch's weight."""
        return 1.0, self._reference.facts.numbers.get(key_of(step, "weight of the batch"), 1.0)

    def finish(self) -> Compared:
        """Add tensors that the reference has and this layout never showed; return everything in order."""
        for key in sorted(self._reference.keys - self._seen):
            step, kind, name = key.split("/", 2)
            if kind in (EVENT, EVENT_GRADIENT):
                continue
            owner = name.split(" ")[0] if kind == "optimizer" else name
            if self._take_part(owner, self._reference.tensor(key)).numel():  # a shard may be empty
                self._note(int(step), kind, name, math.inf, _NO_NOISE, note="this layout has none")
        order = {kind: number for number, kind in enumerate(KINDS)}
        self.found.differences.sort(key=lambda d: (d.step, order[d.kind]))
        return self.found

    def _take_part(self, owner: str, whole: Tensor) -> Tensor:
        # Optimizer state that does not have its parameter's shape (a count of steps) is whole on every rank.
        if not holds(self._trainer, owner):
            return whole.reshape(-1)[:0]
        key = key_of(0, "initial", owner)  # which a buffer that the first forward makes has not
        shape = self._reference.tensor(key).shape if key in self._reference.keys else whole.shape
        return take_part(self._trainer, owner, whole) if whole.shape == shape else whole

    def _allow(self, noise: Noise) -> float:
        return 0.0 if self._bits else noise.tolerance

    def _note(self, step: int, kind: str, name: str, size: float, noise: Noise, **seen: Any) -> None:
        found, tolerance = self.found, self._allow(noise)
        found.num_compared += 1
        found.same_bits &= size == 0
        found.worst_noise = max(found.worst_noise, divide(size, noise.level))
        found.worst = max(found.worst, (divide(size, tolerance), key_of(step, kind, name)))
        if size > tolerance and len(found.differences) < _MAX_LISTED:
            found.differences.append(
                Difference(
                    step, kind, name, self._rank, size, tolerance, noise.tolerance, noise.scale, **seen
                )
            )


def _compare_kinds(expected: Tensor, tensor: Tensor) -> str:
    """Return how shapes or dtypes differ, as text; empty if they agree."""
    if expected.shape != tensor.shape:
        return f"shape {list(tensor.shape)} in place of {list(expected.shape)}"
    if expected.dtype != tensor.dtype:
        ours, theirs = (str(t.dtype).removeprefix("torch.") for t in (tensor, expected))
        return f"{ours} in place of {theirs}"
    return ""


def promises_bits(subject: Subject, layout: Layout) -> bool:
    """Return whether the layout promises the bits of one process: exact reduction, no split sum."""
    return subject.reduction == "exact" and layout.keeps_bits and layout.recompute == "none"


def compare_layouts(
    subject: Subject, folder: str, facts: Facts, layouts: list[Layout], watched: int = 0
) -> list[Compared]:
    """Train one layout after another on the present ranks, and compare each; collective.

    Args:
        folder: with the reference.
        watched: the step whose modules are watched, as they were in the reference; 0 for none.

    Returns:
        This rank's findings, by layout.
    """
    reference = Reference(Path(folder), facts)
    with start(**subject.start) as world:
        opened = subject.open()
        found = []
        for layout in layouts:
            world.barrier()
            began_s = time.perf_counter()
            compared = compare_layout(opened, subject, reference, layout, watched)
            found.append(replace(compared, seconds=time.perf_counter() - began_s))
            gc.collect()  # the trainer, and with it the threads of its groups
    return found


@ranks_may_differ()
def compare_layout(
    opened: Opened, subject: Subject, reference: Reference, layout: Layout, watched: int
) -> Compared:
    """Train a layout on the current world and compare it with the reference; collective."""
    try:
        trainer = opened.build_trainer(
            layout, reduction=subject.reduction, clip_norm=reference.facts.clip_norm
        )
    except PacelineError as error:  # all ranks raise the same error; in a step, one rank alone may fail
        return Compared(refused=error)
    try:
        comparer = Comparer(reference, trainer, bits=promises_bits(subject, layout))
        watch = Watch(trainer, comparer, subject.dtype, watched) if watched else None
        run_steps(trainer, opened.give_shares(trainer), subject.num_steps, comparer, watch)
        if watch is not None and reference.facts.watched is not None:
            comparer.observe(watch, reference.facts.watched)
        return comparer.finish()
    finally:
        trainer.close()
