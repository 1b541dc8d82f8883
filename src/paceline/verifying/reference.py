"""Trains one process as the reference, and measures how much of its numbers is rounding.

The reference is trained once. Then it is trained again several times, in ways that must not matter. Every
weight starts one last bit away. Except in the first rerun, the microbatches of every step run in another
order. Another order of the microbatches stands for what other ranks do to sums over microbatches. The last
bits stand for what splitting does inside a forward: a matrix product whose sum is cut in two rounds as if its
factors were a last bit away (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.5). The
distance that the reruns move a tensor is its noise floor.

Weights are compared by how far they have moved since the start, because the start of a rerun is moved on
purpose. Optimizers like AdamW turn a gradient of nearly 0 into a whole step. The reruns use the same
optimizer, so the floor of the weights includes this effect, element by element.

For a buffer that depends on the order of the microbatches by more than rounding, only the first rerun, which
keeps the order, sets the floor. Otherwise a running average that ranks never synchronise would be its own
tolerance.

The tensors are in `reference.safetensors` (keys `step/kind/name`) of a folder that all ranks read as a memory
map. To find where a layout goes wrong, the same is made again with the modules of one step watched.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.recipe import Layout
from paceline.recipe.compress import CompressSection
from paceline.train.trainer import Trainer
from paceline.verifying.closeness import EPS, FACTORS, Noise, largest, measure_distance
from paceline.verifying.observe import list_optimizer_settings, move_last_bits
from paceline.verifying.precision import Rounding
from paceline.verifying.run_steps import run_steps
from paceline.verifying.settings import (
    FUNCTIONS,
    OPTIMIZER,
    PROCESS,
    list_functions,
    list_process_settings,
)
from paceline.verifying.subject import Opened, Subject
from paceline.verifying.watch import (
    EVENT,
    EVENT_GRADIENT,
    ONCE,
    Event,
    ModuleFacts,
    Watch,
    describe_modules,
)
from paceline.world import start

ONE = Layout(dp_replicate=1)
# Number of reruns behind a floor. Each is one draw of the largest of many elements. As measured, a fourth
# raises no floor by more than half.
NUM_RERUNS = 3
# Reruns that differ by this share of a number differ by more than rounding: something random is not seeded.
_RANDOM = {"fp64": 1e-6, "fp32": 1e-2, "bf16": 0.5, "fp16": 0.5}
_CLIPPED_SHARE = 0.5


def key_of(step: int, kind: str, name: str = "") -> str:
    """Return the name of a tensor or number in the reference's files."""
    return f"{step}/{kind}/{name}"


def key_after(step: int, name: str) -> str:
    """Return the key of a weight as it was after a step; 0 is the start."""
    return key_of(step, "weight" if step else "initial", name)


@dataclass(frozen=True)
class WatchedFacts:
    """The facts about the watched step of the reference.

    Attributes:
        order: of the events, by text.
        modules: facts by name.
        losses: by microbatch, (sum of losses, weight).
        parameters: names of those that are trained.
        types: the narrowest types that operations computed in, by module in forward.
        outside: the same outside of forwards, under an empty name.
        settings: of functions, the process and the optimizer, by owner.
        changed: weights that a forward of this step found changed since the step before.
        draws: see `Types`.
        batches: as in `Watch`, but those that differ from run to run.
    """

    order: dict[str, int]
    modules: dict[str, ModuleFacts]
    losses: dict[int, tuple[float, float]]
    parameters: list[str]
    types: dict[str, str] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    draws: dict[str, list[str]] = field(default_factory=dict)
    batches: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """The facts about the reference besides its tensors.

    Attributes:
        numbers: loss, weight of the batch and norm by key.
        noise: by key, of tensors and numbers.
        clip_norm: to which gradients were clipped, in the layouts too.
        num_tensors: compared per layout.
        num_microbatches: of every step.
        tied: names of parameters that share their storage.
        draws: random draws of the forward that depend on more than the sample.
        narrow: modules that compute in a narrower type than the training's, with that type.
        ordered: buffers that depend on the order of the microbatches, by more than rounding.
        watched: of the step whose modules were watched, if any.
    """

    numbers: dict[str, float]
    noise: dict[str, Noise]
    clip_norm: float
    num_tensors: int
    num_microbatches: list[int]
    tied: list[list[str]]
    draws: list[Finding]
    narrow: dict[str, str] = field(default_factory=dict)
    ordered: list[str] = field(default_factory=list)
    watched: WatchedFacts | None = None


class Reference:
    """The reference as the ranks of a layout read it: tensors by key, from a memory map."""

    def __init__(self, folder: Path, facts: Facts) -> None:
        self._folder, self.facts = folder, facts

    @cached_property
    def _file(self) -> Any:
        return safe_open(str(self._folder / "reference.safetensors"), framework="pt")

    @cached_property
    def keys(self) -> frozenset[str]:
        """The keys of all tensors."""
        return frozenset(self._file.keys())

    def tensor(self, key: str) -> Tensor:
        """Return a whole tensor."""
        found: Tensor = self._file.get_tensor(key)
        return found


class _ReferenceRecorder:
    """An observer that keeps every number and tensor."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, float] = {}

    def number(self, step: int, kind: str, value: float) -> None:
        self.numbers[key_of(step, kind)] = value

    def tensor(self, step: int, kind: str, name: str, owner: str, tensor: Tensor) -> None:
        self.tensors[key_of(step, kind, name)] = tensor.clone(memory_format=torch.contiguous_format)


class _Spread:
    """An observer that records how far a rerun is from the first run."""

    def __init__(self, first: _ReferenceRecorder, floors: dict[str, float]) -> None:
        self._first, self._floors = first, floors
        self._start: dict[str, Tensor] = {}

    def number(self, step: int, kind: str, value: float) -> None:
        key = key_of(step, kind)
        self._note(key, abs(value - self._first.numbers[key]))

    def tensor(self, step: int, kind: str, name: str, owner: str, tensor: Tensor) -> None:
        if kind == "initial":
            self._start[name] = tensor.clone()
            return
        key = key_of(step, kind, name)
        if key not in self._first.tensors:
            if kind in (EVENT, EVENT_GRADIENT):
                return
            raise _random_error(key, math.inf)
        there = self._first.tensors[key]
        if kind == "weight" and tensor.is_floating_point():
            moved = tensor - self._start[name]
            self._note(key, measure_distance(moved, there - self._first.tensors[key_of(0, "initial", name)]))
        else:
            self._note(key, measure_distance(tensor, there))

    def _note(self, key: str, size: float) -> None:
        self._floors[key] = max(self._floors.get(key, 0.0), 0.0 if math.isnan(size) else size)


def make_reference(subject: Subject, folder: str, step: int = 0) -> Facts:
    """Train the reference and its reruns on one rank, and write them into the folder.

    Args:
        step: whose modules are watched; 0 for none.
    """
    with start(**subject.start):
        opened = subject.open()
        first = _train_first(opened, subject, step)
        in_order: dict[str, float] = {}
        spread = _Spread(first.found, in_order)
        narrow, _ = _rerun(opened, subject, first.clip_norm, 1, spread, 0, shuffles=False)
        floors = dict(in_order)
        # One rerun is watched: more of them only raise the floors, by weights whose gradients are rounding.
        _, again = _rerun(opened, subject, first.clip_norm, 2, _Spread(first.found, floors), step)
        for number in range(3, NUM_RERUNS + 1):
            _rerun(opened, subject, first.clip_norm, number, _Spread(first.found, floors), 0)
    ordered = _find_ordered(first.found, in_order, floors, subject.dtype)
    noise, watched = _measure_noise(first.found, floors, subject.dtype), first.watched
    if watched is not None:
        batches = dict(watched.batches.items() & again.items())
        changed = _find_changed(first.found.tensors, noise, step)
        watched = replace(watched, changed=changed, batches=batches)
    facts = Facts(
        numbers=first.found.numbers,
        noise=noise,
        narrow=narrow,
        ordered=ordered,
        clip_norm=first.clip_norm,
        num_tensors=len(first.found.tensors),
        num_microbatches=first.num_microbatches,
        tied=first.tied,
        draws=first.draws,
        watched=watched,
    )
    _check_repeatable(facts, subject.dtype)
    save_file(first.found.tensors, str(Path(folder) / "reference.safetensors"))
    return facts


@dataclass(frozen=True)
class _First:
    """The results of the first run; attributes as in `Facts`."""

    found: _ReferenceRecorder
    clip_norm: float
    num_microbatches: list[int]
    tied: list[list[str]]
    draws: list[Finding]
    watched: WatchedFacts | None


def _train_first(opened: Opened, subject: Subject, step: int) -> _First:
    """Train once; if the gradients were never clipped, train again with a norm that clips."""
    clip_norm = subject.clip_norm
    while True:
        trainer = opened.build_trainer(ONE, reduction=subject.reduction, clip_norm=clip_norm)
        tied = _list_tied(trainer.model)
        modules, parameters = describe_modules(trainer.model), trainer.model.named_parameters()
        trained = [name for name, parameter in parameters if parameter.requires_grad]
        shares, more = itertools.tee(opened.give_shares(trainer))
        found = _ReferenceRecorder()
        watch = Watch(trainer, found, subject.dtype, step) if step else None
        run_steps(trainer, shares, subject.num_steps, found, watch)
        norms = [value for key, value in found.numbers.items() if key.split("/")[1] == "norm"]
        finite = [norm for norm in norms if math.isfinite(norm) and norm > 0]
        if not clip_norm or not finite or any(norm > clip_norm for norm in finite):
            used = list(itertools.islice(more, subject.num_steps))
            counts, draws = [s.num_microbatches for s in used], trainer.find_random_draws(used[0])
            watched = None if watch is None else _describe_watched(trainer, watch, found, modules, trained)
            return _First(found, clip_norm, counts, tied, draws, watched)
        clip_norm = _CLIPPED_SHARE * min(finite)


def _describe_watched(
    trainer: Trainer,
    watch: Watch,
    found: _ReferenceRecorder,
    modules: dict[str, ModuleFacts],
    parameters: list[str],
) -> WatchedFacts:
    events = [key.split("/", 3)[3] for key in found.tensors if key.split("/", 2)[1] == EVENT]
    return WatchedFacts(
        order={event: number for number, event in enumerate(dict.fromkeys(events))},
        modules=modules,
        losses=watch.losses,
        parameters=parameters,
        types=watch.types.forward,
        outside=watch.types.outside,
        settings=list_process(trainer),
        draws=watch.types.draws,
        batches=watch.batches,
    )


def list_process(trainer: Trainer) -> dict[str, dict[str, str]]:
    """Return the settings that belong to no module, by owner."""
    return {
        FUNCTIONS: list_functions(),
        PROCESS: list_process_settings(),
        OPTIMIZER: list_optimizer_settings(trainer),
    }


def _find_changed(tensors: dict[str, Tensor], noise: dict[str, Noise], step: int) -> list[str]:
    """Return the weights that a forward of the step found changed since the step before."""
    found = []
    for key, tensor in tensors.items():
        if key.startswith(begin := f"{step}/{EVENT}/{ONCE}/"):
            weight = Event.parse(key.removeprefix(begin)).weight
            before = key_after(step - 1, weight)
            if before in noise and measure_distance(tensors[before], tensor) > noise[before].tolerance:
                found.append(weight)
    return found


def _rerun(
    opened: Opened,
    subject: Subject,
    clip_norm: float,
    number: int,
    spread: _Spread,
    step: int,
    *,
    shuffles: bool = True,
) -> tuple[dict[str, str], dict[str, str]]:
    """Train again in a way that must not matter.

    Returns:
        The modules that compute in a narrower type, with that type; and the batches of the watched step.
    """
    # The fast reduction adds in the order of the microbatches; the exact one, which alone compresses, has a
    # fixed order of its own and takes no other.
    is_compressed = subject.read(CompressSection).kind != "none"
    reduction = subject.reduction if is_compressed else "fast"
    trainer = opened.build_trainer(ONE, reduction=reduction, clip_norm=clip_norm)
    move_last_bits(trainer.model, EPS[subject.dtype] / 2, seed=number)
    seen = None
    if not shuffles and subject.dtype in ("fp64", "fp32"):
        seen = Rounding(trainer, EPS[subject.dtype])
    shares = opened.give_shares(trainer)
    if shuffles and not is_compressed:
        shares = _shuffle_shares(shares, number)
    watch = Watch(trainer, spread, subject.dtype, step) if step else None
    run_steps(trainer, shares, subject.num_steps, spread, watch)
    return {} if seen is None else seen.narrow, {} if watch is None else watch.batches


def _find_ordered(
    first: _ReferenceRecorder, in_order: dict[str, float], floors: dict[str, float], dtype: str
) -> list[str]:
    """Return the buffers that depend on the order of the microbatches; lower their floors to `in_order`'s."""
    found = []
    for key, noise in _measure_noise(first, in_order, dtype).items():
        _, kind, name = key.split("/", 2)
        if kind == "buffer" and floors.get(key, 0.0) > noise.tolerance:
            floors[key] = in_order.get(key, 0.0)
            found.append(name)
    return list(dict.fromkeys(found))


def _shuffle_shares(shares: Iterator[Share], seed: int) -> Iterator[Share]:
    """Yield the same global batches with their microbatches in another order.

    Each microbatch keeps its number, and so its seeds and its place in BatchNorm's running statistics.
    """
    generator = random.Random(seed)
    for share in shares:
        order = list(range(len(share.microbatches)))
        generator.shuffle(order)
        if order == sorted(order):
            order = order[1:] + order[:1]
        yield replace(
            share,
            microbatches=[share.microbatches[place] for place in order],
            samples=[share.samples[place] for place in order],
        )


def _measure_noise(first: _ReferenceRecorder, floors: dict[str, float], dtype: str) -> dict[str, Noise]:
    scales = {key: largest(tensor) for key, tensor in first.tensors.items()}
    tops: dict[str, float] = {}
    for key, scale in scales.items():
        kind = _kind_of(key)
        tops[kind] = max(tops.get(kind, 0.0), scale if math.isfinite(scale) else 0.0)
    factor, noise = FACTORS[dtype], {}
    for key, tensor in first.tensors.items():
        kind = _kind_of(key)
        if kind.endswith("initial") or not tensor.is_floating_point():
            noise[key] = Noise(0.0, scales[key], 0.0, factor)  # to the last bit
            continue
        # Weights keep the type that they are stored in, even if forwards compute in 16 bits.
        eps = torch.finfo(tensor.dtype).eps if kind.endswith("weight") else EPS[dtype]
        noise[key] = Noise(floors.get(key, 0.0), scales[key] or tops[kind], eps, factor)
    for key, value in first.numbers.items():
        eps = EPS["fp64"] if _kind_of(key).endswith("weight of the batch") else EPS[dtype]
        scale = abs(value) if math.isfinite(value) else 0.0
        noise[key] = Noise(floors.get(key, 0.0), scale, eps, factor)
    return noise


def _kind_of(key: str) -> str:
    return "/".join(key.split("/", 2)[:2])


def _check_repeatable(facts: Facts, dtype: str) -> None:
    for key, value in facts.numbers.items():
        floor = facts.noise[key].floor
        if _kind_of(key).endswith(("loss", "norm")) and floor > _RANDOM[dtype] * abs(value):
            raise _random_error(key, floor / abs(value) if value else math.inf)


def _random_error(key: str, apart: float) -> PacelineError:
    step, kind, _ = key.split("/", 2)
    return PacelineError(
        "PL722",
        saw=f"one process, trained again with its microbatches in another order, gave another {kind} at step "
        f"{step}: apart by {apart:.1e} of it.",
        rule="A reference must be repeatable, or nothing can be compared with it.",
        fix="Draw random numbers from torch's, numpy's or Python's global generators, which are seeded per "
        "microbatch; give the same batch for the same step; and keep no state from one forward to the next.",
    )


def _list_tied(model: torch.nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
