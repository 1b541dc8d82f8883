"""Copies of states between memory keepers: they arrive, outlive the sender, and an altered one is named."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.memory.held_states import HeldPlace, HeldShare, end_keepers, find_held, write_share
from paceline.checkpoint.memory.keeper import KeeperProcess, checksum, pack_index, unpack_index
from paceline.checkpoint.memory.sending import CopyTarget, choose_partners, send_copy
from paceline.errors import PacelineError

HOST = "127.0.0.1"
DATA = bytes(range(256)) + b"the second file"
FILES = [("part-00000.safetensors", 0, 256), ("state.json", 256, 15)]


def share(step: int = 3) -> dict[str, Any]:
    return HeldShare(
        step, "t", 0, 1, "sharded", {"run": "r"}, FILES, [], {"metrics.jsonl": (7, "row")}
    ).dump()


class Node:
    """A keeper, as beside a rank of a node."""

    def __init__(self, folder: Path) -> None:
        self.slots = [os.memfd_create("test") for _ in range(2)]
        self.keeper = KeeperProcess(self.slots, os.getpid(), str(folder))
        secret = secrets.token_hex(16)
        self.target = CopyTarget("other", HOST, self.keeper.listen(HOST, secret), secret)
        os.pwrite(self.slots[0], DATA, 0)

    def keep(self, step: int, target: CopyTarget) -> str | None:
        """Keep a share and send it."""
        self.keeper.keep(0, share(step), target)
        return self.keeper.read_kept(20)

    def close(self) -> None:
        self.keeper._link.close()
        self.keeper._process.kill()
        self.keeper._process.wait()
        for fd in self.slots:
            os.close(fd)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    found = [Node(tmp_path) for _ in range(2)]
    yield found
    for node in found:
        node.close()


def lose_first(nodes: list[Node], folder: Path) -> list[HeldPlace]:
    """Return what the second node holds once the first one is gone."""
    nodes[0].keeper._process.kill()
    nodes[0].keeper._process.wait()
    nodes[1].keeper._link.close()
    found = find_held(folder, os.getpid())
    return found[nodes[1].keeper.pid]


def test_a_copy_outlives_its_node_and_each_altered_byte_is_named(nodes: list[Node], tmp_path: Path) -> None:
    assert nodes[0].keep(3, nodes[1].target) == ""
    (held,) = lose_first(nodes, tmp_path)
    assert held.is_copy
    assert json.dumps(held.share.dump()) == json.dumps(share())
    for name, record in write_share(held, tmp_path).items():
        assert record.num_bytes == len((tmp_path / name).read_bytes())
    assert b"".join((tmp_path / name).read_bytes() for name, _, _ in FILES) == DATA
    memory = os.open(held.path, os.O_RDWR)
    for place, byte in enumerate(DATA):
        name = FILES[place >= 256][0]
        for file, _, _ in FILES:
            (tmp_path / file).unlink(missing_ok=True)
        os.pwrite(memory, bytes([byte ^ 16]), place)
        with pytest.raises(PacelineError, match=rf"^{name} of step 3 was altered .* rank 0.*PL560") as found:
            write_share(held, tmp_path)
        assert "another node's keeper" in found.value.saw
        os.pwrite(memory, bytes([byte]), place)
    os.close(memory)
    end_keepers([nodes[1].keeper.pid])
    assert nodes[1].keeper._process.wait(10) != 0


def test_a_later_copy_replaces_the_one_of_its_slot(nodes: list[Node], tmp_path: Path) -> None:
    for step in (3, 4):
        assert nodes[0].keep(step, nodes[1].target) == ""
    (held,) = lose_first(nodes, tmp_path)
    assert held.share.step == 4


def test_what_goes_wrong_on_the_way_is_told_and_nothing_is_held(nodes: list[Node], tmp_path: Path) -> None:
    good, memory = nodes[1].target, nodes[0].slots[0]
    sums = {name: checksum(memory, start, size) for name, start, size in FILES}
    wrong = share() | {"checksums": sums | {"state.json": 1}}
    assert "state.json arrived with other bytes" in send_copy(good, wrong, 0, memory)
    right = share() | {"checksums": sums}
    unknown = CopyTarget("other", HOST, good.port, "0" * 32)
    assert send_copy(unknown, right, 0, memory).startswith("other (127.0.0.1): ")
    huge = right | {"files": [("part-00000.safetensors", 0, 1 << 60)]}
    assert "of memory for the copy, and" in send_copy(good, huge, 0, memory)
    short = right | {"files": [("part-00000.safetensors", 0, 1000)]}
    assert "the memory ends early" in send_copy(good, short, 0, memory)
    assert lose_first(nodes, tmp_path) == []
    nodes[1].close()
    nodes[1] = Node(tmp_path)
    assert "refused" in send_copy(good, right, 0, memory).lower()


def test_each_altered_byte_of_an_index_is_found() -> None:
    table = {"folder": "runs/demo", "held": [share()]}
    packed = pack_index(table)
    assert unpack_index(packed) == json.loads(json.dumps(table))
    for place in range(len(packed)):
        altered = bytearray(packed)
        altered[place] ^= 4
        with pytest.raises(ValueError, match="not as it was"):
            unpack_index(bytes(altered))


@pytest.mark.parametrize(
    ("nodes_of_ranks", "domains", "expected"),
    [
        ([0, 0], ["a", "a"], [None, None]),
        ([0, 1], ["a", "a"], [1, 0]),
        ([0, 1, 2], ["a", "a", "a"], [1, 2, 0]),
        ([0, 0, 1, 1], ["", "", "", ""], [2, 3, 0, 1]),
        ([0, 1, 2, 3], ["a", "a", "b", "b"], [2, 3, 0, 1]),
        ([0, 1, 1, 2], ["a", "a", "a", "a"], [1, 3, 3, 0]),
        ([5, 5, 7], ["a", "a", "a"], [2, 2, 0]),
    ],
)
def test_partners_are_on_another_node_and_in_another_domain_if_possible(
    nodes_of_ranks: list[int], domains: list[str], expected: list[int | None]
) -> None:
    assert choose_partners(nodes_of_ranks, domains) == expected
