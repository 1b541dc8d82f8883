"""Asks a job's launchers for its state, from outside and without torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from paceline.errors import PacelineError
from paceline.launching.members.open_witness import name_witness, open_witness
from paceline.launching.members.records import Address, Message
from paceline.launching.members.reports import explain_witness
from paceline.launching.members.wire import pack, unpack
from paceline.launching.members.witness import WitnessError

_TIMEOUT_S = 3.0
_CHUNK_BYTES = 65536


def find_launchers(backend: str, endpoint: str, job: str) -> list[Address]:
    """Return where the launchers of a job listen, from the record of an etcd or a folder.

    Raises:
        PacelineError: PL381 where it does not answer.
    """
    try:
        record = open_witness(name_witness(backend, endpoint), job)
        return [(member.address, member.port) for member in record.list_launchers()]
    except WitnessError as error:
        raise explain_witness(str(error)) from None


def ask_status(endpoints: Sequence[Address], job: str) -> Message | None:
    """Return what the leader of a job reports, or None if no launcher of it answers.

    Raises:
        PacelineError: PL376 where the launchers that answer serve another job.
    """
    asked: set[Address] = set()
    places, best, refusal = list(endpoints), None, ""
    while places:
        place = places.pop(0)
        if place in asked:
            continue
        asked.add(place)
        report = _ask(place, job)
        if report is None:
            continue
        if report["kind"] == "refuse":
            refusal = str(report["text"])
            continue
        if report["role"] == "leading":
            return report
        best = report if best is None else best
        leader = report["leader"]
        members = [*([] if leader is None else [leader]), *(report["world"] or {"members": []})["members"]]
        places += [(str(member["address"]), int(member["port"])) for member in members]
    if best is None and refusal:
        raise PacelineError(
            "PL376",
            saw=f"{refusal}, not {job!r}.",
            rule="One endpoint serves one job.",
            fix="Name the job with --rdzv-id.",
        )
    return best


def _ask(place: Address, job: str) -> Message | None:
    try:
        with socket.create_connection(place, _TIMEOUT_S) as link:
            link.sendall(pack({"kind": "status", "job": job}))
            data, end_s = bytearray(), time.monotonic() + _TIMEOUT_S
            while time.monotonic() < end_s:
                chunk = link.recv(_CHUNK_BYTES)
                if not chunk:
                    return None
                data += chunk
                for message in unpack(data):
                    if message.get("kind") in ("status", "refuse"):
                        return message
    except (OSError, ValueError):
        pass
    return None
