"""Describes what could change a run's last bits; recorded in checkpoints and compared on resuming."""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from paceline.finding import Finding

# Keys whose change can change results, with their names for people. The other keys of an identity (world
# size, layout, the job of SLURM and its restart) show where a checkpoint comes from and may change freely.
COMPARED: dict[str, str] = {
    "paceline": "Paceline's version",
    "torch": "torch's version",
    "python": "Python's version",
    "device": "the kind of device",
    "processor": "the processor",
    "accelerator": "the accelerator",
    "threads_per_rank": "the number of threads per rank",
    "reduction": "how gradients are summed",
    "deterministic": "whether only deterministic kernels are used",
}


def describe_identity(
    device: torch.device | str,
    *,
    world_size: int = 1,
    layout: str = "dp_replicate=1",
    reduction: str = "fast",
) -> dict[str, Any]:
    """Return what this process is: versions, device, threads. No collective; the same keys on every rank.

    Args:
        device: what the model is on.
        world_size: number of ranks.
        layout: the run's layout, as text.
        reduction: `"fast"` or `"exact"`.

    Returns:
        A dict of strings, numbers and bools, fit for a manifest.
    """
    device = torch.device(device)
    identity: dict[str, Any] = {
        "paceline": _version("paceline"),
        "torch": str(torch.__version__),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "platform": _platform(),
        "device": device.type,
        "processor": f"{_processor_name()} ({torch.backends.cpu.get_cpu_capability()})",
        "threads_per_rank": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "world_size": world_size,
        "layout": layout,
        "reduction": reduction,
    }
    if "SLURM_JOB_ID" in os.environ:
        identity["slurm_job"] = os.environ["SLURM_JOB_ID"]
        identity["slurm_restart"] = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if device.type == "cuda":
        identity["accelerator"] = torch.cuda.get_device_name(device)
        identity["cuda"] = torch.version.cuda
    return identity


def check_identity(saved: dict[str, Any], here: dict[str, Any]) -> list[Finding]:
    """Return one finding (PL512) for each difference that can change results; none stops a run.

    Args:
        here: that of this process (`describe_identity`).
    """
    return [
        Finding(
            "PL512",
            key,
            f"{name} was {saved.get(key)!r} and is {here.get(key)!r}.",
            "Kernels may round differently, so the run is correct, but its last bits may differ.",
            "Continue, unless you need the same bits; then restore what it was.",
        )
        for key, name in COMPARED.items()
        if saved.get(key) != here.get(key)
    ]


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # Run from a source tree that is not installed.
        return "unknown"


@cache
def _platform() -> str:
    return platform.platform()


@cache
def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
