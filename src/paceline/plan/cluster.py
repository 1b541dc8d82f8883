"""Describes the machines that a plan is for: processors, their memory, and the links between ranks.

A cluster is described in words ("8 nodes of 8 H100-80, 400 Gbit/s"), with numbers from `processors.toml`, or
by a `cluster.toml` that `paceline probe` has measured.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.plan.call_sizes import BUS_FACTORS

_WORDS = re.compile(
    r"(?:(?P<nodes>-?\d+)\s*nodes?\s*(?:of|x)\s*)?(?P<ranks>-?\d+)\s*(?:x\s*)?"
    r"(?P<name>(?!nodes?\b)[A-Za-z][\w -]*?)"
    r"(?:\s*,\s*(?P<rate>-?(?:\d+\.?\d*|\.\d+))\s*(?P<unit>[A-Za-z/]+))?\s*"
)
_UNITS = {"gbit/s": 1e9 / 8, "gb/s": 1e9, "mbit/s": 1e6 / 8, "mb/s": 1e6, "gbps": 1e9 / 8}
MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Wire:
    """A class of links as a line: seconds of a call's step, and bytes per second of one rank, one way.

    Attributes:
        alpha_s: seconds of a step beside its bytes.
        bytes_per_s: that a rank sends.
        calls: of measured collectives: seconds of an empty call, and bus bandwidth.
        num_ranks: with which `calls` were measured.
    """

    alpha_s: float
    bytes_per_s: float
    calls: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    num_ranks: int = 0


MeasuredProduct = tuple[float, float, float, int, float]


@dataclass(frozen=True)
class Processor:
    """A GPU, or the cores of one CPU rank.

    Attributes:
        name: of the processor.
        flops: peak operations per second by bytes of a number; see `find_flops`.
        best: share of the peak that the best shape of a product reached.
        memory_bytes: of one rank.
        memory_bytes_per_s: read and written.
        call_s: seconds to start a kernel.
        measured: (rows, inner, columns, bytes of a number, operations per second) of a probe.
        attention: the same of causal attention: tokens, width of a head, tokens.
        host_bytes_per_s: to CPU memory, one way.
    """

    name: str
    flops: dict[int, float] = field(hash=False)
    best: float
    memory_bytes: float
    memory_bytes_per_s: float
    call_s: float
    measured: tuple[MeasuredProduct, ...] = ()
    attention: tuple[MeasuredProduct, ...] = ()
    host_bytes_per_s: float = 25e9

    @property
    def is_cpu(self) -> bool:
        """Whether it has no memory and no clock of its own: ranks compute and send in turns."""
        return self.name.startswith("cpu")

    def find_flops(self, num_bytes: int) -> float:
        """Return the peak for numbers of so many bytes; of narrower ones that are missing, the next wider
        one's, and of wider ones a part of the widest one's."""
        wider = [size for size in sorted(self.flops) if size >= num_bytes]
        widest = max(self.flops)
        return self.flops[wider[0]] if wider else self.flops[widest] * widest / num_bytes


@dataclass(frozen=True)
class Cluster:
    """Nodes with equal ranks.

    Attributes:
        nodes: their number.
        ranks_per_node: ranks of each.
        processor: of a rank.
        inside: links between the ranks of a node; None if they are not known.
        between: links between nodes, as one rank of each has them; None if they are not known.
        is_probed: whether links and processor were measured.
        remarks: what a reader should know.
        step_s: measured seconds of a step beside its arithmetic.
    """

    nodes: int
    ranks_per_node: int
    processor: Processor
    inside: Wire | None
    between: Wire | None
    is_probed: bool = False
    remarks: tuple[str, ...] = ()
    step_s: float = 0.0

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.ranks_per_node} {self.processor.name}"

    def divide(self, degree: int, stride: int) -> tuple[int, int]:
        """Return how many ranks of a group are on one node, and how many nodes it has.

        Args:
            degree: of the group.
            stride: distance of its neighbours in rank numbers.
        """
        inside = min(degree, max(1, self.ranks_per_node // stride))
        return inside, -(-degree // inside)

    def time(self, operation: str, num_bytes: float, degree: int, stride: int = 1) -> float:
        """Return the seconds of one collective, of sizes as in `call_sizes.py`, by rings.

        The nodes' links are shared by the groups that leave a node at once, and a group uses those of all its
        ranks there.
        """
        if degree == 1 or not num_bytes:
            return 0.0
        inside, nodes = self.divide(degree, stride)
        wire = self.inside if nodes == 1 else self.between
        assert wire is not None
        shares = BUS_FACTORS.get(operation, BUS_FACTORS["all_gather"])(degree) * num_bytes
        near = self.inside if nodes > 1 and inside > 1 else None
        if operation in wire.calls:
            # All ranks took part, in a group for each rank of a node; with fewer ranks there are fewer steps.
            empty_s, rate = wire.calls[operation]
            alpha_s = empty_s * max(1, degree - 1) / max(1, wire.num_ranks - 1)
        else:
            rate, steps = wire.bytes_per_s, (degree - 1) if nodes == 1 else (nodes - 1)
            if operation == "all_reduce":
                steps = 2 * math.ceil(math.log2(steps + 1))  # small sums go along trees
            alpha_s = steps * wire.alpha_s + (0 if near is None else (inside - 1) * near.alpha_s)
        rate = min(rate * (1 if nodes == 1 else inside), math.inf if near is None else near.bytes_per_s)
        return alpha_s + shares / rate

    def time_message(self, num_bytes: float, stride: int) -> float:
        """Return the seconds of a message to the rank so many numbers further."""
        wire = self.inside if stride < self.ranks_per_node or self.between is None else self.between
        return 0.0 if wire is None else wire.alpha_s + num_bytes / wire.bytes_per_s


def read_cluster(text: str, links: dict[str, float]) -> Cluster:
    """Return the cluster of a description in words, or of a file that ends in `.toml`.

    Args:
        text: as a user gives it.
        links: factors of the specified bandwidth that collectives reach: `inside`, `between`, and seconds
            of a step: `inside_s`, `between_s`, `call_s`.

    Raises:
        PacelineError: PL930 for words that are none, PL931 for an unknown processor, PL932 for a number that
            cannot be, PL933 for a file that lacks something.
    """
    if text.endswith(".toml"):
        return read_file(Path(text))
    found = _WORDS.fullmatch(text.strip())
    if found is None:
        raise PacelineError(
            "PL930",
            saw=f"--cluster {text!r}.",
            rule="A cluster is nodes, ranks per node and processor, with the speed of a rank's link to other "
            "nodes if it is not the usual one; or a .toml file of `paceline probe`.",
            fix='Write for example --cluster "8 nodes of 8 H100-80, 400 Gbit/s".',
        )
    nodes, ranks = int(found["nodes"] or 1), int(found["ranks"])
    check_number("nodes", nodes, most=MOST_RANKS)
    check_number("ranks per node", ranks, most=MOST_RANKS)
    row = find_processor(found["name"].strip())
    nic = float(row["nic_gbit_s"]) * 1e9 / 8
    if found["rate"]:
        unit = found["unit"].lower()
        if unit not in _UNITS:
            raise PacelineError(
                "PL930",
                saw=f"--cluster {text!r}: the unit {found['unit']!r}.",
                rule="The speed of a link has one of the units Gbit/s, GB/s, Mbit/s, MB/s.",
                fix=f"Write for example {found['rate']} Gbit/s.",
            )
        nic = check_number(f"the link's {found['unit']}", float(found["rate"])) * _UNITS[unit]
        _question_link(nic, float(row["link_gb_s"]) * 1e9, found["rate"], found["unit"])
    inside = Wire(links["inside_s"], float(row["link_gb_s"]) * 1e9 * links["inside"])
    between = Wire(links["between_s"], nic * links["between"])
    usual = "" if found["rate"] else ", the usual one"
    share = f"of which collectives reach {links['between']:.0%}"
    remarks = (f"between nodes: {nic * 8 / 1e9:g} Gbit/s per rank{usual}, {share}",)
    chip = _make_processor(row, links["call_s"])
    return Cluster(nodes, ranks, chip, inside, between, remarks=remarks if nodes > 1 else ())


# Bytes per second of the fastest network card: 1.6 Tbit/s.
_FASTEST = 200e9


def _question_link(nic: float, link: float, rate: str, unit: str) -> None:
    if nic > min(link, _FASTEST):
        raise PacelineError(
            "PL932",
            saw=f"{rate} {unit} between nodes, and {link / 1e9:g} GB/s inside of one.",
            rule="A rank's link to other nodes is not faster than its links inside of the node, nor than "
            "1600 Gbit/s; Gbit/s and GB/s are often confused.",
            fix=f"If it is {rate} Gbit/s, write so. If it was measured, give a .toml file.",
        )


def check_number(name: str, value: float, most: float = math.inf) -> float:
    """Return a number that is above 0, and finite.

    Raises:
        PacelineError: PL932.
    """
    if not 0 < value <= most or not math.isfinite(value):
        raise PacelineError(
            "PL932",
            saw=f"{name}: {value:g}.",
            rule="It is above 0" + (f" and at most {most:g}." if math.isfinite(most) else ", and finite."),
            fix="Give the number that the machine or the model has; `paceline probe` measures a machine.",
        )
    return value


@lru_cache(maxsize=1)
def list_processors() -> dict[str, dict[str, Any]]:
    """Return the rows of `processors.toml` by name."""
    with resources.files("paceline.plan").joinpath("processors.toml").open("rb") as file:
        return tomllib.load(file)


def find_processor(name: str) -> dict[str, Any]:
    """Return the row of a processor, by its name or one of its short names.

    Raises:
        PacelineError: PL931 for a name that is in no row.
    """
    rows = list_processors()
    wanted = name.lower().replace(" ", "-")
    for key, row in rows.items():
        if wanted in (key.lower(), *row.get("also", ())):
            return {"name": key, **row}
    names = [*rows, *(other for row in rows.values() for other in row.get("also", ()))]
    near = difflib.get_close_matches(wanted, [each.lower() for each in names], n=1, cutoff=0.3)
    hint = next((each for each in names if near and each.lower() == near[0]), "")
    raise PacelineError(
        "PL931",
        saw=f"the processor {name!r}.",
        rule=f"Known are {', '.join(rows)}.",
        fix=f"Did you mean {hint}? " * bool(hint) + "Another one is measured: run `paceline probe` on it.",
    )


def _make_processor(row: dict[str, Any], call_s: float) -> Processor:
    peaks = {1: "fp8_tflops", 2: "bf16_tflops", 4: "fp32_tflops"}
    return Processor(
        name=row["name"],
        flops={size: row[key] * 1e12 for size, key in peaks.items() if key in row},
        best=row.get("best", 0.8),
        memory_bytes=row["memory_gb"] * 1e9,
        memory_bytes_per_s=row["memory_gb_s"] * 1e9,
        call_s=call_s,
        host_bytes_per_s=row.get("host_gb_s", 25) * 1e9,
    )


def read_file(path: Path) -> Cluster:
    """Return the cluster that a probe has written.

    Raises:
        PacelineError: PL933 for a file that is not there, is no TOML or lacks something; PL932 for a number
            that cannot be.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _file_error(path, f"it cannot be read ({error})") from None
    end = table.get("end")
    if not isinstance(end, dict) or end.get("complete") is not True:
        raise _file_error(path, "the probe did not finish (`complete` is not true)")

    def read(values: object, where: str, default: float | None = None) -> float:
        """Return the number at the last word of a place in the file."""
        value = values.get(where.rpartition(".")[2], default) if isinstance(values, dict) else values
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _file_error(path, f"{where} is {'missing' if value is None else repr(value)}")
        return float(value) if value == default else check_number(where, value)

    def read_whole(where: str) -> int:
        value = read(table, where)
        if value != int(value):
            raise _file_error(path, f"{where} is {value:g}, not a whole number")
        return int(check_number(where, value, most=MOST_RANKS))

    nodes, ranks = read_whole("nodes"), read_whole("ranks_per_node")
    wires = {}
    for name, needed in (("inside", ranks > 1), ("between", nodes > 1)):
        section = table.get(name)
        if not isinstance(section, dict):
            if needed or section is not None:
                raise _file_error(path, f"[{name}] is missing, and there are {nodes} nodes of {ranks} ranks")
            continue
        alpha_s, rate = (read(section, f"{name}.{key}") for key in ("alpha_s", "bytes_per_s"))
        calls = {}
        for key in section.keys() - {"ranks", "alpha_s", "bytes_per_s"}:
            if not isinstance(row := section[key], dict):
                raise _file_error(path, f"{name}.{key} is {row!r}, not `empty_s` and `bytes_per_s`")
            calls[key] = (read(row, f"{name}.{key}.empty_s"), read(row, f"{name}.{key}.bytes_per_s"))
        wires[name] = Wire(alpha_s, rate, calls, int(read(section, f"{name}.ranks", 0)))
    chip = table.get("processor")
    if not isinstance(chip, dict) or not chip.get("products"):
        raise _file_error(path, "[processor] has no `products`")

    def read_products(key: str) -> Iterator[MeasuredProduct]:
        rows = chip.get(key, [])
        for row in rows if isinstance(rows, list) else [rows]:
            if not isinstance(row, list) or len(row) != 5:
                raise _file_error(path, f"{key} has {row!r}, not rows, inner, columns, bytes and a rate")
            height, inner, width, size, speed = (read(each, f"a number of {key}") for each in row)
            yield height, inner, width, int(size), speed

    products, best = tuple(read_products("products")), dict[int, float]()
    for *_, size, speed in products:
        best[size] = max(best.get(size, 0.0), speed)
    names = ("memory_bytes", "memory_bytes_per_s", "call_s")
    memory, rate, call_s = (read(chip, f"processor.{name}") for name in names)
    remarks = table.get("remarks", [])
    return Cluster(
        nodes,
        ranks,
        Processor(
            str(chip.get("name", "cpu")),
            best,
            best=1.0,
            memory_bytes=memory,
            memory_bytes_per_s=rate,
            call_s=call_s,
            measured=products,
            attention=tuple(read_products("attention")),
        ),
        wires.get("inside"),
        wires.get("between"),
        is_probed=True,
        remarks=tuple(map(str, remarks if isinstance(remarks, list) else [remarks])),
        step_s=read(table.get("step", {}), "step.other_s", 0.0),
    )


def _file_error(path: Path, what: str) -> PacelineError:
    return PacelineError(
        "PL933",
        saw=f"{path}: {what}.",
        rule="A cluster file has nodes, ranks_per_node, [processor] and a section for each class of links.",
        fix="Write it with `paceline probe --out cluster.toml` on the cluster, and let it finish.",
    )
