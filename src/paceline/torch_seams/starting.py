"""Applies a rank's settings to a process that has already imported torch; imports torch only when called."""

from __future__ import annotations

from typing import Any

from paceline.torch_seams.installed import require


def read_log_settings() -> None:
    """Make torch read TORCH_LOGS and similar variables again."""
    require("starting")
    import torch._logging._internal as logs

    logs._init_logs()


def bind_to_numa(command: tuple[str, ...], local_rank: int, options: Any) -> tuple[str, ...]:
    """Return the command that runs a rank on the cores and memory near its GPU."""
    require("starting")
    from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as bind

    return bind(command, gpu_index=local_rank, numa_options=options)
