"""Is the clock synchronised.

Asks systemd or chrony. Nodes whose clocks differ write logs that cannot be put in order, refuse each other's
certificates and tokens, and on shared file systems confuse what is newer.
"""

from __future__ import annotations

import time

from paceline.doctor.machine import Checked, Machine
from paceline.finding import Finding

NAME = "clock"


def check(machine: Machine) -> Checked:
    """Ask what keeps the clock; silence is no finding, as containers cannot ask."""
    zone = time.strftime("%z")
    facts = {"time zone": zone}
    answer = machine.run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"])
    if answer is None:
        tracking = machine.run(["chronyc", "-n", "tracking"])
        answer = None if tracking is None else ("no" if "Not synchronised" in tracking else "yes")
    if answer is None or answer.strip() not in ("yes", "no"):
        return Checked(NAME, f"{zone}, nothing here knows whether it is synchronised", (), facts)
    if answer.strip() == "yes":
        return Checked(NAME, f"{zone}, synchronised", (), facts)
    finding = Finding(
        "PL975",
        NAME,
        saw="the clock is not synchronised.",
        rule="Clocks of nodes drift apart: logs cannot be put in order, and tokens and certificates are "
        "refused.",
        fix="Turn synchronisation on: timedatectl set-ntp true, or start chronyd.",
    )
    return Checked(NAME, f"{zone}, not synchronised", (finding,), facts)
