"""Lets a script meet at a port of its own, in a rank and in the processes that the script starts.

Under torchelastic, the launcher serves the store at MASTER_PORT and every rank is a client of it. A script
that sets another port, or whose rank calls `mp.spawn`, inherits that setting, so all of its processes would
wait as clients at a port that nobody serves. Here the setting counts at the launcher's port alone. At any
other port rank 0 serves the store, as in plain Python. Children by fork inherit this. Children by spawn or
forkserver get it with the data that multiprocessing sends them. A program that the rank starts with another
RANK or WORLD_SIZE is a rank of another group, and does not get the setting.
"""

from __future__ import annotations

import functools
import os
import subprocess
from typing import Any

from paceline.launching.rank.import_hook import when_imported
from paceline.place import GIVEN_PORT

_USES = "TORCHELASTIC_USE_AGENT_STORE"
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_IN_CHILD = (
    "try:\n from paceline.launching.rank.own_meeting import follow_ports\n follow_ports()\n"
    "except ImportError: pass"
)


def allow_own_meeting() -> None:
    """Prepare this rank before its script runs; the launcher's variables are set."""
    if _USES in os.environ:
        os.environ[GIVEN_PORT] = os.environ.get("MASTER_PORT", "")
    follow_ports()
    when_imported("multiprocessing.spawn", _send_to_children)
    _let_programs_meet()


def follow_ports() -> None:
    """Use the launcher's store only at the launcher's port, from now on or as soon as torch is imported."""
    from paceline.torch_seams.meeting import RENDEZVOUS, replace_store

    def follow(rendezvous: Any) -> None:
        replace_store(rendezvous, _serve_own_port)

    when_imported(RENDEZVOUS, follow)


def _serve_own_port(create: Any, host: str, port: int, *args: Any, **more: Any) -> Any:
    if str(port) == os.environ.get(GIVEN_PORT) or _USES not in os.environ:
        return create(host, port, *args, **more)
    value = os.environ.pop(_USES)
    try:
        return create(host, port, *args, **more)
    finally:
        os.environ[_USES] = value


def _send_to_children(spawn: Any) -> None:
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> Any:
        return {**original(name), "paceline": _FollowPorts()}

    spawn.get_preparation_data = get_preparation_data


def _let_programs_meet() -> None:
    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def start(self: Any, *args: Any, **more: Any) -> None:
        env = more.get("env")
        if env is not None and any(env.get(name) != os.environ.get(name) for name in _PLACE):
            more["env"] = {name: value for name, value in env.items() if name != _USES}
        original(self, *args, **more)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]


class _FollowPorts:
    """An object that calls `follow_ports` where it is unpickled, and nothing without this package."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (_IN_CHILD,)
