"""Lets a script meet at a port of its own, in a rank and in the processes that the script starts.

Under torchelastic, the launcher serves the store at MASTER_PORT and every rank is a client of it. A script
that sets another port, or whose rank calls `mp.spawn`, inherits that setting, so all of its processes would
wait as clients at a port that nobody serves. Here the setting counts at the launcher's port alone. At any
other port rank 0 serves the store, as in plain Python. Children by fork inherit this. Children by spawn or
forkserver get it with the data that multiprocessing sends them.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from paceline.launching.rank.import_hook import when_imported
from paceline.place import GIVEN_PORT

_USES = "TORCHELASTIC_USE_AGENT_STORE"
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
    except RuntimeError as error:  # torch's DistNetworkError is one
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        if "EADDRINUSE" in str(error) and ranks != "1":
            error.add_note(
                f"Each of the {ranks} ranks that the launcher started here serves port {port}, "
                "which is free for one. Start a script that starts its own processes with --nproc-per-node 1."
            )
        raise
    finally:
        os.environ[_USES] = value


def _send_to_children(spawn: Any) -> None:
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> Any:
        return {**original(name), "paceline": _FollowPorts()}

    spawn.get_preparation_data = get_preparation_data


class _FollowPorts:
    """An object that calls `follow_ports` where it is unpickled, and nothing without this package."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (_IN_CHILD,)
