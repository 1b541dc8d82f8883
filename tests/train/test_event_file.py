from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from paceline.sinks.event_file import EventFile


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


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "tensorboard", purge_step=1)
    for step in (1, 2):
        file.write(step, {"train/loss": 2.0 / step, "train/lr": 0.5}, 1.7e9)
    file.write(2, {"valid/loss": 3.0}, 1.7e9)
    file.close()
    assert read(tmp_path / "tensorboard") == {
        "train/loss": [(1, 2.0), (2, 1.0)],
        "train/lr": [(1, 0.5), (2, 0.5)],
        "valid/loss": [(2, 3.0)],
    }


def test_a_later_start_hides_the_steps_that_it_takes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start, (first, last, loss) in enumerate([(1, 4, 2.0), (3, 4, 1.0)]):
        # Files are named by the second, and read in the order of their names.
        monkeypatch.setattr("time.time", lambda start=start: 1_700_000_000.0 + start)
        file = EventFile(tmp_path, purge_step=first)
        for step in range(first, last + 1):
            file.write(step, {"train/loss": loss}, 1.7e9)
        file.close()
    assert read(tmp_path)["train/loss"] == [(1, 2.0), (2, 2.0), (3, 1.0), (4, 1.0)]


def test_what_is_written_reaches_the_disk_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    file = EventFile(tmp_path, purge_step=1)
    file.write(1, {"train/loss": 1.0}, 1.7e9)
    assert read(tmp_path) == {}
    now = 11.0
    file.write(2, {"train/loss": 2.0}, 1.7e9)
    assert read(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0)]
    file.close()
