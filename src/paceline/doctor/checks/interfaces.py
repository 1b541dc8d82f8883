"""Network interfaces, and the one that variables choose for gloo and NCCL.

A variable that names an interface which does not exist, or is down, makes gloo fail and NCCL hang; one that
names a bridge of containers sends traffic where no other node is.
"""

from __future__ import annotations

import psutil

from paceline.doctor.machine import Checked, Machine
from paceline.phrases import name_some

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_LOCAL = ("docker", "virbr", "br-", "veth", "cni", "flannel", "podman", "lo")


def check(machine: Machine) -> Checked:
    """Compare the variables with the interfaces that exist."""
    status = psutil.net_if_stats()
    up = [name for name, state in status.items() if state.isup and name != "lo"]
    route = find_route(machine)
    said = name_some([f"{name} (MTU {status[name].mtu})" for name in sorted(up)] or ["none is up besides lo"])
    said += f", default route by {route}" if route else ""
    facts = {"MTU": str(status[route].mtu)} if route in status else {}
    checked = Checked("interfaces", "PL977", said, facts=facts)
    for variable in VARIABLES:
        if machine.environ.get(variable):
            _judge(variable, machine.environ[variable], status, up, checked)
    return checked


def find_route(machine: Machine) -> str:
    """Return the interface of the default route, "" without one."""
    for line in (machine.read("proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if len(words) > 2 and words[1] == "00000000":
            return words[0]
    return ""


def _judge(variable: str, value: str, status: dict[str, object], up: list[str], checked: Checked) -> None:
    """NCCL's values may begin with = (that name) or ^ (not these); its plain words are beginnings of
    names."""
    if value.startswith("^"):
        return
    exact = variable.startswith("GLOO") or value.startswith("=")
    words = [word.strip().partition(":")[0] for word in value.removeprefix("=").split(",") if word.strip()]
    for word in words:
        named = [name for name in status if (name == word if exact else name.startswith(word))]
        if not named:
            saw = f"{variable}={value}, and no interface is called {word}."
        elif not set(named) & {*up, "lo"}:
            saw = f"{variable}={value}, and {word} is down."
        elif word != "lo" and all(name.startswith(_LOCAL) for name in named):
            saw = f"{variable}={value}, a bridge between containers of this machine."
        else:
            continue
        checked.find(
            saw,
            "Ranks of other nodes connect to the address of this interface.",
            f"Unset {variable}, or name one of {name_some(sorted(up) or ['lo'])}.",
        )
