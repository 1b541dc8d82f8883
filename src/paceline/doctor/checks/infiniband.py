"""InfiniBand and RoCE adapters: are their ports up, alike, without errors, and used.

Reads /sys/class/infiniband. A port that is down, or NCCL_IB_DISABLE left in the environment, sends NCCL
through Ethernet, at a tenth of the speed and without a word.
"""

from __future__ import annotations

from paceline.doctor.machine import Checked, Machine, read_number

_FOLDER = "sys/class/infiniband"
_COUNTERS = ("link_downed", "symbol_error", "port_rcv_errors", "local_link_integrity_errors")


def list_devices(machine: Machine) -> list[str]:
    """Return the names of the adapters."""
    return machine.list(_FOLDER)


def check(machine: Machine) -> Checked:
    """Judge each port by itself and beside the others."""
    ports = [
        (f"{device} port {port}", f"{_FOLDER}/{device}/ports/{port}")
        for device in list_devices(machine)
        for port in machine.list(f"{_FOLDER}/{device}/ports")
    ]
    checked, rates = Checked("InfiniBand", "PL981", "none"), {}
    if not ports:
        return checked
    for name, path in ports:
        state, rate = machine.read(f"{path}/state") or "", machine.read(f"{path}/rate") or "unknown"
        if "ACTIVE" not in state:
            checked.find(
                f"{name} is {state.partition(':')[2].strip() or 'not active'}.",
                "NCCL uses what is left, down to Ethernet.",
                "Look at the cable, the switch's port and the subnet manager (ibstat).",
            )
            continue
        rates[name] = rate
        for counter in _COUNTERS:
            count = read_number(machine, f"{path}/counters/{counter}")
            if count:
                checked.find(
                    f"{name} counts {counter} {count} times.",
                    "A link with errors sends packets again, or drops for seconds.",
                    "Replace the cable, clear the counters (perfquery -R) and look again.",
                )
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name} {rate}" for name, rate in rates.items())
        checked.find(
            f"the ports differ: {listed}.",
            "Each rank of a node uses its own; the slowest sets the pace.",
            "Look at the slow one's cable and slot.",
        )
    if rates and machine.environ.get("NCCL_IB_DISABLE") == "1":
        checked.find(
            "NCCL_IB_DISABLE=1, and there are active ports.", "NCCL then goes through Ethernet.", "Unset it."
        )
    direct = any("nvidia_peermem" in name or "nv_peer_mem" in name for name in machine.list("sys/module"))
    said = ", ".join(sorted(set(rates.values()))) or "no active port"
    said += ", GPUDirect module loaded" if direct else ""
    checked.said, checked.facts = f"{len(rates)} of {len(ports)} ports active: {said}", {"InfiniBand": said}
    return checked
