"""`parallelize`, the one place that lays a model out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.mesh import build_mesh
from paceline.parallel.order import parallelize
from paceline.recipe import Layout
from paceline.recipe.schema import DdpSection
from tests.dist.pool import Pool


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
            replica = parallelize(model, mesh, ddp=DdpSection(), compile=True)
        assert len(compiled) == 1
        assert torch.equal(model(torch.ones(2)), compiled[0](torch.ones(2)))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return records, replica is None


def test_the_order_is_told(ranks: Pool) -> None:
    compiled = "compile: torch.compile over the whole model"
    replicated = "replicate: DistributedDataParallel over dp_replicate=2, fast reduction"
    assert ranks.run(lay_out) == [([compiled, replicated], False)] * 2
    assert ranks.run(lay_out, nproc=1) == [([compiled], True)]


def test_synchronised_batchnorm_needs_cuda() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(PacelineError, match=r"sync_batchnorm is on, the model is on cpu.*\[PL422\]"):
        parallelize(model, None, ddp=DdpSection(), sync_batchnorm=True)
    assert type(model[1]) is nn.BatchNorm1d


@pytest.mark.gpu
def test_synchronised_batchnorm_replaces_layers_on_cuda() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2))).cuda()
    parallelize(model, None, ddp=DdpSection(), sync_batchnorm=True)
    assert isinstance(model[1][0], nn.SyncBatchNorm)


def test_a_hook_without_anybody_to_talk_to_is_told(caplog: pytest.LogCaptureFixture) -> None:
    hook: Any = (None, lambda state, bucket: torch.futures.Future())
    assert parallelize(nn.Linear(2, 2), None, ddp=DdpSection(), comm_hook=hook) is None
    assert "comm_hook is not used" in caplog.text
