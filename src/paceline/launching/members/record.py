"""The record of a job in its store: the nodes of its round, and those that wait.

A record is one small text, replaced only by comparison with the one before. Its rounds are those of torch's
`DynamicRendezvousHandler`: nodes join a round until it is complete, and the next one begins when all of them
have left it or are lost.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MOST_BYTES = 1 << 20
_FORMAT = 1
_MOST_GONE = 32


@dataclass(frozen=True)
class JobNode:
    """One launcher, from its start to its end.

    Attributes:
        key: a random name; a launcher that is started again has another one.
        name: of its machine.
        address: where other nodes reach it.
        since: the round in which it first asked to take part; it gives the order of nodes.
        port: of the store that it has ready for the next round, should it become number 0.
        nproc, role: the number of its ranks, and their `--role`.
        folder: number by which its disk knows the script's working folder; "" if that does not matter.
    """

    key: str
    name: str
    address: str
    since: int = 0
    port: int = 0
    nproc: int = 0
    role: str = ""
    folder: str = ""

    def __str__(self) -> str:
        return self.name if self.name == self.address else f"{self.name} ({self.address})"


@dataclass(frozen=True)
class Terms:
    """The settings that all nodes of a job share.

    Attributes:
        least, most: `--nnodes`.
        code: identifies what the ranks run: versions, and file names with a digest of each file.
    """

    least: int
    most: int
    code: Mapping[str, str] = field(default_factory=dict)

    def compare(self, theirs: Terms) -> str:
        """Return how the job differs from this node; empty if it does not."""
        nodes = f"{self.least}:{self.most}", f"{theirs.least}:{theirs.most}"
        if nodes[0] != nodes[1]:
            return f"the job has --nnodes {nodes[1]}, and this node has {nodes[0]}"
        labels = [
            label
            for label in dict.fromkeys([*theirs.code, *self.code])
            if self.code.get(label) != theirs.code.get(label)
        ]
        sides = [
            " and ".join(f"{label} {code[label]}" for label in labels if label in code) or "nothing of this"
            for code in (theirs.code, self.code)
        ]
        return f"the job runs {sides[0]}, and this node runs {sides[1]}" if labels else ""


@dataclass
class Record:
    """The state of a job.

    Attributes:
        number: counts the records of the job, from 1.
        round: counts from 1.
        is_complete: whether the nodes of the round are settled; then its ranks run.
        ended: why the job is over: "done", "failed" or "left"; empty while it is not.
        terms: of the nodes.
        nodes: all nodes that take part or wait, by key.
        numbers: the nodes of the round, with their numbers once it is complete.
        waiting: nodes that join the next round.
        spares: nodes beyond the maximum.
        leaving: nodes of the round that were asked to leave.
        expected: nodes of the last complete round that are not known to have gone.
        gone: nodes that have gone since, by key: name and reason.
        losses: the number of times that a machine was lost, by name.
        refused: why launchers were refused, by name.
    """

    number: int = 0
    round: int = 1
    is_complete: bool = False
    ended: str = ""
    terms: Terms = field(default_factory=lambda: Terms(1, 1))
    nodes: dict[str, JobNode] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    spares: list[str] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    gone: dict[str, tuple[str, str]] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def members(self) -> list[JobNode]:
        """The nodes of the round, in the order of their numbers."""
        return [self.nodes[key] for key in sorted(self.numbers, key=lambda key: (self.numbers[key], key))]

    @property
    def state(self) -> str:
        """The state in torch's words."""
        return "final" if self.ended else "frozen" if self.is_complete else "joinable"

    def remove(self, key: str, why: str, *, is_lost: bool, is_steady: bool = False) -> None:
        """Remove a node that has left or is lost.

        Follows `_sanitize` of torch's dynamic rendezvous.

        Args:
            is_lost: whether it is lost.
            is_steady: whether it had been there for so long that earlier losses no longer count.
        """
        node = self.nodes.pop(key)
        self.numbers.pop(key, None)
        for names in (self.waiting, self.spares, self.leaving, self.expected):
            if key in names:
                names.remove(key)
        self.gone[key] = (str(node), why)
        self.gone = dict(list(self.gone.items())[-_MOST_GONE:])
        if is_lost:
            self.losses[str(node)] = 1 if is_steady else self.losses.get(str(node), 0) + 1
        if self.is_complete and not self.numbers:
            self.is_complete = False
            self.round += 1


def to_text(record: Record) -> str:
    """Return a record as a store keeps it; no two texts are the same, so the writer of each is known."""
    return json.dumps({"paceline": _FORMAT, "writer": secrets.token_hex(8), **asdict(record)})


def from_text(text: bytes | str) -> Record:
    """Parse the text of `to_text`.

    Raises:
        ValueError: it is something else, or too large.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} bytes")
    try:
        value = json.loads(text)
        if value.pop("paceline") != _FORMAT:
            raise ValueError("another format")
        del value["writer"]
        record = Record(**value)
        record.terms = Terms(**value["terms"])
        record.nodes = {key: JobNode(**node) for key, node in value["nodes"].items()}
        record.gone = {key: (str(name), str(why)) for key, (name, why) in value["gone"].items()}
        _check(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a record of Paceline ({type(error).__name__})") from None
    return record


def _check(record: Record) -> None:
    """Raise ValueError for a record that no launcher writes."""
    numbers = [record.number, record.round, record.terms.least, record.terms.most, *record.numbers.values()]
    named = [*record.numbers, *record.waiting, *record.spares]
    nodes: list[tuple[Any, ...]] = [(node.since, node.port, node.nproc) for node in record.nodes.values()]
    if not all(isinstance(number, int) for number in [*numbers, *sum(nodes, ())]):
        raise ValueError("a number")
    if not all(name in record.nodes for name in named):
        raise ValueError("a node")
    for node in record.nodes.values():
        texts = node.key, node.name, node.address, node.role, node.folder
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a text")
