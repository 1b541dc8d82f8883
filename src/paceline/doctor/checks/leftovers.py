"""Variables that earlier jobs and their debugging left, with effects that nobody wants now.

A variable of a launcher that is set in a shell makes scripts believe that they are ranks; names that torch
no longer reads do nothing; those for debugging make every step slower.
"""

from __future__ import annotations

import re

from paceline.doctor.machine import Checked, Machine

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "CUDA_", "MASTER_", "UCX_", "TP_")
_OBSOLETE = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
}
# The variable, the value that matters ("" for any) and its effect.
_SLOW = (
    ("CUDA_LAUNCH_BLOCKING", "1", "the host waits for every kernel"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "each collective is checked by further ones; INFO is cheap"),
    ("NCCL_DEBUG", "TRACE", "NCCL prints a line per operation"),
    ("NCCL_P2P_DISABLE", "1", "GPUs of a node exchange through the host's memory"),
    ("NCCL_SHM_DISABLE", "1", "GPUs of a node exchange through the network"),
    ("NCCL_NET", "Socket", "NCCL goes through TCP, also where there is InfiniBand"),
)
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_JOBS = ("SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "TORCHELASTIC_RUN_ID", "KUBERNETES_SERVICE_HOST")


def check(machine: Machine) -> Checked:
    """Judge the variables that distributed training reads."""
    found = {
        name: re.sub("//[^/]*@", "//", value)  # a proxy's password
        for name, value in sorted(machine.environ.items())
        if name.startswith(_PREFIXES) or re.fullmatch("(?i)(all|https?)_proxy", name)
    }
    said = f"{len(found)} that training reads" + (f": {', '.join(found)}" if 0 < len(found) <= 4 else "")
    checked = Checked("variables", "PL982", said, facts={f"${name}": each for name, each in found.items()})
    for name, new in _OBSOLETE.items():
        if name in found:
            checked.find(f"{name} is set.", "torch does not read it any more.", f"Set {new}, or unset it.")
    for name, value, effect in _SLOW:
        if found.get(name, "").upper() == value.upper():
            fix = f"Unset {name} unless you look for a fault."
            checked.find(f"{name}={value}.", f"With it, {effect}.", fix)
    ranks = [name for name in _RANKS if machine.environ.get(name)]
    if ranks and not any(name in machine.environ for name in _JOBS):
        checked.find(
            f"{', '.join(ranks)} set in a shell without a job.",
            "A script that is started here believes that it is one of several ranks, and waits for the "
            "others.",
            f"unset {' '.join(ranks)}",
        )
    return checked
