"""`paceline run --status`: prints the members of a job, its round and its state."""

from __future__ import annotations

import json
from typing import Any


def print_status(backend: str, endpoint: str, job: str, *, as_json: bool) -> int:
    """Print the state of the job at an endpoint; return 0, or 1 if there is no such job."""
    from paceline.launching.members.endpoints import read_endpoints
    from paceline.launching.members.status import ask_status, find_launchers

    by_witness = backend in ("etcd", "folder")
    endpoints = find_launchers(backend, endpoint, job) if by_witness else read_endpoints(endpoint)
    report = ask_status(endpoints, job)
    if as_json:
        print(json.dumps({"state": "non-existent"} if report is None else report))
    elif report is None:
        places = ", ".join(f"{host}:{port}" for host, port in endpoints) or endpoint
        print(f"job {job}: non-existent (no launcher of it answers at {places})")
    else:
        print(_describe(job, report))
    return 1 if report is None else 0


def _describe(job: str, report: dict[str, Any]) -> str:
    nodes = f"{report['least']} to {report['most']} nodes"
    if report["least"] == report["most"]:
        nodes = f"{report['most']} nodes"
    lines = [f"job {job}: {report['state']}, round {report['round']}, {nodes}"]
    rows = [("number", "node", "address", "state", "beats", "last beat")]
    for member in report["members"]:
        number = "waits" if member["number"] is None else str(member["number"])
        state = "here" if member["is_here"] else f"lost ({member['why']})" if member["why"] else "lost"
        beats = "" if member["beats"] is None else str(member["beats"])
        age = "" if member["age_s"] is None else f"{member['age_s']:.1f} s ago"
        rows.append((number, member["name"], member["address"], state, beats, age))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        lines.append("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    if report["role"] != "leading":
        lines.append("no launcher leads the job now: its nodes are searching for each other")
    return "\n".join(lines)
