"""A node's part of a check: carries out what the first node asks for, one command at a time."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from paceline.doctor.checks import CHECKS
from paceline.doctor.cluster import links
from paceline.doctor.cluster.node_messages import connect, receive, send
from paceline.doctor.cluster.speed import measure_speed
from paceline.doctor.machine import Checked, Machine
from paceline.doctor.meeting_check import find_announced
from paceline.errors import PacelineError

_RETRY_S = 0.2
# The first node may wait for the slowest of all before it asks again.
_SILENCE_S, _FIRST_S = 120.0, 10.0
_GLOO = "GLOO_SOCKET_IFNAME"


def check_machine(machine: Machine) -> list[Checked]:
    """Make all checks of this machine."""
    return [check.check(machine) for check in CHECKS]


def take_part(
    host: str, port: int, job: str, machine: Machine, facts: Mapping[str, str], timeout_s: float
) -> dict[str, Any]:
    """Serve the first node until it says that all is done, and return its last message."""
    connection = _join(host, port, timeout_s)
    with connection:
        # The first node waits as long for the others, and then asks at once; a stranger never does.
        connection.settimeout(timeout_s + _FIRST_S)
        stage = "the meeting"
        node = _Node(connection.getsockname()[0], machine, facts)
        try:
            # sbatch knows nodes by this name.
            name = machine.environ.get("SLURMD_NODENAME") or socket.gethostname()
            send(connection, {"job": job, "name": name})
            while True:
                command = receive(connection)
                connection.settimeout(_SILENCE_S)
                stage = str(command.get("do"))
                if stage == "end":
                    return command
                send(connection, node.carry_out(command))
        except OSError as error:
            raise PacelineError(
                "PL983",
                saw=f"the first node ended the check during {stage} ({error.strerror or error}).",
                rule="It asks all nodes in turn, and has the report. It turns away nodes of another "
                "--rdzv-id, or "
                "beyond --nnodes.",
                fix="Read its output; start the command with the same flags on all nodes.",
            ) from None
        finally:
            node.close()


def _join(host: str, port: int, timeout_s: float) -> socket.socket:
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return connect(host, port, max(1.0, end_s - time.monotonic()))
        except OSError as error:
            if time.monotonic() > end_s:
                raise PacelineError(
                    "PL983",
                    saw=f"{host} port {port} did not answer within {timeout_s:g} s "
                    f"({error.strerror or error}).",
                    rule="All nodes meet at the first one, which is the host of --rdzv-endpoint.",
                    fix="Start the command there too. If it runs: 'refused' means that nothing listens at "
                    "this address, silence that a firewall drops packets on the way.",
                ) from None
            time.sleep(_RETRY_S)


class _Node:
    """Carries out commands on a node.

    Args:
        address: by which the others reach it.
        machine: that the checks read.
        facts: further values that should be the same on all nodes.
    """

    def __init__(self, address: str, machine: Machine, facts: Mapping[str, str]) -> None:
        self._address, self._machine, self._facts = address, machine, facts
        self._server = links.LinkServer()
        self._commands: dict[str, Callable[..., dict[str, Any]]] = {
            "checks": self._check,
            "clocks": lambda: {"time": time.time()},
            "reach": lambda peers: {key: links.reach(*peer) for key, peer in peers.items()},
            "links": links.measure,
            "speed": measure_speed,
            "leave": self._leave,
            "look": lambda path: {"found": Path(path).exists()},
            "collectives": self._run_collectives,
        }

    def carry_out(self, command: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a command; a fault here becomes part of it."""
        work = self._commands.get(command.pop("do", ""))
        if work is None:
            return {"error": "an unknown command: are the versions of Paceline the same?"}
        try:
            return work(**command)
        except Exception as error:  # the first node reports it under this node's name
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        """Stop answering the others."""
        self._server.close()

    def _check(self) -> dict[str, Any]:
        checked = [asdict(result) for result in check_machine(self._machine)]
        return {
            "checked": checked,
            "facts": dict(self._facts),
            "port": self._server.port,
            "free_port": _find_free_port(),
            "announced": find_announced(self._machine.environ),
        }

    def _leave(self, folder: str) -> dict[str, Any]:
        """Leave a file that the others look for, if the folder exists or can be made."""
        path = Path(folder).absolute() / f".paceline-doctor-{secrets.token_hex(8)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return {"path": str(path)}

    def _run_collectives(
        self, host: str, port: int, rank: int, world_size: int, timeout_s: float
    ) -> dict[str, Any]:
        ranks = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        meeting = {"MASTER_ADDR": host, "MASTER_PORT": port}
        environ = {
            **self._machine.environ,
            **{key: str(value) for key, value in {**ranks, **meeting}.items()},
        }
        if _GLOO not in environ and (name := self._find_interface()):
            environ[_GLOO] = name
        with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
            target = Path(folder) / "found.json"
            words = [sys.executable, "-m", "paceline.doctor.cluster.rank", str(target), str(timeout_s)]
            done = subprocess.run(
                words,
                env=environ,
                capture_output=True,
                timeout=timeout_s + 10,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            if done.returncode == 0:
                found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
                return found
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}

    def _find_interface(self) -> str:
        for name, entries in psutil.net_if_addrs().items():
            if any(entry.address.partition("%")[0] == self._address for entry in entries):
                return str(name)
        return ""


def _find_free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])
