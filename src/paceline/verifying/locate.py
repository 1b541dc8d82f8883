"""Finds where a layout goes wrong: repeats one step on one process and on it, with modules watched."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.recipe import Layout
from paceline.torch_seams.modules import own_parameters
from paceline.train.same_settings import ranks_may_differ
from paceline.train.trainer import Trainer
from paceline.verifying.compare import (
    EPS,
    FACTORS,
    Noise,
    find_factor,
    find_rounding,
    largest,
    looks_masked,
    measure_distance,
)
from paceline.verifying.observe import (
    is_elsewhere,
    list_optimizer_settings,
    move_last_bits,
    take_local,
)
from paceline.verifying.parts import find_part, find_places
from paceline.verifying.reference import ONE, Facts, Reference, key_of, shuffle_shares
from paceline.verifying.run_steps import run_steps
from paceline.verifying.settings import (
    FUNCTIONS,
    OPTIMIZER,
    PROCESS,
    SettingDifference,
    compare_settings,
    list_functions,
    list_process_settings,
)
from paceline.verifying.subject import Opened, Subject
from paceline.verifying.watch import ONCE, Event, ModuleFacts, Watch, describe_modules
from paceline.world import start

_MAX_LISTED = 400


@dataclass(frozen=True)
class EventDifference:
    """A tensor at a module's boundary that differs from the reference's.

    Attributes:
        order: of the event in the reference's forward.
        microbatch: number in the global batch.
        event: the place.
        gradient: whether it is the gradient of that tensor.
        rank: the rank that had it.
        size, tolerance, scale: as in `Difference`.
        factor: as in `Difference`.
        looks_masked: whether other elements are 0 and the rest agrees, as with two dropout masks.
        rounded_to: the narrower type that its values were rounded to, empty for none.
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
        rank: the rank.
        ran: microbatches it ran, in order.
        differences: in order: forwards first, by event; then gradients, from the last event to the first.
        num_events: compared.
        losses: by microbatch, (sum of losses, weight).
        types: the narrowest types that operations computed in, by module in forward.
        outside: the same outside of forwards, under an empty name.
        settings: those that differ from one process's.
        other_draws: modules whose forward drew other random numbers of the same shapes than in one process.
        stale_copies: by module, the attribute that holds a weight as it was after an earlier step, and that
            step.
        batches: as in `Watch`.
    """

    rank: int = 0
    ran: list[int] = field(default_factory=list)
    differences: list[EventDifference] = field(default_factory=list)
    num_events: int = 0
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    settings: list[SettingDifference] = field(default_factory=list)
    other_draws: list[str] = field(default_factory=list)
    stale_copies: dict[str, tuple[str, int]] = field(default_factory=dict)
    batches: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WatchedFacts:
    """The facts about the watched step of the reference; can be written as JSON.

    Attributes:
        order: of the events, by text.
        noise: by key, of the events' tensors.
        modules: facts by name.
        losses: by microbatch, (sum of losses, weight).
        parameters: names of those that are trained.
        types, outside: as in `Observed`.
        settings: of functions, the process and the optimizer, by owner.
        changed: weights that a forward of this step found changed since the step before.
        draws: see `Types`.
        batches: as in `Watch`, but those that differ from run to run.
    """

    order: dict[str, int]
    noise: dict[str, Noise]
    modules: dict[str, ModuleFacts]
    losses: dict[int, tuple[float, float]]
    parameters: list[str]
    types: dict[str, str] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    draws: dict[str, list[str]] = field(default_factory=dict)
    batches: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, step: int) -> WatchedFacts:
        """Read the facts from the folder."""
        table = json.loads((folder / f"watched-{step}.json").read_text())
        table |= {
            "noise": {key: Noise(**value) for key, value in table["noise"].items()},
            "modules": {name: ModuleFacts(**value) for name, value in table["modules"].items()},
            "losses": {int(number): tuple(pair) for number, pair in table["losses"].items()},
        }
        return cls(**table)


def _key(microbatch: int, event: Event, gradient: bool) -> str:
    return f"{microbatch}/{event}{'/gradient' if gradient else ''}"


# ---- the reference


class _Keep:
    """A sink that keeps all events of the reference."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.order: dict[str, int] = {}
        self.losses: dict[int, tuple[float, float]] = {}

    def event(self, microbatch: int, event: Event, tensor: Tensor, *, gradient: bool) -> None:
        if not gradient:
            self.order.setdefault(str(event), len(self.order))
        self.tensors[_key(microbatch, event, gradient)] = tensor.clone(memory_format=torch.contiguous_format)

    def loss(self, microbatch: int, loss_sum: float, weight: float) -> None:
        self.losses[microbatch] = (loss_sum, weight)


class _Floors:
    """A sink that records how far a rerun's events are from the first run's."""

    def __init__(self, kept: _Keep) -> None:
        self._kept = kept
        self.floors: dict[str, float] = {}

    def event(self, microbatch: int, event: Event, tensor: Tensor, *, gradient: bool) -> None:
        key = _key(microbatch, event, gradient)
        if key in self._kept.tensors:
            size = measure_distance(self._kept.tensors[key], tensor)
            self.floors[key] = size if math.isfinite(size) else 0.0

    def loss(self, microbatch: int, loss_sum: float, weight: float) -> None:
        pass


class _Nothing:
    """An observer that ignores the tensors of whole steps."""

    def number(self, step: int, kind: str, value: float) -> None:
        pass

    def tensor(self, step: int, kind: str, name: str, owner: str, tensor: Tensor) -> None:
        pass


def watch_reference(subject: Subject, folder: str, step: int) -> None:
    """Train the reference up to `step`, and keep the tensors of every module in that step, in the folder."""
    facts = Facts.read(Path(folder))
    with start(**subject.start):
        opened = subject.open()
        kept = _Keep()
        trainer = opened.build_trainer(ONE, reduction="fast", clip_norm=facts.clip_norm)
        watch = Watch(trainer, kept, subject.dtype)
        modules = describe_modules(trainer.model)
        parameters = [name for name, each in trainer.model.named_parameters() if each.requires_grad]
        _run_watched(trainer, opened, watch, step)
        settings = _list_process(trainer)
        rerun = _Floors(kept)
        trainer = opened.build_trainer(ONE, reduction="fast", clip_norm=facts.clip_norm)
        move_last_bits(trainer.model, EPS[subject.dtype] / 2, seed=1)
        again = Watch(trainer, rerun, subject.dtype)
        _run_watched(trainer, opened, again, step, shuffles=True)
    noise = {
        key: Noise(rerun.floors.get(key, 0.0), largest(tensor), EPS[subject.dtype], FACTORS[subject.dtype])
        for key, tensor in kept.tensors.items()
        if tensor.is_floating_point()
    }
    table = WatchedFacts(
        order=kept.order,
        noise=noise,
        modules=modules,
        losses=kept.losses,
        parameters=parameters,
        types=watch.types.forward,
        outside=watch.types.outside,
        settings=settings,
        changed=_find_changed(kept, Reference(Path(folder)), step),
        draws=watch.types.draws,
        batches=dict(watch.batches.items() & again.batches.items()),
    )
    save_file(kept.tensors, str(Path(folder) / f"watched-{step}.safetensors"))
    (Path(folder) / f"watched-{step}.json").write_text(json.dumps(asdict(table)))


def _list_process(trainer: Trainer) -> dict[str, dict[str, str]]:
    """Return the settings that belong to no module, by owner."""
    return {
        FUNCTIONS: list_functions(),
        PROCESS: list_process_settings(),
        OPTIMIZER: list_optimizer_settings(trainer),
    }


def _key_after(step: int, name: str) -> str:
    """Return the reference's key of a weight as it was after a step; 0 is the start."""
    return key_of(step, "weight" if step else "initial", name)


def _find_changed(kept: _Keep, reference: Reference, step: int) -> list[str]:
    """Return the weights that a forward of the step found changed since the step before."""
    found = []
    for text in kept.order:
        event = Event.parse(text)
        if event.is_weight:
            key = _key_after(step - 1, event.weight)
            tensor = kept.tensors[_key(ONCE, event, False)]
            noise = reference.facts.noise.get(key)
            if noise is not None and measure_distance(reference.tensor(key), tensor) > noise.tolerance:
                found.append(event.weight)
    return found


def _run_watched(
    trainer: Trainer, opened: Opened, watch: Watch, step: int, *, shuffles: bool = False
) -> None:
    shares = opened.give_shares(trainer)

    def before(number: int, share: Any) -> None:
        if number == step:
            watch.begin(share)

    try:
        run_steps(
            trainer, shuffle_shares(shares, 1) if shuffles else shares, step, _Nothing(), before_step=before
        )
    finally:
        watch.end()
        trainer.close()


# ---- the layouts


class _Judge:
    """A sink that compares a rank's events with the reference's."""

    def __init__(self, folder: Path, step: int, trainer: Trainer) -> None:
        self.facts = WatchedFacts.read(folder, step)
        self.found = Observed(rank=trainer.world.rank)
        self._folder, self._step, self._trainer = folder, step, trainer
        self._places = find_places(trainer.layout, trainer.world.rank)
        self._reference = Reference(folder)

    @cached_property
    def _file(self) -> Any:
        return safe_open(str(self._folder / f"watched-{self._step}.safetensors"), framework="pt")

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset(self._file.keys())

    def loss(self, microbatch: int, loss_sum: float, weight: float) -> None:
        self.found.losses[microbatch] = (loss_sum, weight)

    def event(self, microbatch: int, event: Event, tensor: Tensor, *, gradient: bool) -> None:
        key = _key(microbatch, event, gradient)
        if key not in self._keys:
            return
        expected = find_part(self._file.get_tensor(key), tensor, self._places)
        if expected is None:
            return
        self.found.num_events += 1
        noise = self.facts.noise.get(key, Noise(0.0, 0.0, 0.0, 0.0))
        size = measure_distance(expected, tensor)
        if size <= noise.tolerance or len(self.found.differences) >= _MAX_LISTED:
            return
        self.found.differences.append(
            EventDifference(
                order=self.facts.order[str(event)],
                microbatch=microbatch,
                event=event,
                gradient=gradient,
                rank=self.found.rank,
                size=size,
                tolerance=noise.tolerance,
                scale=noise.scale,
                factor=find_factor(expected, tensor),
                looks_masked=looks_masked(expected, tensor, noise.tolerance),
                rounded_to=find_rounding(expected, tensor),
                stale=self._find_step(event.weight, tensor) if event.is_weight else None,
                is_received=not gradient and is_elsewhere(self._trainer, event.module),
            )
        )

    def _find_step(self, name: str, tensor: Tensor) -> int | None:
        """Return the earlier step after which the reference had such a weight; `None` if there is none."""
        for step in range(self._step - 2, -1, -1):
            key = _key_after(step, name)
            if key in self._reference.keys:
                part = find_part(self._reference.tensor(key), tensor, self._places)
                noise = self._reference.facts.noise.get(_key_after(step, name))
                if (
                    part is not None
                    and noise is not None
                    and measure_distance(part, tensor) <= noise.tolerance
                ):
                    return step
        return None

    def finish(self, watch: Watch) -> Observed:
        """Return all observations, in the order of forward and backward."""
        self.found.ran = watch.ran
        self.found.differences.sort(
            key=lambda d: (d.gradient, -d.order if d.gradient else d.order, d.microbatch)
        )
        self.found.batches = watch.batches
        self.found.types, self.found.outside = watch.types.forward, watch.types.outside
        self.found.other_draws = self._compare_draws(watch.types.draws)
        self.found.settings = self._compare_settings()
        self.found.stale_copies = self._find_stale_copies()
        return self.found

    def _compare_draws(self, draws: dict[str, list[str]]) -> list[str]:
        found = []
        for key, digests in draws.items():
            expected = self.facts.draws.get(key, [])
            shapes = [[digest.rpartition(" ")[0] for digest in each] for each in (expected, digests)]
            if shapes[0] == shapes[1] and expected != digests:
                found.append(key.partition("/")[2])
        return list(dict.fromkeys(found))

    def _compare_settings(self) -> list[SettingDifference]:
        rank, found = self.found.rank, []
        for owner, settings in _list_process(self._trainer).items():
            found += compare_settings(rank, owner, self.facts.settings.get(owner, {}), settings)
        for name, module in describe_modules(self._trainer.model).items():
            expected = self.facts.modules.get(name)
            if expected is not None:
                found += compare_settings(rank, name, expected.settings, module.settings)
                hooks = [{"hooks": ", ".join(facts.hooks)} for facts in (expected, module)]
                found += compare_settings(rank, name, *hooks)
        return found

    def _find_stale_copies(self) -> dict[str, tuple[str, int]]:
        """Return, for modules whose output differs, attributes that hold an earlier value of a weight."""
        found = {}
        for name in dict.fromkeys(d.event.module for d in self.found.differences if d.event.side == "out"):
            module = self._trainer.model.get_submodule(name)
            copies = {key: value for key, value in vars(module).items() if isinstance(value, Tensor)}
            for key, value in copies.items():
                for weight in own_parameters(module):
                    step = self._find_step(f"{name}.{weight}" if name else weight, take_local(value))
                    if step is not None:
                        found[name] = (key, step)
        return found


@ranks_may_differ()
def watch_layouts(subject: Subject, folder: str, cases: list[tuple[Layout, int]]) -> list[Observed]:
    """Train each layout on the present ranks up to its step, and watch that step; collective.

    Args:
        subject: the subject that is verified.
        folder: the folder that `watch_reference` has filled for each of the steps.
        cases: layouts of this number of ranks, each with its step.
    """
    facts = Facts.read(Path(folder))
    found = []
    with start(**subject.start) as world:
        opened = subject.open()
        for layout, step in cases:
            world.barrier()
            trainer = opened.build_trainer(layout, reduction=subject.reduction, clip_norm=facts.clip_norm)
            judge = _Judge(Path(folder), step, trainer)
            watch = Watch(trainer, judge, subject.dtype)
            _run_watched(trainer, opened, watch, step)
            found.append(judge.finish(watch))
    return found
