"""What a survey of a cluster means: planted faults by place and kind, and healthy clusters without a word."""

from __future__ import annotations

import itertools
import random

import pytest

from paceline.cli.doctor import _list_bad
from paceline.doctor.cluster.coordinator import Survey, pair_up
from paceline.doctor.cluster.judge import judge


def survey(size: int, *, seed: int = 0) -> Survey:
    """A healthy cluster whose numbers spread by a third."""
    draw = random.Random(seed).uniform
    links = list(itertools.permutations(range(size), 2))
    found = Survey([f"n{i}" for i in range(size)], [f"10.0.0.{i + 1}" for i in range(size)], size)
    found.checked = {
        i: {
            "facts": {},
            "announced": (f"10.0.0.{i + 1}", "its name"),
            "checked": [{"facts": {"torch": "2.13"}, "findings": []}],
        }
        for i in range(size)
    }
    found.rates = {link: draw(1.0e8, 1.3e8) for link in links}
    found.rtts = {link: draw(1e-4, 2e-4) for link in links}
    found.resent = dict.fromkeys(links, 0.0)
    found.speeds = {i: {"matrix product": draw(8e10, 1e11), "memory": draw(8e9, 1e10)} for i in range(size)}
    found.offsets_s = {i: [(draw(-0.01, 0.01), 1e-3), (draw(-0.01, 0.01), 1e-3)] for i in range(size)}
    found.seconds_between_offsets = 10.0
    found.all_reduce_s = {1 << 23: 0.2}
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_healthy_cluster_has_no_finding(size: int, seed: int) -> None:
    assert judge(survey(size, seed=seed)) == []


def one(found: Survey) -> str:
    findings = judge(found)
    assert len(findings) == 1, findings
    return str(findings[0])


def test_a_slow_link_is_told_from_a_slow_node() -> None:
    found = survey(4)
    found.rates[2, 1] = 1e7
    assert one(found).startswith("n2 to n1: 80 Mbit/s")
    found = survey(4)
    found.rates |= {(3, other): 1e7 for other in range(3)}
    assert one(found).startswith("all links from n3: 80 Mbit/s")
    found = survey(4)
    found.rates |= {link: 1e7 for link in found.rates if 3 in link}
    assert one(found).startswith("all links of n3")
    found = survey(2)
    found.rates[0, 1] = 1e7
    assert one(found).startswith("n0 to n1")


def test_links_above_what_one_connection_fills_are_alike() -> None:
    found = survey(3)
    found.rates = dict.fromkeys(found.rates, 1.5e9) | {(0, 1): 2.9e9, (1, 2): 1.1e9}
    found.all_reduce_s = {1 << 23: 0.02}
    assert judge(found) == []


def test_links_to_a_silent_node_are_not_named_again() -> None:
    found = survey(3)
    found.lost = {2: "links"}
    found.unreachable = {(1, 2): {"stage": "large", "error": "timed out"}}
    assert [each.code for each in judge(found)] == ["PL983"]


def test_lossy_and_far_links() -> None:
    found = survey(3)
    found.resent[0, 2] = 0.05
    assert "n0 to n2: 5.0% of the packets" in one(found)
    found = survey(3)
    found.rtts[1, 2] = 0.04
    assert "n1 to n2: a round trip takes 40" in one(found)


def test_nodes_that_cannot_be_reached() -> None:
    found = survey(4)
    found.unreachable[1, 2] = {"stage": "connect", "error": "timed out"}
    assert "n1 to n2: from n1, n2 (10.0.0.3) cannot be reached (timed out)" in one(found)
    found.unreachable |= {(i, 2): {"stage": "connect", "error": "timed out"} for i in (0, 3)}
    assert "n2: from all other nodes, it cannot be reached" in one(found)
    found.unreachable = {link: {"stage": "connect", "error": "timed out"} for link in found.rates}
    assert one(found).startswith("n0, n1, n2 and n3: from each node, every other one cannot be reached")
    found = survey(3)
    found.unreachable[0, 1] = {"stage": "connect", "error": "Connection refused"}
    assert "a firewall that rejects" in one(found)
    found = survey(3)
    found.unreachable[0, 1] = {"stage": "large", "error": "timed out"}
    assert "answers small messages, but nothing larger arrives" in one(found)
    assert "MTU" in one(found)


def test_nodes_that_are_missing_silent_or_twice() -> None:
    found = survey(3)
    found.num_wanted = 4
    assert "1 of 4 nodes did not come; n0, n1 and n2 did" in one(found)
    assert "3 of 3 nodes did not come; none did" in one(Survey([], [], 3))
    found = survey(3)
    found.lost[1] = "links"
    assert one(found).startswith("n1: it fell silent during links")
    found = survey(3)
    found.names[2] = "n1"
    assert "2 nodes have the name n1" in one(found)


def test_a_name_that_stands_for_loopback() -> None:
    found = survey(3)
    found.checked[1]["announced"] = "127.0.1.1", "the name node1 stands for it"
    assert (
        "n1: gloo would announce 127.0.1.1 there (the name node1 stands for it), and others reach it"
        in one(found)
    )
    found.checked[1]["checked"][0]["findings"] = [{"code": "PL976"}]
    assert judge(found) == []


def test_an_announced_address_that_others_do_not_reach() -> None:
    found = survey(3)
    found.checked[1]["announced"] = "192.168.9.1", "GLOO_SOCKET_IFNAME=eth1"
    assert judge(found) == []
    found.misled[0, 1] = {"stage": "connect", "error": "timed out"}
    assert one(found).startswith("n1: gloo would announce 192.168.9.1 there (GLOO_SOCKET_IFNAME=eth1), and")
    found.unreachable[0, 1] = {"stage": "connect", "error": "timed out"}
    assert "cannot be reached" in one(found), "it says nothing about the address then"


def test_a_finding_on_node_10_is_not_one_on_node_1_and_many_nodes_are_all_named() -> None:
    found = survey(12)
    found.checked[10]["checked"][0]["facts"]["torch"] = "2.11"
    assert _list_bad(found, judge(found)) == ["n10"]
    found.without_folder = [1, 2, 3, 4, 5]
    assert _list_bad(found, judge(found)) == ["n1", "n2", "n3", "n4", "n5", "n10"]
    found.rates[7, 8] = 1e7
    assert _list_bad(found, judge(found))[5:] == ["n7", "n8", "n10"]


def test_what_is_not_the_same_everywhere() -> None:
    found = survey(3)
    found.checked[2]["checked"][0]["facts"]["torch"] = "2.11"
    assert "n2: torch: n2 has 2.11; the others have 2.13" in one(found)
    found = survey(3)
    found.checked[0]["facts"]["$NCCL_ALGO"] = "Ring"
    assert "n0: NCCL_ALGO: n0 has Ring; the others have none" in one(found)
    found = survey(3)
    for number, reply in found.checked.items():
        for name in ("CUDA_VISIBLE_DEVICES", "NCCL_IB_HCA", "TORCH_HOME", "TORCH_EXTENSIONS_DIR"):
            reply["facts"][f"${name}"] = f"/scratch/{number}"
    assert judge(found) == []


def test_a_slow_node_and_a_clock() -> None:
    found = survey(4)
    found.speeds[2]["matrix product"] = 2e10
    assert one(found).startswith("n2: matrix product: 2")
    for number, rates in found.speeds.items():
        rates["share of a core"] = 0.3 if number == 2 else 0.98
    assert [str(each).partition(" %")[0][:12] for each in judge(found)] == ["n2: matrix p", "n2: share of"]
    for rates in found.speeds.values():
        rates["share of a core"] = 0.4
    assert judge(found) == []  # one busy machine, which favors now one and now another
    found = survey(3)
    found.offsets_s[1] = [(3.0, 1e-3), (3.0, 1e-3)]
    assert "n1: its clock is +3.00 s from n0's" in one(found)
    found.offsets_s[1] = [(0.1, 1e-3), (0.4, 1e-3)]
    assert "its clock moved by +0.30 s in 10 s" in one(found)


def test_collectives_and_folders() -> None:
    found = survey(3)
    found.wrong[1] = ["all_reduce"]
    assert one(found).startswith("n1: all_reduce gave wrong numbers")
    found = survey(3)
    found.all_reduce_s = {1 << 23: 20.0}
    assert "an all-reduce of 8.0 MiB takes 20" in one(found)
    found = survey(3)
    found.folder, found.without_folder = "/data/runs", [2]
    assert "n2: /data/runs is not the folder that n0 sees" in one(found)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_rounds_are_disjoint_and_each_pair_meets_once(size: int) -> None:
    rounds = list(pair_up(list(range(size))))
    assert len(rounds) == (size if size % 2 else size - 1)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == [list(pair) for pair in itertools.combinations(range(size), 2)]
    assert all(len(set(itertools.chain(*pairs))) == 2 * len(pairs) for pairs in rounds)
