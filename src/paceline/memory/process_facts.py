"""Finds what a process was doing when its memory filled, and what its model is like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from paceline.memory.account import ModelState, Phase, Progress
from paceline.memory.graph import Graph
from paceline.memory.holders import find_place, read_variables
from paceline.memory.live_modules import Models, find_repeated

# Optimizers by the tensors that they keep per parameter.
_MOMENTS = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Lion": 1,
    "Muon": 1,
    "Adagrad": 1,
    "RMSprop": 1,
}
_BACKWARD_FILE = "torch/autograd/graph.py"
_BACKWARD_CALL = "_engine_run_backward"
_OPTIMIZER_FILES = "torch/optim/"
_FORWARD = "forward"


def find_phase(frames: Sequence[FrameType]) -> Phase:
    """Return what the thread with these frames is in, innermost first."""
    for frame in frames:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if name == _BACKWARD_CALL and path.endswith(_BACKWARD_FILE):
            return "backward"
        if _OPTIMIZER_FILES in path and name in ("step", "wrapper"):
            return "optimizer"
        if name == _FORWARD:
            return "forward"
    return "elsewhere"


def find_running(torch: Any, frames: Sequence[FrameType], models: Models) -> list[str | None]:
    """Return for each frame the name of the module in whose forward it runs, `None` outside of all models."""
    found: list[str | None] = []
    running = None
    for frame in reversed(frames):
        if frame.f_code.co_name == _FORWARD:
            module = read_variables(frame).get("self")
            if isinstance(module, torch.nn.Module) and id(module) in models.names:
                running = models.names[id(module)]
        found.insert(0, running)
    return found


def describe_progress(
    frames: Sequence[FrameType], running: str | None, models: Models, graph: Graph
) -> Progress:
    """Return where the model was.

    Args:
        frames: of the thread, innermost first.
    """
    phase = find_phase(frames)
    reached = 1.0
    if running is not None and phase == "forward":
        trained = models.trained
        used = sum(
            any(order >= graph.begins for order in graph.uses.get(id(parameter), ())) for parameter in trained
        )
        reached = used / len(trained) if used else 1.0
    return Progress(
        place=find_place(frames),
        module=running,
        module_kind="" if running is None else models.kind(running),
        phase="elsewhere" if phase == "forward" and running is None else phase,
        reached=reached,
        has_graph=graph.num_nodes > 0,
        is_evaluating=bool(models.trained and graph.num_nodes)
        and not vars(models.roots[0]).get("training", True),
    )


def describe_model(
    models: Models, optimizers: Sequence[Any], graph: Graph, totals: Mapping[str, int]
) -> ModelState:
    """Return facts on the model and its optimizers.

    Args:
        totals: bytes of activations by module.
    """
    trained = [parameter for parameter in models.parameters if parameter.requires_grad]
    state = 0
    for optimizer in optimizers:
        name = type(optimizer).__name__
        with suppress(Exception):  # an optimizer of another form
            for group in optimizer.param_groups:
                moments = _MOMENTS.get(name, 1 if group.get("momentum") else 0)
                state += moments * sum(_count(p) for p in group["params"] if p.requires_grad)
    prefix, number = find_repeated(totals, models)
    owned: Counter[str] = Counter()
    for parameter in models.parameters:
        owned[models.owners[id(parameter)]] += _count(parameter)
    inside = [size for module, size in totals.items() if not prefix or f"{module}.".startswith(f"{prefix}.")]
    return ModelState(
        trained=sum(map(_count, trained)),
        expected_state=state,
        repeated=prefix,
        num_repeated=number,
        repeated_activations=sum(inside) if number else 0,
        fp32_activations=sum({one.key: one.num_bytes for one in graph.saved if one.is_fp32}.values()),
        largest_module=max([0, *owned.values(), sum(owned.values()) // number if number else 0]),
        is_sharded=any(hasattr(type(parameter), "to_local") for parameter in trained),
    )


def _count(parameter: Any) -> int:
    return int(parameter.numel() * parameter.element_size())
