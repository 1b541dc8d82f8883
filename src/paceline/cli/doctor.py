"""`paceline doctor`: is this machine, or with --nnodes this cluster, fit to train?"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.doctor.cluster.coordinator import Survey
    from paceline.doctor.machine import Checked, Machine
    from paceline.finding import Finding

_DESCRIPTION = """
Checks this machine: cores, memory, limits, disk, clock, names, interfaces, versions, GPUs, InfiniBand,
variables. With --nnodes, or as one task per node of srun or mpirun, the same command on each node checks the
cluster: which node reaches which, each link and node against the others, collectives, and what is not the
same everywhere. The first node prints the report. Nothing is changed. Exit code 1 if something should be.
"""
_PORT = 29500
_MOST_BYTES = 256 << 20


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "doctor", help="check whether this machine or cluster is fit to train", description=_DESCRIPTION
    )
    parser.add_argument(
        "script", nargs="?", type=Path, metavar="SCRIPT", help="must be the same on all nodes"
    )
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks that are to run on each node")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="of the runs; with --nnodes, all nodes must see the same"
    )
    parser.add_argument("--nnodes", type=int, metavar="N", help="nodes on which this command is started")
    parser.add_argument("--rdzv-endpoint", metavar="HOST[:PORT]", help=f"the first node (port {_PORT})")
    parser.add_argument(
        "--rdzv-id", default="doctor", metavar="ID", help="the same on all nodes (default doctor)"
    )
    parser.add_argument(
        "--join-timeout", type=float, default=60.0, metavar="S", help="seconds to wait for nodes (default 60)"
    )
    parser.add_argument("--no-collectives", action="store_true", help="leave out gloo's collectives")
    parser.add_argument(
        "--nodelist",
        type=Path,
        metavar="FILE",
        help="write the nodes that passed, for sbatch --nodelist, and into FILE.failed the others, for "
        "--exclude",
    )
    parser.add_argument(
        "--nccl-log",
        type=Path,
        metavar="FILE",
        help="explain a log that was written with NCCL_DEBUG=INFO, in place of a check",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    from paceline.doctor.machine import Machine

    if args.nccl_log is not None:
        return _explain_log(args.nccl_log, as_json=args.json)
    _check_numbers(args)
    host, port = _find_meeting(args)
    machine = Machine(
        num_ranks=args.nproc_per_node, folder=args.folder or Path("runs"), port=None if host else port
    )
    if host is None:
        return _check_machine(machine, args)
    facts = _read_facts(args)
    with suppress(OSError):
        if listener := _listen(host, port):
            return _lead(listener, host, port, machine, facts, args)
    return _follow(host, port, machine, facts, args)


def _explain_log(path: Path, *, as_json: bool) -> int:
    from paceline.doctor.nccl_log import describe_nccl_log, judge_nccl_log, read_nccl_log
    from paceline.reading import read_file

    try:
        log = read_nccl_log(read_file(path, _MOST_BYTES).decode(errors="replace"))
    except OSError as error:
        raise _refuse(f"--nccl-log {path}: {error.strerror}.", "It is a file.", "Check the path.") from None
    if not log.hosts and not log.version:
        raise PacelineError(
            "PL998",
            saw=f"no line of NCCL in {path}.",
            rule="NCCL says what it does if NCCL_DEBUG=INFO is set when it starts.",
            fix="Set NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV,TUNING, and keep the output.",
        )
    findings = list(judge_nccl_log(log))
    if as_json:
        table = {**vars(log), "hosts": sorted(log.hosts), "findings": [asdict(each) for each in findings]}
        print(json.dumps(table))
    else:
        print(describe_nccl_log(log))
        _print_findings(findings)
    return int(bool(findings))


def _check_numbers(args: argparse.Namespace) -> None:
    for flag, least in (("nnodes", 1), ("nproc_per_node", 1)):
        value = getattr(args, flag)
        if value is not None and value < least:
            raise _refuse(
                f"--{flag.replace('_', '-')} {value}.", f"It is at least {least}.", "Pass a larger number."
            )
    if args.script is not None and not args.script.is_file():
        raise _refuse(
            f"{args.script} is no file.", "All nodes need the script.", "Pass its path on this node."
        )


def _find_meeting(args: argparse.Namespace) -> tuple[str | None, int]:
    """Return the first node and the port, from the flags or a scheduler's variables; no host for one
    machine."""
    from paceline.launching.members.endpoints import read_endpoints
    from paceline.place import is_launched, read_environment

    if args.nnodes is None and args.rdzv_endpoint is None and is_launched(os.environ):
        place = read_environment(os.environ)
        if place.launcher in ("slurm", "mpi") and place.world_size > 1:
            if place.local_world_size > 1:
                raise _refuse(
                    f"{place.local_world_size} tasks on one node.",
                    "A node is checked once.",
                    "Start one task per node: srun --ntasks-per-node=1",
                )
            args.nnodes = place.world_size
            return place.master_addr, place.master_port or _PORT
    if args.nnodes in (None, 1) and args.rdzv_endpoint is None:
        return None, _PORT
    if args.nnodes is None or args.rdzv_endpoint is None:
        raise _refuse(
            "one of --nnodes and --rdzv-endpoint without the other.",
            "The nodes of a check meet at the first of them.",
            "Pass both on each node: --nnodes 4 --rdzv-endpoint node0",
        )
    return read_endpoints(args.rdzv_endpoint, _PORT)[0]


def _refuse(saw: str, rule: str, fix: str) -> PacelineError:
    return PacelineError("PL601", saw=saw, rule=rule, fix=fix)


def _read_facts(args: argparse.Namespace) -> dict[str, str]:
    """Return what this command adds to the values that should be the same everywhere."""
    facts = {"--nnodes": str(args.nnodes), "--nproc-per-node": str(args.nproc_per_node or "not given")}
    if args.script is None:
        return facts
    return {**facts, "script": hashlib.sha256(args.script.read_bytes()).hexdigest()[:16]}


def _listen(host: str, port: int) -> socket.socket | None:
    """Listen at the meeting place if it is this machine, and nobody does yet."""
    from paceline.doctor.cluster.node_messages import listen
    from paceline.launching.elastic.network import is_own_host

    if not is_own_host(host):
        return None
    try:
        return listen(port)
    except OSError:
        return None  # Another node of this machine was first; or a stranger, whom the nodes then meet.


def _check_machine(machine: Machine, args: argparse.Namespace) -> int:
    from paceline.doctor.cluster.node import check_machine

    checked = check_machine(machine)
    findings = [finding for result in checked for finding in result.findings]
    if args.json:
        print(json.dumps({"machine": socket.gethostname(), "checks": [asdict(result) for result in checked]}))
    else:
        print(_describe_machine(checked))
        _print_findings(findings)
    return int(bool(findings))


def _follow(
    host: str, port: int, machine: Machine, facts: Mapping[str, str], args: argparse.Namespace
) -> int:
    """Take part as one of the other nodes."""
    from paceline.doctor.checks import ports
    from paceline.doctor.cluster.node import take_part
    from paceline.launching.elastic.network import is_own_host

    try:
        last = take_part(host, port, args.rdzv_id, machine, facts, args.join_timeout)
    except PacelineError as error:
        for held in ports.check(replace(machine, port=port)).findings if is_own_host(host) else ():
            raise PacelineError(held.code, saw=held.saw, rule=held.rule, fix=held.fix) from error
        raise
    if not args.json:
        said = f"{last.get('findings')} findings" if last.get("findings") else "nothing to change"
        print(f"{socket.gethostname()}: checked, {said}; the report is on {last.get('first')}")
    return int(bool(last.get("findings")))


def _lead(
    listener: socket.socket,
    host: str,
    port: int,
    machine: Machine,
    facts: Mapping[str, str],
    args: argparse.Namespace,
) -> int:
    """Ask the nodes, this one included, and print the report."""
    import threading

    from paceline.doctor.cluster.coordinator import Surveyor, meet
    from paceline.doctor.cluster.judge import judge
    from paceline.doctor.cluster.node import take_part

    def follow() -> None:
        with suppress(PacelineError):
            take_part(host, port, args.rdzv_id, machine, facts, args.join_timeout)

    def say(stage: str) -> None:
        if not args.json:
            print(f"{stage} ...", file=sys.stderr, flush=True)

    threading.Thread(target=follow, daemon=True).start()
    with listener:
        say(f"waiting for {args.nnodes} nodes at {host} port {port}")
        nodes = meet(listener, args.nnodes, args.rdzv_id, args.join_timeout)
    surveyor = Surveyor(nodes, args.nnodes)
    try:
        folder = "" if args.folder is None else str(args.folder.absolute())
        survey = surveyor.run(folder, with_collectives=not args.no_collectives, say=say)
        findings = [*_list_own(survey), *judge(survey)]
        surveyor.end(findings=len(findings), first=socket.gethostname())
    finally:
        surveyor.close()
    if args.nodelist is not None:
        _write_nodelist(args.nodelist, survey, findings)
    if args.json:
        print(json.dumps(_as_table(survey, findings)))
    else:
        print(_describe_cluster(survey, findings))
        _print_findings(findings)
    return int(bool(findings))


def _list_own(survey: Survey) -> Iterator[Finding]:
    """Yield what each node found of itself; a port that is taken is the one of this check."""
    from paceline.finding import Finding

    for number, reply in survey.checked.items():
        for checked in reply.get("checked", ()):
            for found in checked["findings"]:
                if found["code"] != "PL978":
                    yield Finding(**{**found, "where": f"{survey.names[number]}, {found['where']}"})


def _describe_machine(checked: list[Checked]) -> str:
    rows = [f"  {result.name:<13} {_mark(len(result.findings))}  {result.said}" for result in checked]
    notes = [f"  {result.note}" for result in checked if result.note]
    return "\n".join([f"{socket.gethostname()}, this machine", *rows, *notes])


def _mark(num_findings: int) -> str:
    return "ok" if num_findings == 0 else "!!"


def _describe_cluster(survey: Survey, findings: list[Finding]) -> str:
    from paceline.doctor.cluster.judge import are_busy

    names = survey.names
    width = max(map(len, [*names, "Mbit/s"]))
    lines = ["", f"{len(names)} of {survey.num_wanted} nodes"]
    for i, name in enumerate(names):
        rates = survey.speeds.get(i, {})
        speed = f"{rates['matrix product'] / 1e9:6.1f} GFLOP/s" if "matrix product" in rates else ""
        offset = f"clock {survey.offsets_s[i][0][0]:+.3f} s" if i in survey.offsets_s else ""
        bad = name in _list_bad(survey, findings)
        lines.append(f"  {name:<{width}}  {_mark(bad)}  {survey.addresses[i]:<15} {speed:>15}  {offset}")
        notes = [each.get("note") for each in survey.checked.get(i, {}).get("checked", ())]
        lines += [f"  {name:<{width}}      {note}" for note in notes if note]
    if are_busy(survey.speeds):
        lines.append("  Most nodes shared their cores with other work, so their speeds were not compared.")
    if survey.rates or survey.unreachable:
        heads = "".join(f"{name.partition('.')[0][-9:]:>10}" for name in names)
        lines += ["", f"{'Mbit/s':<{width}}  to {heads}"]
        for i, name in enumerate(names):
            cells = [_describe_cell(survey, i, j) for j in range(len(names))]
            lines.append(f"{name:<{width}}     " + "".join(f"{cell:>10}" for cell in cells))
    if survey.all_reduce_s:
        from paceline.units import format_bytes, format_seconds

        rows = [
            f"{format_bytes(size)} {format_seconds(s)}" for size, s in sorted(survey.all_reduce_s.items())
        ]
        lines += ["", f"all-reduce: {', '.join(rows)}; the results of all collectives were compared"]
    return "\n".join(lines)


def _describe_cell(survey: Survey, i: int, j: int) -> str:
    if i == j:
        return "-"
    if (i, j) in survey.unreachable:
        return "cut"
    return f"{survey.rates[i, j] * 8 / 1e6:,.0f}" if (i, j) in survey.rates else "?"


def _print_findings(findings: list[Finding]) -> None:
    if not findings:
        print("\nnothing to change")
        return
    print(f"\n{len(findings)} to change")
    for finding in findings:
        print(f"  {finding}")


def _list_bad(survey: Survey, findings: list[Finding]) -> list[str]:
    """Return the nodes that some finding names; node1 is not named by a finding on node10."""
    named = {word.strip(",:") for finding in findings for word in finding.where.split()}
    return [name for name in survey.names if name in named]


def _write_nodelist(path: Path, survey: Survey, findings: list[Finding]) -> None:
    bad = _list_bad(survey, findings)
    good = [name for name in survey.names if name not in bad]
    for target, names in ((path, good), (path.with_name(path.name + ".failed"), bad)):
        target.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


def _as_table(survey: Survey, findings: list[Finding]) -> dict[str, Any]:
    names = survey.names
    return {
        "nodes": names,
        "addresses": survey.addresses,
        "wanted": survey.num_wanted,
        "checks": {names[i]: reply.get("checked") for i, reply in survey.checked.items()},
        "links": [
            {"from": names[i], "to": names[j], "bytes_per_s": rate, "rtt_s": survey.rtts[i, j]}
            for (i, j), rate in sorted(survey.rates.items())
        ],
        "unreachable": [
            {"from": names[i], "to": names[j], **why} for (i, j), why in survey.unreachable.items()
        ],
        "speeds": {names[i]: rates for i, rates in survey.speeds.items()},
        "all_reduce_s": survey.all_reduce_s,
        "findings": [asdict(finding) for finding in findings],
    }
