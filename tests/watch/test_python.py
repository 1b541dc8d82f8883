"""Launches from Python are watched as those of `paceline run` are."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.launching import watcher as watching


def stay_away():
    with paceline.start(device="cpu") as world:
        if world.rank == 0:
            dist.all_reduce(torch.ones(1))
        while True:
            time.sleep(1)


def give_other_sizes():
    with paceline.start(device="cpu") as world:
        dist.all_reduce(torch.ones(1 + world.rank))


def test_a_hang_ends_in_a_verdict() -> None:
    with pytest.raises(paceline.JobStuck, match=r"rank 1 never reached all_reduce") as raised:
        paceline.launch(stay_away, nproc=2, hang_after_s=3)
    assert "test_python.py" in str(raised.value)
    assert raised.value.message.table["code"] == "PL800"


def test_calls_that_do_not_match_end_in_a_verdict() -> None:
    with pytest.raises(paceline.JobStuck, match=r"different sizes in all_reduce .*\[PL803\]"):
        paceline.launch(give_other_sizes, nproc=2)


def test_nobody_watches_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(watching, "build_default", asked.append)
    assert len(paceline.launch(os.getpid, nproc=1, hang_after_s=None)) == 1
    assert asked == []
    paceline.launch(os.getpid, nproc=1)
    assert asked == [540.0]


@pytest.mark.parametrize("hang_after_s", [0, -1.0, float("nan")])
def test_a_time_that_is_none(hang_after_s: float) -> None:
    with pytest.raises(paceline.PacelineError, match=f"hang_after_s={hang_after_s}") as raised:
        paceline.launch(os.getpid, nproc=1, hang_after_s=hang_after_s)
    assert raised.value.code == "PL349"


def test_the_front_door_brings_the_watcher() -> None:
    assert watching.build_default is not None
    assert watching.build_default(5.0).entry == "paceline.watch.rank.reporter:begin"


class Stuck(nn.Module):
    """Stands still in the forward of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while os.environ.get("RANK") == "1":
            time.sleep(1)
        output: torch.Tensor = self.inner(x)
        return output


def make_batch(step: int) -> torch.Tensor:
    return torch.full((8, 4), float(step))


def mean(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.mean()


def test_verify_reports_a_hang() -> None:
    verified = paceline.verify(
        Stuck,
        make_batch,
        mean,
        layouts=["dp_replicate=2"],
        steps=1,
        hang_after_s=4,
    )
    (result,) = verified.results
    assert result.status == "failed"
    assert "The ranks hang: rank 1 never reached " in result.findings[0].saw
