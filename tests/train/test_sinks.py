"""What sinks get, read back with the real programs; and that no sink can end or delay a run."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import logging
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.sinks.feed import Feed
from paceline.sinks.sink import Sink, SinkRun, build_sinks
from tests.dist.pool import Pool

SECRET = "aQ7-secret-of-the-environment"


def train(folder: Path, sinks: Any, steps: int = 4, **kwargs: Any) -> paceline.Trainer:
    """Train a line, with values of one's own, an evaluation and a checkpoint."""
    x = torch.arange(32.0).reshape(16, 2)
    data = [{"x": row, "y": row.sum()} for row in x]
    trainer = paceline.Trainer(
        nn.Linear(2, 1),
        forward=lambda model, batch: model(batch["x"]).squeeze(-1),
        loss=lambda output, batch: ((output - batch["y"]) ** 2).mean(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-4),
        sinks=sinks,
        **kwargs,
    )
    loader = trainer.loader(data, global_batch_size=4, epochs=5)
    trainer.resume(folder)
    for batch in loader:
        step = trainer.step(batch)
        trainer.log(double=2.0 * step.number)
        if step.number == steps:
            break
    valid = trainer.evaluate(trainer.loader(data, global_batch_size=8, shuffle=False))
    trainer.log(after=valid.loss)
    trainer.save(wait=True)
    return trainer


def read_rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def run_all(world: paceline.World, folder: str, sinks: list[str], steps: int) -> list[Any]:
    train(Path(folder), sinks, steps)
    return []


def test_values_of_ones_own_are_in_the_row_of_their_step(ranks: Pool, tmp_path: Path) -> None:
    for start in (2, 4):  # the second start continues
        ranks.run(run_all, nproc=2, args=(str(tmp_path), ["csv"], start))
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["double"] for row in rows] == [2.0, 4.0, 6.0, 8.0]
    valid = [row["loss"] for row in read_rows(tmp_path, "evaluations.jsonl")]
    assert [row.get("after") for row in rows] == [None, valid[0], None, valid[1]]
    with (tmp_path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [int(row["step"]) for row in table] == [1, 2, 3, 4]
    assert [float(row["loss"]) for row in table] == [row["loss"] for row in rows]
    assert [row["after"] for row in table] == ["", str(valid[0]), "", str(valid[1])]


class Slow(Sink):
    """A server that never answers."""

    name = "slow"
    release = threading.Event()

    def step(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self.release.wait(60)


class Dead(Sink):
    """A server that is gone."""

    def step(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        raise ConnectionError("refused")


class Events(Sink):
    """A list of all events."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, start: SinkRun) -> None:
        self.seen.append(("begin", start.first_step, start.num_steps))

    def step(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self.seen.append(("step", number, "loss" in values))

    def evaluation(self, number: int, values: Mapping[str, float], wall_s: float) -> None:
        self.seen.append(("evaluation", number))

    def checkpoint(self, number: int, path: Path) -> None:
        self.seen.append(("checkpoint", number, path.exists()))

    def end(self) -> None:
        self.seen.append(("end",))


def test_a_dead_and_a_slow_sink_cost_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.sinks.feed._CLOSING_S", 0.5)
    events = Events()
    with caplog.at_level(logging.WARNING), paceline.start():
        train(tmp_path, [Slow(), Dead(), events])
    Slow.release.set()
    warnings = [record.message for record in caplog.records if "sink" in record.message]
    assert len(warnings) == 2
    assert "the sink Dead gets nothing more" in warnings[0]
    assert "the sink slow gets nothing more" in warnings[1]
    assert len(read_rows(tmp_path)) == 4
    assert events.seen[0] == ("begin", 0, 20)
    assert [each[1] for each in events.seen if each[0] == "step" and each[2]] == [1, 2, 3, 4]
    assert events.seen[-3:] == [("step", 4, False), ("checkpoint", 4, True), ("end",)]


class Few(Events):
    """A tracker that takes ten rows a second."""

    name, rows_per_s = "few", 10


def test_a_sink_with_a_limit_gets_some_rows_of_fast_steps(tmp_path: Path) -> None:
    few, all_rows = Few(), Events()
    feed = Feed([few, all_rows], SinkRun(tmp_path))
    rows = [(number, {"loss": 1.0}, 0.0) for number in range(1, 161)]
    rows[76][1]["own"] = 2.0
    feed.send(steps=rows)
    feed.send(steps=rows[:10])
    feed.close()
    numbers = [each[1] for each in few.seen if each[0] == "step"]
    fast, slow = numbers[:-10], numbers[-10:]
    assert {1, 77, 160} < set(fast), "the first, the last and the one with a value of its own"
    assert len(fast) <= 12
    assert max(after - before for before, after in itertools.pairwise(fast)) <= 16
    assert slow == list(range(1, 11)), "all of slow steps"
    assert [each[1] for each in all_rows.seen if each[0] == "step"] == [*range(1, 161), *range(1, 11)]


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    for sinks, said in (
        ("wandbb", "sinks= has 'wandbb'"),
        ([Events(), Events()], "two sinks of the name Events"),
    ):
        with pytest.raises(paceline.PacelineError, match=f"{said}.*PL733"):
            build_sinks(sinks)  # type: ignore[arg-type]
    with paceline.start():
        trainer = train(tmp_path, ())
        with pytest.raises(paceline.PacelineError, match=r"has loss=.*PL734"):
            trainer.log(loss=1.0)
        with pytest.raises(paceline.PacelineError, match=r"of shape \[2\].*PL734"):
            trainer.log(x=torch.zeros(2))


def scan_log(raw: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, with 7 bytes of wandb's own at the begin."""
    place, record, block = 7, b"", 32768
    while place + 7 <= len(raw):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", raw[place : place + 7])
        record += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def test_wandb_gets_the_numbers_and_nothing_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MY_TOKEN", SECRET)
    (tmp_path / "mine").mkdir()
    mine = wandb.init(dir=str(tmp_path / "mine"))
    with paceline.start():
        train(tmp_path, "wandb", clip_norm=3.5)
    mine.log({"a": 1})
    assert wandb.run is mine, "a run of the script's own goes on"
    mine.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    until_s = time.monotonic() + 30
    while b"valid/loss" not in (raw := file.read_bytes()) and time.monotonic() < until_s:
        time.sleep(0.1)  # wandb's own process closes the file
    rows, config, kinds = [], {}, set()
    for data in scan_log(raw):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kinds.add(record.WhichOneof("record_type"))
        rows.append(
            {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
        )
        config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses == {row["step"]: row["loss"] for row in read_rows(tmp_path)}
    assert [row["valid/loss"] for row in rows if "valid/loss" in row] == [
        row["loss"] for row in read_rows(tmp_path, "evaluations.jsonl")
    ]
    assert config["clip_norm"] == 3.5
    assert SECRET.encode() not in raw
    assert not kinds & {"environment", "stats", "output_raw", "output"}
    sent = [path.name for path in file.parent.rglob("*") if path.is_file()]
    assert not {"requirements.txt", "wandb-metadata.json", "output.log"} & set(sent)


def test_wandb_on_a_full_disk_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        with contextlib.suppress(OSError), (folder / "pad").open("wb", buffering=0) as pad:
            while True:
                pad.write(bytes(4096))
        with caplog.at_level(logging.WARNING):
            feed = Feed(build_sinks("wandb"), SinkRun(folder))
            feed.send(steps=[(1, {"loss": 1.0}, 0.0)])
            feed.close()
        (warning,) = [each.message for each in caplog.records if "sink" in each.message]
        assert "the sink wandb gets nothing more" in warning
        assert "No space left" in warning
        assert "Logging error" not in capfd.readouterr().err
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_mlflow_gets_the_numbers_and_nothing_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    for steps in (2, 4):  # the second start continues the run on the server
        with paceline.start():
            train(tmp_path / "run", "mlflow", steps, clip_norm=3.5)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    found = {each.step: each.value for each in client.get_metric_history(run.info.run_id, "train/loss")}
    assert found == {row["step"]: row["loss"] for row in read_rows(tmp_path / "run")}
    assert run.data.params["clip_norm"] == "3.5"
    assert run.info.status == "FINISHED"
    assert run.data.tags.keys() == {"mlflow.runName", "checkpoint"}
