"""Memory for asynchronous saves that CUDA does not lock: a warning, and no error left for the next kernel."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from paceline.checkpoint.writing.state_copy import CopyMemory


def test_memory_that_cannot_be_locked_is_logged_and_leaves_no_error(caplog: pytest.LogCaptureFixture) -> None:
    left = ["cudaHostRegister failed"]  # as CUDA keeps it for the next kernel's check

    def launch(*args: object, **settings: object) -> None:
        if left:
            raise RuntimeError(left.pop())

    runtime = SimpleNamespace(cudaHostRegister=lambda *args: 2)
    memory = CopyMemory()
    with mock.patch("torch.cuda.cudart", return_value=runtime), mock.patch("torch.zeros", launch):
        memory.reserve(1 << 12, torch.device("cuda", 0))
    memory.close()
    assert not left
    assert "cannot be locked" in caplog.text
