"""Saves measured links as JSON with their hosts, and refuses a file that does not fit the ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.phrases import name_some
from paceline.plan.links import Curve, Link
from paceline.plan.links_file import CURVES, FORMAT, MeasuredLinks, read_links
from paceline.world import World


def check_links_path(path: Path) -> None:
    """Raise PL955 if a file of links cannot be written there, before anything is measured."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise PacelineError(
            "PL955",
            saw=f"{path}: " + ("it is a folder." if path.is_dir() else f"{folder} is not a folder."),
            rule="Measured links are written into one file of an existing folder.",
            fix="Name for example links.json.",
        )


def save_links(found: MeasuredLinks, path: Path) -> None:
    """Write measured links; one rank calls it.

    Raises:
        PacelineError: PL955 if the file cannot be written.
    """
    links = found.links
    table = {
        "paceline_links": FORMAT,
        "hosts": found.hosts,
        "nodes": found.nodes,
        "backend": found.backend,
        "took_s": found.took_s,
        "call_s": links.call_s,
        "meet_s": links.meet_s,
        "copy": _curve_table(links.copy),
        "add": _curve_table(links.add),
        "same_node": _link_table(links.same_node),
        "between_nodes": _link_table(links.between_nodes),
        "pairs": [
            {
                "ranks": [pair.first, pair.second],
                "message": _curve_table(pair.message),
                "latency_s": pair.latency_s,
            }
            for pair in found.pairs
        ],
    }
    try:
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise PacelineError(
            "PL955",
            saw=f"{path}: {error.strerror}.",
            rule="Measured links are written into one file of an existing folder.",
            fix="Name a file in a folder with write permission.",
        ) from None


def load_links(path: Path, hosts: Sequence[str], nodes: Sequence[int]) -> MeasuredLinks:
    """Read links that were measured on these ranks' nodes.

    Args:
        path: of a file that `save_links` wrote.
        hosts: the nodes' host names, of `find_nodes`.
        nodes: each rank's node.

    Raises:
        PacelineError: PL950 for a file that cannot be read or is damaged, PL951 for one of other hosts,
            PL952 for one of fewer nodes or of fewer ranks per node.
    """
    found = read_links(path)
    missing = [host for host in hosts if host not in found.hosts]
    if missing and len(hosts) <= len(found.hosts):
        raise PacelineError(
            "PL951",
            saw=f"{path} has the links of {name_some(found.hosts)}, and this job runs on "
            f"{name_some(missing)} too.",
            rule="Links are those of the hosts on which they were measured.",
            fix="Measure on this job's hosts: leave --links out, and save with --save-links FILE.",
        )
    here, there = (max(Counter(ranks).values()) for ranks in (nodes, found.nodes))
    if len(hosts) > len(found.hosts) or here > there:
        raise PacelineError(
            "PL952",
            saw=f"{path} has {len(found.hosts)} nodes with up to {there} ranks, and this job has "
            f"{len(hosts)} with up to {here}.",
            rule="Every class of pairs must have been measured, with as many ranks that share a node.",
            fix="Measure with this job's ranks: leave --links out, and save with --save-links FILE.",
        )
    return found


def load_on_main(world: World, path: Path, hosts: Sequence[str], nodes: Sequence[int]) -> MeasuredLinks:
    """Read the file where rank 0 runs, and return it, or raise the same error, on all ranks; collective.

    The other arguments and the errors are those of `load_links`.
    """
    loaded: MeasuredLinks | PacelineError | None = None
    if world.is_main:
        try:
            loaded = load_links(path, hosts, nodes)
        except PacelineError as error:
            error.on_every_rank = True
            loaded = error
    loaded = world.broadcast_object(loaded)
    if isinstance(loaded, PacelineError):
        loaded.on_every_rank = True
        raise loaded
    assert loaded is not None
    return loaded


def _link_table(link: Link | None) -> dict[str, Any] | None:
    if link is None:
        return None
    return {name: _curve_table(getattr(link, name)) for name in CURVES} | {"contention": link.contention}


def _curve_table(curve: Curve) -> dict[str, Any]:
    return {"num_bytes": curve.num_bytes, "seconds": curve.seconds}
