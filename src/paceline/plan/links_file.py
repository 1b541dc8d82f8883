"""Reads files of measured links, which `paceline bench collectives --save-links FILE` writes."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.phrases import first_line
from paceline.plan.links import Curve, Link, Links
from paceline.reading import read_file

FORMAT = 2
CURVES = ("message", "exchange", "stream")
_MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class Pair:
    """The link between two ranks.

    Attributes:
        first: rank.
        second: rank.
        message: seconds of a message between them, one way, while nothing else is sent.
        latency_s: of the fastest small one; unlike the median, a busy machine hardly changes it.
    """

    first: int
    second: int
    message: Curve
    latency_s: float


@dataclass(frozen=True)
class MeasuredLinks:
    """The links of a cluster with the ranks that they belong to.

    Attributes:
        hosts: each node's host name.
        nodes: each rank's node, numbered in the order of ranks.
        backend: that carried the messages.
        pairs: every pair that was measured by itself.
        links: the table for `paceline.plan.collectives`.
        took_s: seconds of the measurement.
    """

    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    backend: str
    pairs: tuple[Pair, ...]
    links: Links
    took_s: float


def read_links(path: Path) -> MeasuredLinks:
    """Read a file of links, of any cluster.

    Raises:
        PacelineError: PL950 for a file that cannot be read or is damaged.
    """
    try:
        table = json.loads(read_file(path, _MOST_BYTES).decode("utf-8"))
        return _parse(table)
    except OSError as error:
        reason = error.strerror or str(error)
    except KeyError as error:
        reason = f"{error.args[0]!r} is missing"
    except (ValueError, TypeError, IndexError) as error:
        reason = first_line(error)
    raise PacelineError(
        "PL950",
        saw=f"{path} cannot be used as a file of links: {reason}.",
        rule="It is the JSON that `paceline bench collectives --save-links FILE` writes.",
        fix="Measure again with --save-links FILE, and do not edit the file.",
    )


def _parse(table: Any) -> MeasuredLinks:
    if not isinstance(table, dict) or table.get("paceline_links") != FORMAT:
        raise ValueError(f"it lacks paceline_links = {FORMAT}")
    hosts = tuple(str(host) for host in table["hosts"])
    nodes = tuple(int(node) for node in table["nodes"])
    if len(nodes) < 2 or set(nodes) != set(range(len(hosts))):
        raise ValueError(f"nodes {list(nodes)} do not number {len(hosts)} hosts")
    sizes = Counter(nodes)
    links = Links(
        _parse_link(table["same_node"], needed=max(sizes.values()) > 1, name="same_node"),
        _parse_link(table["between_nodes"], needed=len(hosts) > 1, name="between_nodes"),
        call_s=_positive(table["call_s"], "call_s"),
        copy=_parse_curve(table["copy"], "copy"),
        add=_parse_curve(table["add"], "add"),
        # Files from before meetings in shared memory were measured lack it.
        meet_s=None if table.get("meet_s") is None else _positive(table["meet_s"], "meet_s"),
    )
    pairs = tuple(_parse_pair(row, len(nodes)) for row in table["pairs"])
    return MeasuredLinks(
        hosts, nodes, str(table["backend"]), pairs, links, _positive(table["took_s"], "took_s")
    )


def _parse_pair(row: Any, num_ranks: int) -> Pair:
    first, second = (int(rank) for rank in row["ranks"])
    if not 0 <= first < second < num_ranks:
        raise ValueError(f"pair {first}, {second} is none of {num_ranks} ranks")
    name = f"pair {first}, {second}"
    return Pair(
        first,
        second,
        _parse_curve(row["message"], name),
        _positive(row["latency_s"], f"latency_s of {name}"),
    )


def _parse_link(row: Any, *, needed: bool, name: str) -> Link | None:
    if row is None:
        if needed:
            raise ValueError(f"{name} is null although the ranks have such pairs")
        return None
    message, exchange, stream = (_parse_curve(row[curve], f"{name}.{curve}") for curve in CURVES)
    return Link(message, exchange, stream, _positive(row["contention"], f"{name}.contention"))


def _parse_curve(row: Any, name: str) -> Curve:
    sizes = tuple(_positive(value, f"{name}.num_bytes") for value in row["num_bytes"])
    seconds = tuple(_positive(value, f"{name}.seconds") for value in row["seconds"])
    if len(sizes) < 2 or len(sizes) != len(seconds) or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"{name} has {len(sizes)} sizes and {len(seconds)} times, or sizes that do not rise")
    return Curve(sizes, seconds)


def _positive(value: Any, name: str) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {value!r}, not a number above 0")
    return number
