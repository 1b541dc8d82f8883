"""The metrics that a run writes."""

from __future__ import annotations

import json
import math
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.sinks.feed import Feed
from paceline.sinks.sink import SinkRun, build_sinks
from paceline.train import metrics
from paceline.train.metrics import (
    MetricsWriter,
    describe_step,
    find_peak_flops,
    measure_gpu,
    measure_memory,
    read_rows,
)
from paceline.train.step import Step
from paceline.train.trainer import Trainer
from paceline.train.update import Updated
from tests.dist.pool import Pool
from tests.train.test_tensorboard import read as read_events

CONTRACT = ["step", "loss", "grad_norm", "lr", "samples", "tokens", "step_s"]


def updated(loss: float = 2.0, **fields: Any) -> Updated:
    return Updated(
        **{
            "loss": loss,
            "weight": 8.0,
            "grad_norm": 0.5,
            "skipped": None,
            "stop_signum": 0,
            "comm_s": 0.1,
            **fields,
        }
    )


def step(number: int, **updates: Updated) -> Step:
    return Step(
        number=number,
        epoch=1,
        num_samples=16,
        lr=0.01,
        updates=updates or {"model": updated()},
        step_s=0.5,
        data_s=0.1,
        comm_s=0.2,
    )


def row(number: int, *, loss: float = 2.0, **fields: Any) -> dict[str, Any]:
    options = {"samples": 16 * number, "tokens_per_sample": 10, "flops_per_sample": 1e6, "peak_flops": 64e6}
    return describe_step(step(number, model=updated(loss)), **{**options, "memory_bytes": 1000, **fields})


def test_a_row_has_what_the_contract_names() -> None:
    found = row(3)
    assert list(found)[:1] == ["step"]
    assert set(CONTRACT) <= found.keys()
    assert {key: found[key] for key in CONTRACT} == {
        "step": 3,
        "loss": 2.0,
        "grad_norm": 0.5,
        "lr": 0.01,
        "samples": 48,
        "tokens": 480,
        "step_s": 0.5,
    }
    assert (found["samples_per_s"], found["tokens_per_s"]) == (32.0, 320.0)
    assert (found["flops_per_s"], found["mfu"]) == (32e6, 0.5)


def test_what_is_not_known_is_null() -> None:
    found = row(1, tokens_per_sample=None, flops_per_sample=None, peak_flops=None)
    nothing = ("tokens", "tokens_per_s", "flops_per_s", "mfu", "skipped")
    assert [found[key] for key in nothing] == [None] * 5
    assert row(1, peak_flops=None)["mfu"] is None


def test_several_models_have_a_loss_each() -> None:
    models = {"discriminator": updated(1.5), "generator": updated(0.5, skipped="the loss is nan")}
    found = describe_step(
        step(1, **models),
        samples=1,
        tokens_per_sample=None,
        flops_per_sample=None,
        peak_flops=None,
        memory_bytes=1,
    )
    assert found["loss"] == found["loss_discriminator"] == 1.5
    assert found["loss_generator"] == 0.5
    assert found["skipped"] == "the loss is nan"


def open_feed(folder: Path, last_step: int = 0) -> Callable[[], Feed]:
    return lambda: Feed(build_sinks("tensorboard"), SinkRun(folder, last_step))


def write(folder: Path, steps: list[int], *, last_step: int, tensorboard: bool = False) -> None:
    feed = open_feed(folder, last_step) if tensorboard else None
    writer = MetricsWriter(folder, last_step=last_step, open_feed=feed)
    for number in steps:
        writer.write(row(number))
        if number % 2 == 0:
            writer.write_evaluation(number, {"loss": 1.0 / number})
    writer.close()


def numbers(folder: Path, name: str = "metrics.jsonl") -> list[int]:
    return [row["step"] for row in read_rows(folder / name)]


def test_a_resumed_start_drops_the_rows_that_it_writes_again(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3, 4, 5], last_step=0)
    write(tmp_path, [3, 4, 5, 6], last_step=2)
    assert numbers(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert numbers(tmp_path, "evaluations.jsonl") == [2, 4, 6]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', "\n", "\x00\x00", '{"step": 4, "loss": 1.0}'])
def test_a_torn_line_is_dropped(tmp_path: Path, torn: str) -> None:
    """The last one: whole, but for its end; the next row must not be glued to it."""
    write(tmp_path, [1, 2, 3], last_step=0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    write(tmp_path, [4], last_step=3)
    assert numbers(tmp_path) == [1, 2, 3, 4]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 4


def test_resuming_after_the_end_keeps_everything(tmp_path: Path) -> None:
    write(tmp_path, [1, 2], last_step=0)
    before = (tmp_path / "metrics.jsonl").stat()
    write(tmp_path, [], last_step=2)
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def refuse_constant(text: str) -> float:
    raise ValueError(text)


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, last_step=0, open_feed=open_feed(tmp_path))
    for number, loss in enumerate((1.0, math.nan, math.inf, -math.inf), 1):
        writer.write(row(number, loss=loss))
    writer.write_evaluation(4, {"loss": math.nan})
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse_constant) for line in lines]
    assert [row["loss"] for row in rows] == [1.0, None, None, None]
    (line,) = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse_constant) == {"step": 4, "loss": None}
    assert read_events(tmp_path / "tensorboard")["train/loss"] == [(1, 1.0)]


def test_tensorboard_has_the_curves(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3, 4], last_step=0, tensorboard=True)
    events = read_events(tmp_path / "tensorboard")
    keys = ("loss", "grad_norm", "lr", "samples_per_s", "tokens_per_s", "mfu", "data_s", "comm_s")
    assert events.keys() == {f"train/{key}" for key in keys} | {"valid/loss"}
    assert events["train/lr"] == [(number, pytest.approx(0.01)) for number in (1, 2, 3, 4)]
    assert events["valid/loss"] == [(2, 0.5), (4, 0.25)]


def test_without_tensorboard_there_is_no_folder(tmp_path: Path) -> None:
    write(tmp_path, [1], last_step=0)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "evaluations.jsonl"}


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_a_cpu_has_no_known_peak_and_some_memory() -> None:
    cpu = torch.device("cpu")
    assert find_peak_flops(cpu, "bf16") is None
    assert 50e6 < measure_memory(cpu) < 1e12


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 67e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA L4", "fp64", None),
        ("NVIDIA L40S", "bf16", None),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Some New Card", "bf16", None),
    ],
)
def test_peaks_are_known_by_the_devices_name(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert find_peak_flops(torch.device("cuda", 0), dtype) == peak


# ---- in a run


def run(world: Any, folder: str) -> list[float]:
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(64, 32, bias=False),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.01),
        microbatch_size=2,
        tokens_per_sample=7,
        peak_flops=1e9,
    )
    trainer.resume(folder)
    torch.manual_seed(world.rank)
    losses = [trainer.step(torch.randn(4, 64)).loss for _ in range(2)]
    trainer.close()
    return [*losses, trainer.step(torch.randn(4, 64)).loss]  # its row is written, too


def test_rank_0_writes_what_all_ranks_did(ranks: Pool, tmp_path: Path) -> None:
    losses, others = ranks.run(run, args=(str(tmp_path),))
    assert losses == others
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["loss"] for row in rows] == losses
    assert [(row["samples"], row["tokens"]) for row in rows] == [(8, 56), (16, 112), (24, 168)]
    for row in rows:
        assert row["step_s"] > 0
        assert 0 <= row["comm_s"] <= row["step_s"]
        assert row["data_s"] == 0.0
        # Two products of 64 x 32 each in forward and backward (no gradient of the input), per sample.
        per_sample = 2 * (2 * 64 * 32)
        assert row["flops_per_s"] == pytest.approx(per_sample * row["samples_per_s"])
        assert row["mfu"] == pytest.approx(row["flops_per_s"] / 2e9)
        assert row["skipped"] is None


def test_lines_that_are_no_rows_are_kept_beside_the_file(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, last_step=0)
    for number in (1, 2):
        writer.write(row(number))
    writer.close()
    path = tmp_path / "metrics.jsonl"
    spoilt = path.read_bytes() + b'\xff\0\n[1]\n{"step": "x"}\n5\n' + b"[" * 5000 + b'\n{"step": 3'
    path.write_bytes(spoilt)
    MetricsWriter(tmp_path, last_step=2).close()
    assert [found["step"] for found in read_rows(path)] == [1, 2]
    assert path.read_bytes().count(b"\n") == 2
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == spoilt


@pytest.mark.parametrize("num_taken", [0, 1, 20])
def test_rows_wait_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_taken: int
) -> None:
    """Of each write, a full disk may take some bytes; no line is torn, doubled or lost."""
    monkeypatch.setattr("paceline.train.metrics._FLUSH_S", 0.0)
    writer = MetricsWriter(tmp_path, last_step=0)
    writer.write(row(1))
    path, limit = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:  # the kernel then takes the bytes up to the limit, as a disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + num_taken, limit[1]))
        writer.amend({"early": 1.0})
        for number in (2, 3):
            writer.write(row(number))
        writer.amend({"late": 2.0})
        assert path.read_bytes().count(b"\n") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert caplog.text.count("Training goes on.") == 1
    writer.write(row(4))
    writer.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [found["step"] for found in rows] == [1, 2, 3, 4]
    assert rows[2]["late"] == 2.0
    assert "last rows" not in caplog.text


@pytest.mark.parametrize("removes", [True, False])
def test_a_folder_that_goes_away_ends_the_run(tmp_path: Path, removes: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    writer = MetricsWriter(folder, last_step=0)
    writer.write(row(1))
    if removes:
        shutil.rmtree(folder)
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.mkdir()
    with pytest.raises(PacelineError, match="no longer the folder") as caught:
        writer.write_evaluation(1, {"loss": 1.0})
    assert caught.value.code == "PL522"
    assert ("was removed" if removes else f"renamed to {tmp_path}/elsewhere") in str(caught.value)
    writer.close()
    assert removes or [found["step"] for found in read_rows(tmp_path / "elsewhere/metrics.jsonl")] == [1]


def test_another_working_folder_is_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = MetricsWriter(Path("run"), last_step=0)
    monkeypatch.chdir("/")
    writer.write(row(1))
    writer.close()
    assert len(read_rows(tmp_path / "run/metrics.jsonl")) == 1


def test_the_load_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    assert measure_gpu(torch.device("cpu")) == {}
    assert measure_gpu(device) == {}  # there is no NVML here
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 93)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 412_500)  # in milliwatts
    assert measure_gpu(device) == {"gpu_percent": 93.0, "gpu_w": 412.5}


@pytest.mark.parametrize("answers", [True, False])
def test_a_disk_that_stands_still_stops_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    monkeypatch.setattr("paceline.train.metrics._FLUSH_S", 0.0)
    monkeypatch.setattr("paceline.train.metrics.WAIT_S", 0.1)
    monkeypatch.setattr("paceline.train.metrics._CLOSING_S", 20.0 if answers else 0.1)
    is_still, write = threading.Event(), metrics._write_end

    def wait_and_write(*args: Any) -> None:
        is_still.wait(60)
        write(*args)

    writer = MetricsWriter(tmp_path, last_step=0)
    writer.write(row(1))
    monkeypatch.setattr(metrics, "_write_end", wait_and_write)
    begin_s = time.monotonic()
    for number in range(2, 30):
        writer.write_update({"step": number})
        writer.write(row(number))
    writer.write_evaluation(29, {"loss": 1.0})
    assert time.monotonic() - begin_s < 10
    assert caplog.text.count("Training goes on") == 1
    if answers:
        is_still.set()
    writer.close()
    assert numbers(tmp_path) == list(range(1, 30 if answers else 2))
    assert numbers(tmp_path, "evaluations.jsonl") == ([29] if answers else [])
    assert not answers or numbers(tmp_path, "updates.jsonl") == list(range(2, 30))
    assert ("does not take the last rows" in caplog.text) is not answers
    is_still.set()
    assert writer._disk.wait(20)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(PacelineError, match=r"metrics\.jsonl cannot be written.*\[PL523\]"):
        MetricsWriter(tmp_path, last_step=0)
