"""Is the clock synchronised.

Asks systemd or chrony. Nodes whose clocks differ write logs that cannot be put in order, refuse each other's
certificates and tokens, and on shared file systems confuse what is newer.
"""

from __future__ import annotations

import time

from paceline.doctor.machine import Checked, Machine


def check(machine: Machine) -> Checked:
    """Ask what keeps the clock; silence is no finding, as containers cannot ask."""
    zone = time.strftime("%z")
    checked = Checked("clock", "PL975", f"{zone}, synchronised", facts={"time zone": zone})
    answer = machine.run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"])
    if answer is None:
        tracking = machine.run(["chronyc", "-n", "tracking"])
        answer = None if tracking is None else ("no" if "Not synchronised" in tracking else "yes")
    if answer is None or answer.strip() not in ("yes", "no"):
        checked.said = f"{zone}, nothing here knows whether it is synchronised"
    elif answer.strip() == "no":
        checked.said = f"{zone}, not synchronised"
        checked.find(
            "the clock is not synchronised.",
            "Clocks of nodes drift apart: logs cannot be put in order, and tokens and certificates are "
            "refused.",
            "Turn synchronisation on: timedatectl set-ntp true, or start chronyd.",
        )
    return checked
