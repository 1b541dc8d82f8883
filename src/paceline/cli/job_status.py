"""`paceline run --status`: prints the nodes of a job, its round and its state."""

from __future__ import annotations

import json
from typing import Any

from paceline.cli.output import format_rows
from paceline.errors import PacelineError
from paceline.launching.members.endpoints import STORES

# A node is there if it beats within this many intervals.
_BEATS_IN_WAIT = 3


def print_status(backend: str, endpoint: str, job: str, *, detect_s: float | None, as_json: bool) -> int:
    """Print the state of the job at an endpoint; return 0, or 1 if there is no such job."""
    from paceline.launching.members.status import describe_job
    from paceline.launching.members.waits import Waits

    store = _open(backend, endpoint, job)
    waits = Waits() if detect_s is None else Waits(detect_s)
    try:
        report = describe_job(store, _BEATS_IN_WAIT * waits.beat_s)
    except PacelineError:
        if backend in STORES:
            raise
        report = None  # the store of c10d ends with the job
    if as_json:
        print(json.dumps({"state": "non-existent"} if report is None else report))
    elif report is None:
        print(f"job {job}: non-existent (nothing is known of it at {store.name})")
    else:
        print(_describe(job, report))
    return 1 if report is None else 0


def _open(backend: str, endpoint: str, job: str) -> Any:
    from paceline.launching.members.endpoints import read_endpoint
    from paceline.launching.members.open_store import open_store

    if backend in STORES:
        return open_store(backend, endpoint, job)
    from paceline.launching.elastic.tcp_record import TcpRecord

    return TcpRecord(read_endpoint(endpoint), job, None)


def _describe(job: str, report: dict[str, Any]) -> str:
    nodes = f"{report['least']} to {report['most']} nodes"
    if report["least"] == report["most"]:
        nodes = f"{report['most']} nodes"
    lines = [f"job {job}: {report['state']}, round {report['round']}, {nodes}"]
    rows = [("number", "node", "address", "ranks", "state")]
    for member in report["members"]:
        number = "waits" if member["number"] is None else str(member["number"])
        state = "leaves" if member["is_leaving"] else "here" if member["is_here"] else "silent"
        rows.append((number, member["name"], member["address"], str(member["ranks"]), state))
    lines.append(format_rows(rows, to_left=True))
    lines += [f"gone: {entry['name']}, {entry['why']}" for entry in report["gone"]]
    lines += [f"refused: {name}, {why}" for name, why in report["refused"].items()]
    return "\n".join(lines)
