"""Python, torch, CUDA and driver: do they go together, without importing torch.

A torch built for the CPU trains on the CPU beside idle GPUs; one built for a newer CUDA than the driver
knows finds no device.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from contextlib import suppress
from pathlib import Path

from paceline.doctor.checks.gpus import count_devices, query
from paceline.doctor.machine import Checked, Machine

_LEAST_TORCH = (2, 11)
_PACKAGES = ("torch", "numpy", "paceline")


def check(machine: Machine) -> Checked:
    """Compare the versions with each other."""
    facts = {"Python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    cuda = _read_cuda()
    if cuda:
        facts["torch's CUDA"] = cuda
    rows = query(machine, "driver_version")
    if rows:
        facts["driver"] = rows[0][0]
    said = ", ".join(f"{name} {version}" for name, version in facts.items())
    checked = Checked("versions", "PL979", said, facts=facts)
    torch, least = facts.get("torch"), ".".join(map(str, _LEAST_TORCH))
    if torch is None:
        checked.find("torch is not installed here.", "Everything trains with it.", "Install torch.")
    elif tuple(map(int, re.findall(r"\d+", torch)[:2])) < _LEAST_TORCH:
        rule = f"Paceline needs {least} or later."
        checked.find(f"torch {torch}.", rule, f'pip install "torch>={least}"')
    if count_devices(machine):
        _check_cuda(machine, cuda, checked)
    return checked


def _check_cuda(machine: Machine, cuda: str | None, checked: Checked) -> None:
    if cuda is None:
        checked.find(
            "this machine has NVIDIA GPUs, and torch is built for the CPU.",
            "Training would run on the CPU beside idle GPUs.",
            "Install a build of torch for CUDA: https://pytorch.org/get-started/locally",
        )
        return
    head = re.search(r"CUDA Version: (\d+)\.(\d+)", machine.run(["nvidia-smi"]) or "")
    if head is None:
        checked.find(
            "this machine has NVIDIA GPUs, and nvidia-smi does not answer.",
            "Without a driver that works, torch finds no device.",
            "Run it: it says whether the driver is missing (modprobe nvidia) or may not be used.",
        )
    elif int(cuda.partition(".")[0]) > int(head[1]):
        checked.find(
            f"torch is built for CUDA {cuda}, and the driver knows up to {head[1]}.{head[2]}.",
            "An older driver refuses programs of a newer major version.",
            f"Update the driver, or install torch for CUDA {head[1]}.",
        )


def _read_cuda() -> str | None:
    """Return the CUDA version of torch's build, from its file."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    with suppress(OSError):
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
        match = re.search(r"^cuda(?::[^=]*)? = '([\d.]+)'", text, re.M)
        return match[1] if match else None
    return None
