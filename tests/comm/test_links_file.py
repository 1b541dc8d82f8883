"""Files of measured links: read back as written, and refused where they don't fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.comm.links_file import check_links_path, load_links, save_links
from paceline.errors import PacelineError
from paceline.plan.links_file import read_links
from tests.comm.measured import make_links


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "links.json"
    save_links(make_links((0, 0, 1, 1)), path)
    return path


def test_a_file_is_read_back_as_written(path: Path) -> None:
    found = load_links(path, ["host0", "host1"], [0, 0, 1, 1])
    assert found == make_links((0, 0, 1, 1))
    assert load_links(path, ["host1", "host0"], [0, 1, 1, 0]) == found, "the order of hosts may differ"
    assert load_links(path, ["host1"], [0, 0]) == found, "fewer are contained"


def test_the_time_of_a_meeting_may_be_missing(tmp_path: Path) -> None:
    found = make_links((0, 0))
    assert found.links.meet_s is not None
    path = tmp_path / "links.json"
    save_links(found, path)
    assert read_links(path) == found
    table = json.loads(path.read_text())
    del table["meet_s"]
    path.write_text(json.dumps(table))
    assert read_links(path) == replace(found, links=replace(found.links, meet_s=None))


def refused(path: Path, hosts: list[str], nodes: list[int]) -> PacelineError:
    with pytest.raises(PacelineError) as caught:
        load_links(path, hosts, nodes)
    return caught.value


def test_another_cluster_is_refused(path: Path) -> None:
    error = refused(path, ["host0", "other"], [0, 0, 1, 1])
    assert error.code == "PL951"
    assert "other" in error.saw


def test_fewer_nodes_or_ranks_are_refused(path: Path) -> None:
    error = refused(path, ["host0", "host1", "host2"], [0, 1, 2])
    assert error.code == "PL952"
    assert "2 nodes with up to 2 ranks" in error.saw
    assert "3 with up to 1" in error.saw
    assert refused(path, ["host0", "host1"], [0, 0, 0, 1]).code == "PL952"


def edit(change: str) -> Any:
    def apply(table: Any) -> Any:
        exec(change, {"t": table})
        return table

    return apply


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ("t['paceline_links'] = 9", "paceline_links = 2"),
        ("del t['hosts']", "'hosts' is missing"),
        ("t['nodes'] = [0, 0, 2, 2]", "do not number 2 hosts"),
        ("t['nodes'] = [0]", "do not number"),
        ("t['nodes'] = 7", "not iterable"),
        ("t['same_node'] = None", "same_node is null"),
        ("t['between_nodes'] = None", "between_nodes is null"),
        ("del t['same_node']['stream']", "'stream' is missing"),
        ("t['same_node']['stream']['seconds'][0] = 0", "same_node.stream.seconds is 0"),
        ("t['same_node']['stream']['seconds'][0] = 'fast'", "could not convert"),
        ("t['same_node']['message']['num_bytes'].reverse()", "sizes that do not rise"),
        ("t['same_node']['message']['seconds'].pop()", "sizes and"),
        ("t['call_s'] = -1", "call_s is -1"),
        ("t['call_s'] = float('nan')", "call_s is nan"),
        ("t['meet_s'] = 0", "meet_s is 0"),
        ("t['pairs'][0]['ranks'] = [0, 9]", "pair 0, 9"),
        ("t['pairs'][0] = 3", "subscriptable"),
    ],
)
def test_a_damaged_table_is_refused(path: Path, change: str, seen: str) -> None:
    table = json.loads(path.read_text())
    path.write_text(json.dumps(edit(change)(table)))
    with pytest.raises(PacelineError, match="PL950") as caught:
        read_links(path)
    assert seen in caught.value.saw


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe", b"null"])
def test_a_file_that_is_no_table_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(PacelineError, match="PL950"):
        read_links(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(PacelineError, match="PL950"):
            read_links(path)


def test_a_place_that_cannot_be_written_is_found_before(tmp_path: Path) -> None:
    check_links_path(tmp_path / "links.json")
    for path in (tmp_path, tmp_path / "no" / "links.json"):
        with pytest.raises(PacelineError, match="PL955"):
            check_links_path(path)
    with pytest.raises(PacelineError, match="PL955"):
        save_links(make_links(), tmp_path)
