"""GPUs: count, errors, throttling, power, links, and who else uses them.

Asks nvidia-smi and reads the kernel's log. One GPU that runs at half its clock, or is connected with half
its lanes, sets the pace of all ranks.
"""

from __future__ import annotations

import re
from collections import Counter

from paceline.doctor.machine import Checked, Machine

_FIELDS = (
    "index",
    "name",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown",
    "power.limit",
    "power.default_limit",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "memory.used",
    "memory.total",
)
_USED_SHARE = 0.05


def count_devices(machine: Machine) -> int:
    """Return the number of NVIDIA GPUs on the PCI bus, whether or not there is a driver."""
    count = 0
    for name in machine.list("sys/bus/pci/devices"):
        vendor = machine.read(f"sys/bus/pci/devices/{name}/vendor")
        kind = machine.read(f"sys/bus/pci/devices/{name}/class") or ""
        count += vendor == "0x10de" and kind.startswith("0x03")
    return count


def query(machine: Machine, *fields: str) -> list[list[str]]:
    """Return the rows that nvidia-smi prints of its GPUs; none without it."""
    text = machine.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
    return [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines() if line.strip()]


def check(machine: Machine) -> Checked:
    """Judge every GPU by itself and beside the others."""
    rows = [dict(zip(_FIELDS, row, strict=False)) for row in query(machine, *_FIELDS)]
    on_bus = count_devices(machine)
    checked = Checked("GPUs", "PL980", "none")
    if not rows:
        checked.said = "none" if on_bus == 0 else f"{on_bus} on the bus, nvidia-smi does not answer"
        return checked
    for row in rows:
        _judge(row, checked)
    if on_bus > len(rows):
        checked.find(
            f"{on_bus} are on the bus and {len(rows)} answer.",
            "One that has fallen off the bus stays away until the machine restarts.",
            "Read dmesg for NVRM, and restart the machine.",
        )
    visible = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        checked.find(
            "CUDA_VISIBLE_DEVICES is empty.", "torch then finds no GPU.", "Unset it, or list the GPUs to use."
        )
    if machine.num_ranks is not None and machine.num_ranks > len(rows):
        checked.find(
            f"{machine.num_ranks} ranks for {len(rows)} GPUs.",
            "Each rank needs a GPU of its own.",
            f"Start {len(rows)} ranks or fewer here.",
        )
    kinds = Counter(row["name"] for row in rows)
    checked.said = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    checked.facts = {"GPUs": checked.said}
    _judge_log(machine, checked)
    return checked


def _judge(row: dict[str, str], checked: Checked) -> None:
    gpu = f"GPU {row['index']}"
    errors = row.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdigit() and int(errors) > 0:
        checked.find(
            f"{gpu} counts {errors} uncorrected memory errors.",
            "Its results may be wrong, and the job ends with an Xid.",
            "Reset the GPU (nvidia-smi --gpu-reset); if they come back, have it replaced.",
        )
    for field in ("hw_slowdown", "sw_thermal_slowdown"):
        if row.get(f"clocks_throttle_reasons.{field}") == "Active":
            checked.find(
                f"{gpu} is throttled ({field}).",
                "It sets the pace of all ranks.",
                "Look at its cooling and power supply; leave the node out until then.",
            )
    limit, default = _number(row.get("power.limit")), _number(row.get("power.default_limit"))
    if limit and default and limit < 0.9 * default:
        checked.find(
            f"{gpu} may use {limit:g} W of its {default:g} W.",
            "A cap lowers its clock under load, and it sets the pace of all ranks.",
            f"nvidia-smi -i {row['index']} -pl {default:g}, or cap all GPUs of the job alike.",
        )
    width, widest = _number(row.get("pcie.link.width.current")), _number(row.get("pcie.link.width.max"))
    if width and widest and width < widest:
        checked.find(
            f"{gpu} is connected with {width:g} of {widest:g} PCIe lanes.",
            "Copies from and to the host take as many times longer.",
            "Reseat the card, or choose a slot with all lanes.",
        )
    used, total = _number(row.get("memory.used")), _number(row.get("memory.total"))
    if used and total and used > _USED_SHARE * total:
        checked.find(
            f"{used:g} of {total:g} MiB of {gpu}'s memory are in use.",
            "Another process, or what a dead one left, takes memory and time from the job.",
            "Read nvidia-smi for its processes, and end them.",
        )


def _judge_log(machine: Machine, checked: Checked) -> None:
    """Find each kind of GPU error that the kernel has logged, where its log may be read."""
    log = machine.run(["dmesg"])
    checked.said += "" if log is not None else "; the kernel's log, which has their errors, may not be read"
    found = Counter(re.findall(r"NVRM: Xid \([^)]*\): (\d+)", log or ""))
    for number, count in found.items():
        checked.find(
            f"the kernel has logged Xid {number} {count} times since the start of the machine.",
            "An Xid is an error of a GPU or of its driver.",
            "Look the number up in NVIDIA's list of Xid errors; for 48, 63, 64, 74, 79, 94 and 95 take the "
            "node out.",
        )


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
