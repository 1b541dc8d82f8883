from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from paceline.sinks.sink import SinkRun
from paceline.sinks.tensorboard import TensorBoardSink


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own imports
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator(str(folder))
        events.Reload()
        return {
            tag: [(event.step, event.value) for event in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }


def open_sink(folder: Path, first_step: int = 0) -> TensorBoardSink:
    sink = TensorBoardSink()
    sink.begin(SinkRun(folder, first_step))
    return sink


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    for step in (1, 2):
        sink.step(step, {"loss": 2.0 / step, "lr": 0.5, "epoch": 0}, 1.7e9)
    sink.evaluation(2, {"loss": 3.0}, 1.7e9)
    sink.end()
    assert read(tmp_path / "tensorboard") == {
        "train/loss": [(1, 2.0), (2, 1.0)],
        "train/lr": [(1, 0.5), (2, 0.5)],
        "valid/loss": [(2, 3.0)],
    }


def test_a_later_start_hides_the_steps_that_it_takes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start, (done, last, loss) in enumerate([(0, 4, 2.0), (2, 4, 1.0)]):
        # Files are named by the second, and read in the order of their names.
        monkeypatch.setattr("time.time", lambda start=start: 1_700_000_000.0 + start)
        sink = open_sink(tmp_path, done)
        for step in range(done + 1, last + 1):
            sink.step(step, {"loss": loss}, 1.7e9)
        sink.end()
    assert read(tmp_path / "tensorboard")["train/loss"] == [(1, 2.0), (2, 2.0), (3, 1.0), (4, 1.0)]


def test_what_is_written_reaches_the_disk_once_nothing_waits(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    sink.step(1, {"loss": 1.0}, 1.7e9)
    assert read(tmp_path / "tensorboard") == {}
    sink.flush()
    assert read(tmp_path / "tensorboard")["train/loss"] == [(1, 1.0)]
    sink.end()
