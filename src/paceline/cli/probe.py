"""`paceline probe`: measures a cluster on its ranks, and writes cluster.toml for `paceline plan`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from paceline.bench.probe import ProbedClass, ProbedCluster

_DESCRIPTION = """
Measures matrix products, memory and collectives on the real ranks in about a minute, all ranks at once, and
writes a file for `paceline plan --cluster FILE`. Started by torchrun or `paceline run -m paceline probe`, it
joins their ranks.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "probe", help="measure a cluster for `paceline plan`", description=_DESCRIPTION
    )
    parser.add_argument("--nproc", metavar="N", type=int, help="ranks to start on this machine (default 2)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("cluster.toml"), help="default cluster.toml"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, write the file, and print what was found; return 0."""
    from paceline.bench.probe import measure_cluster
    from paceline.bench.starts import choose_ranks
    from paceline.place import read_environment

    num_ranks, joins = choose_ranks(args.nproc, "probe")
    writes = not joins or read_environment(os.environ).rank == 0
    if writes:
        # What an interrupted probe leaves is recognized.
        _write(args.out, ["# paceline probe has begun, and has not ended", "complete = false"])
    found = measure_cluster(None if joins else num_ranks, device=args.device)
    if writes:
        _write(args.out, list(format_probe(found)))
        print("\n".join(_describe(found, args.out)))
    return 0


def _write(path: Path, lines: list[str]) -> None:
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise PacelineError(
            "PL937",
            saw=f"--out {path}: {error.strerror}.",
            rule="The result of a probe is a file.",
            fix="Give a file in a folder that exists and can be written: --out cluster.toml.",
        ) from None


def format_probe(found: ProbedCluster) -> Iterator[str]:
    """Yield the lines of cluster.toml."""
    yield f"# Measured by paceline probe in {found.took_s:.0f} s on {', '.join(found.hosts)}."
    yield f"nodes = {len(found.hosts)}"
    yield f"ranks_per_node = {found.ranks_per_node}"
    yield "remarks = [" + ", ".join(f'"{remark}"' for remark in found.remarks) + "]"
    yield "\n[processor]  # of one rank, while all ranks work"
    yield f'name = "{found.processor}"'
    yield f"memory_bytes = {found.memory_bytes:.4g}"
    yield f"memory_bytes_per_s = {found.memory_bytes_per_s:.4g}"
    yield f"call_s = {found.call_s:.4g}  # to start an operation"
    yield "# rows, inner, columns, bytes of a number, operations per second"
    for name, rows in (("products", found.products), ("attention", found.attention)):
        yield f"{name} = [" + "  # tokens, width of a head, tokens" * (name == "attention")
        yield from (f"  [{r:g}.0, {k:g}.0, {c:g}.0, {size}, {rate:.4g}]," for r, k, c, size, rate in rows)
        yield "]"
    for name, links in (("inside", found.inside), ("between", found.between)):
        if links is not None:
            yield from _format_class(name, links)
    yield "\n[step]  # of a model that computes almost nothing"
    yield f"other_s = {found.other_s:.4g}"
    yield "\n[end]"
    yield "complete = true"


def _format_class(name: str, links: ProbedClass) -> Iterator[str]:
    where = "ranks of one node" if name == "inside" else "ranks of different nodes"
    yield f"\n[{name}]  # {where}: a message, and each collective with its bus bandwidth"
    yield f"ranks = {links.ranks}"
    yield f"alpha_s = {links.alpha_s:.4g}"
    yield f"bytes_per_s = {links.bytes_per_s:.4g}"
    for operation, (empty_s, rate) in links.calls.items():
        yield f"{operation} = {{ empty_s = {empty_s:.4g}, bytes_per_s = {rate:.4g} }}"


def _describe(found: ProbedCluster, path: Path) -> Iterator[str]:
    nodes = f"{len(found.hosts)} node{'s' * (len(found.hosts) > 1)} of {found.ranks_per_node}"
    yield f"{nodes} {found.processor}, in {found.took_s:.0f} s: {path}"
    best = max(rate for *_, rate in found.products)
    yield f"  products: up to {best / 1e9:.1f} Gflop/s; memory: {format_bytes(found.memory_bytes_per_s)}/s"
    for name, links in (("in a node", found.inside), ("between nodes", found.between)):
        if links is not None:
            empty_s, rate = links.calls["all_reduce"]
            yield f"  all-reduce {name}: {format_seconds(empty_s)} and {format_bytes(rate)}/s"
    yield from (f"  {remark}" for remark in found.remarks)
