"""`parallelize`, the one place that lays a model out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from paceline.mesh import build_mesh
from paceline.models.gpt import Gpt
from paceline.parallel.order import LaidOut, Settings, parallelize
from paceline.recipe import Layout
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool


def lay(model: nn.Module, mesh: Any, **settings: Any) -> LaidOut:
    layout = Layout(dp_replicate=1) if mesh is None else mesh.layout
    return parallelize(model, mesh, Settings(layout, **settings), torch.device("cpu"))


def lay_out(world: Any) -> tuple[list[str], bool]:
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    compiled: list[Any] = []
    logger = logging.getLogger("paceline.parallel.order")
    logger.setLevel(logging.INFO)
    handler = Handler()
    logger.addHandler(handler)
    try:
        model = nn.Linear(2, 2)
        mesh = build_mesh(Layout(), world) if world.world_size > 1 else None
        with pytest.MonkeyPatch.context() as patch:
            # Importing the compiler takes seconds.
            patch.setattr(torch, "compile", lambda forward: compiled.append(forward) or forward)
            laid_out = lay(model, mesh, compile=True)
        assert len(compiled) == 1
        assert torch.equal(model(torch.ones(2)), compiled[0](torch.ones(2)))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return records, laid_out.replica is None


def test_the_order_is_reported(ranks: Pool) -> None:
    compiled = "compile: torch.compile over the whole model"
    replicated = "replicate: DistributedDataParallel over dp_replicate=2, fast reduction"
    assert ranks.run(lay_out) == [([compiled, replicated], False)] * 2
    assert ranks.run(lay_out, nproc=1) == [([compiled], True)]


def lay_out_all(world: Any) -> list[str]:
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage().split(":")[0].split("=")[0])

    logger = logging.getLogger("paceline.parallel")
    logger.setLevel(logging.INFO)
    handler = Handler()
    logger.addHandler(handler)
    try:
        model = Gpt(GptModel(kind="gpt", layers=2, hidden=16, heads=2), 32, 8)
        mesh = build_mesh(Layout.parse("dp_shard=2 tp=2 recompute=block"), world)
        laid_out = lay(model, mesh, example=lambda m: m(torch.zeros(2, 8, dtype=torch.int64)))
        assert laid_out.plan is not None
        assert laid_out.plan.share == 1
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return records


def test_every_transformation_is_reported_in_its_order(ranks: Pool) -> None:
    assert ranks.run(lay_out_all, nproc=4) == [["tp", "recompute", "shard"]] * 4
