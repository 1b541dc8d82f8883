"""What is chosen for CPUs alone stands in one list."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import paceline
from tests.dist.pool import Pool

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
BELOW_THE_TOOLS = ("parallel", "train", "comm", "checkpoint", "data", "models")


def asks_for_the_cpu(path: Path) -> bool:
    """Return whether a file compares something with "cpu", or reads an attribute `is_cpu`."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    compared = [
        part for node in nodes if isinstance(node, ast.Compare) for part in (node.left, *node.comparators)
    ]
    return any(isinstance(node, ast.Attribute) and node.attr == "is_cpu" for node in nodes) or any(
        isinstance(part, ast.Constant) and part.value == "cpu" for part in compared
    )


def test_every_choice_for_cpus_is_listed() -> None:
    files = [path for room in BELOW_THE_TOOLS for path in (SOURCE / room).rglob("*.py")]
    choosing = {p.relative_to(ROOT).as_posix() for p in (*files, *SOURCE.glob("*.py")) if asks_for_the_cpu(p)}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## What differs on the CPU")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert choosing == {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def train_beside_gpus(world: Any, folder: str) -> bool:
    """Train on the CPU, with the exact reduction and a save in the background, where CUDA must not start."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    started = RuntimeError("CUDA has started")
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", side_effect=started),
        mock.patch.object(torch.cuda, "_lazy_init", side_effect=started),
    ):
        trainer = paceline.Trainer(
            model,
            forward=lambda model, batch: model(batch["x"]),
            loss=lambda output, batch: output.square().mean(),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
            layout="dp_replicate=2",
            microbatch_size=2,
            asynchronous_saves=True,
            example={"x": torch.zeros(2, 8)},
        )
        trainer.resume(folder)
        for share in trainer.loader([{"x": torch.ones(8)}] * 16, global_batch_size=8, pin_memory=False):
            trainer.step(share)
        trainer.save(wait=True)
    return world.device.type == "cpu"


def test_a_run_on_the_cpu_leaves_the_gpus_of_its_machine_alone(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(train_beside_gpus, args=(str(tmp_path / "run"),)) == [True, True]
