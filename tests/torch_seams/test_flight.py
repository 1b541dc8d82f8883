"""Reads of the Flight Recorder beside a CUDA graph that another thread records."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from paceline.torch_seams import flight


def test_entries_are_read_in_a_mode_that_leaves_captures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's mode is `ThreadLocal` (1) during the read and `Global` (0), as it was, after it."""
    modes, loaded = [0], []

    class Runtime:
        def __init__(self, name: str) -> None:
            loaded.append(name)

        def cudaThreadExchangeStreamCaptureMode(self, given: Any) -> int:  # noqa: N802
            modes.append(given._obj.value)
            given._obj.value = modes[-2]
            return 0

    def dump(*words: bool) -> bytes:
        during.append(modes[-1])
        return flight.pickle.dumps({})

    during: list[int] = []
    monkeypatch.setattr(flight, "list_dumps", lambda: [(0, dump)])
    monkeypatch.setattr(ctypes, "CDLL", Runtime)
    assert flight.read_entries(has_frames=False) == []
    assert (modes, during) == ([0], [0])  # a process that has not started CUDA is left alone
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert flight.read_entries(has_frames=False) == []
    assert during == [0, 1]
    assert modes == [0, 1, 0]
    assert loaded == ["libcudart.so.12"]
