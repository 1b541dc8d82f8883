"""The meeting place of nodes, and the address by which they reach this one, with made-up interfaces."""

from __future__ import annotations

import argparse
import ipaddress
import socket
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from paceline.errors import PacelineError
from paceline.launching.elastic import network
from paceline.launching.elastic.network import choose_rendezvous, describe_place, is_own_host
from paceline.launching.flags import add_torchrun_flags
from paceline.place import RankPlace

SINGLE = RankPlace("single")
SLURM = RankPlace("slurm", 1, 4, 0, 1, 1, 4, "node0", 23456)


def read_flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_torchrun_flags(parser, {})
    return parser.parse_args([*words, "train.py"])


class Machine:
    """One node with a network as told; nothing of the real one is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.interfaces = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.77.0.11", "fe80::1%eth0"]}
        self.down: set[str] = set()
        self.names = {"localhost": ["127.0.0.1"], "node0": ["10.77.0.10"], "node1": ["10.77.0.11"]}
        self.route: Callable[[str], str] = lambda address: "10.77.0.11"
        self.asked: list[str] = []
        monkeypatch.setattr(network.socket, "gethostname", lambda: "node1")
        monkeypatch.setattr(network.socket, "getaddrinfo", self._resolve)
        monkeypatch.setattr(network.socket, "socket", lambda *args, **options: _Probe(self))
        monkeypatch.setattr(network.psutil, "net_if_addrs", self._list_addresses)
        monkeypatch.setattr(network.psutil, "net_if_stats", self._list_states)

    def _resolve(self, host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        self.asked.append(host)
        try:
            addresses = [str(ipaddress.ip_address(host))]
        except ValueError:
            if host not in self.names:
                raise socket.gaierror(-3, "Temporary failure in name resolution") from None
            addresses = self.names[host]
        return [(_family(a), socket.SOCK_STREAM, 6, "", (a, port)) for a in addresses]

    def _list_addresses(self) -> dict[str, list[SimpleNamespace]]:
        link = SimpleNamespace(family=psutil.AF_LINK, address="00:11:22:33:44:55")
        return {
            name: [link, *(SimpleNamespace(family=_family(a), address=a) for a in addresses)]
            for name, addresses in self.interfaces.items()
        }

    def _list_states(self) -> dict[str, SimpleNamespace]:
        return {name: SimpleNamespace(isup=name not in self.down) for name in self.interfaces}

    def choose(
        self, flags: argparse.Namespace, place: RankPlace = SINGLE, environ: dict[str, str] | None = None
    ) -> dict[str, str]:
        """Return the environment afterwards."""
        environ = {} if environ is None else environ
        choose_rendezvous(flags, place, environ)
        return environ


class _Probe:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def connect(self, where: tuple[str, int]) -> None:
        self._own = self._machine.route(where[0])

    def getsockname(self) -> tuple[str, int]:
        return self._own, 40000


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


# ---- one node


@pytest.mark.parametrize("words", [(), ("--nnodes", "1"), ("--nnodes", "1:1"), ("--standalone",)])
def test_one_node_stands_alone(words: tuple[str, ...], machine: Machine) -> None:
    flags = read_flags(*words)
    assert machine.choose(flags) == {}
    assert flags.standalone is True
    assert flags.nnodes in ("1", "1:1")
    assert machine.asked == [], "no name has to resolve"


@pytest.mark.parametrize(
    "words",
    [
        ("--master-port", "29511"),
        ("--rdzv-endpoint", "localhost:29511"),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "nowhere:29511"),
        ("--rdzv-backend", "c10d"),
    ],
)
def test_one_node_that_names_a_place_keeps_it(words: tuple[str, ...], machine: Machine) -> None:
    flags, before = read_flags(*words), vars(read_flags(*words))
    assert machine.choose(flags) == {}
    assert vars(flags) == {**before, "nnodes": "1:1"}


@pytest.mark.parametrize("nnodes", ["4:2", "0", "0:2", "two", "1:", "-1"])
def test_numbers_of_nodes_that_cannot_be(nnodes: str, machine: Machine) -> None:
    with pytest.raises(PacelineError, match="PL365") as raised:
        machine.choose(read_flags(f"--nnodes={nnodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=node0"))
    assert f"--nnodes {nnodes}" in raised.value.saw


# ---- several nodes, c10d


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("10.77.0.11", True),
        ("node1", True),
        ("localhost", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("node0", False),
        ("10.77.0.10", False),
    ],
)
def test_the_host_of_a_c10d_store_knows_itself_by_address(host: str, is_own: bool, machine: Machine) -> None:
    assert is_own_host(host) is is_own


def test_nodes_meet_by_the_address_that_leads_to_the_host(machine: Machine) -> None:
    for endpoint in ("10.77.0.11:29500", "node0:29500"):
        flags = read_flags("--nnodes=1:3", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
        assert machine.choose(flags) == {"GLOO_SOCKET_IFNAME": "eth0"}
        assert (flags.rdzv_conf, flags.local_addr) == ("", "10.77.0.11"), "which launcher hosts is tried out"
        assert flags.standalone is False


def test_what_the_user_states_of_the_host_stays(machine: Machine) -> None:
    words = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500")
    flags = read_flags(*words, "--rdzv-conf=is_host=1,timeout=20")
    machine.choose(flags)
    assert flags.rdzv_conf == "is_host=1,timeout=20"
    flags = read_flags(*words, "--rdzv-conf=timeout=20")
    machine.choose(flags)
    assert flags.rdzv_conf == "timeout=20"


def test_an_address_or_interface_that_is_given_stays(machine: Machine) -> None:
    words = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500")
    machine.interfaces["ib0"] = ["10.99.0.11"]
    flags = read_flags(*words, "--local-addr=10.99.0.11")
    assert machine.choose(flags) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert flags.local_addr == "10.99.0.11"
    flags = read_flags(*words)
    assert machine.choose(flags, environ={"GLOO_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "ib0"}


def test_the_interface_is_the_routes(machine: Machine) -> None:
    machine.interfaces["eth1"] = ["10.88.0.11"]
    machine.names["node0"] = ["10.88.0.10"]
    machine.route = lambda address: "10.88.0.11" if address.startswith("10.88.") else "10.77.0.11"
    flags = read_flags("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0")
    assert machine.choose(flags) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert flags.local_addr == "10.88.0.11"


def test_ipv4_goes_first_where_a_name_has_both(machine: Machine) -> None:
    machine.names["node1"] = ["fd00::11", "10.77.0.11"]
    flags = read_flags("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500")
    machine.choose(flags)
    assert (flags.rdzv_conf, flags.local_addr) == ("", "10.77.0.11")


# ---- several nodes, static


def test_a_static_rendezvous_meets_at_the_master(machine: Machine) -> None:
    flags = read_flags("--nnodes=2", "--node-rank=1", "--master-addr=node0", "--master-port=29511")
    assert machine.choose(flags) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert (flags.local_addr, flags.rdzv_conf, flags.rdzv_endpoint) == ("10.77.0.11", "", "")
    assert (flags.node_rank, flags.master_addr, flags.master_port) == (1, "node0", 29511)


# ---- names that stand for the loopback


@pytest.mark.parametrize(
    "words",
    [
        ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29500"),
        ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29500"),
        ("--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:29500"),
        (),
        ("--master-addr=localhost",),
        ("--master-addr=[::1]", "--master-port=29500"),
        ("--master-addr=::1", "--master-port=29500"),
    ],
)
def test_launchers_on_one_machine_meet_at_the_loopback(words: tuple[str, ...], machine: Machine) -> None:
    """So this machine's name need not resolve."""
    flags = read_flags("--nnodes=2", *words)
    before = {**vars(flags)}
    assert machine.choose(flags) == {}
    assert flags.local_addr == "localhost"
    assert {**vars(flags), "local_addr": None} == before


OWN_NAME = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500")


def test_an_own_name_for_the_loopback_with_one_interface(machine: Machine) -> None:
    machine.names["node1"] = ["127.0.1.1"]
    machine.interfaces |= {"docker0": ["172.17.0.1"], "veth7": ["10.1.1.1"], "eth9": ["10.9.9.9"]}
    machine.interfaces |= {"eth8": ["169.254.3.4"], "eth7": ["fd00::7"]}
    machine.down = {"eth9"}
    flags = read_flags(*OWN_NAME)
    assert machine.choose(flags) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert (flags.rdzv_conf, flags.local_addr) == ("", "10.77.0.11")


def test_with_several_interfaces_the_user_must_state(machine: Machine) -> None:
    machine.names["node1"] = ["127.0.1.1"]
    machine.interfaces["ib0"] = ["10.99.0.11"]
    with pytest.raises(PacelineError, match="several interfaces are suitable") as caught:
        machine.choose(read_flags(*OWN_NAME))
    assert caught.value.code == "PL347"
    for word in ("'node1'", "127.0.1.1", "eth0 10.77.0.11", "ib0 10.99.0.11", "--local-addr"):
        assert word in str(caught.value)
    flags = read_flags(*OWN_NAME, "--local-addr=10.99.0.11")
    assert machine.choose(flags) == {"GLOO_SOCKET_IFNAME": "ib0"}


def test_with_several_interfaces_a_set_one_serves(machine: Machine) -> None:
    """As the error's own advice has it."""
    machine.names["node1"] = ["127.0.1.1"]
    machine.interfaces["ib0"] = ["10.99.0.11"]
    flags = read_flags(*OWN_NAME)
    assert machine.choose(flags, environ={"GLOO_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert flags.local_addr == "10.99.0.11"


def test_without_an_interface_there_is_none_to_choose(machine: Machine) -> None:
    machine.names["node1"] = ["127.0.1.1"]
    machine.down = {"eth0"}
    with pytest.raises(PacelineError, match=r"there is no other interface: none\.") as caught:
        machine.choose(read_flags(*OWN_NAME))
    assert caught.value.code == "PL347"


# ---- what does not resolve


@pytest.mark.parametrize("words", [("--rdzv-backend=c10d", "--rdzv-endpoint=nowhere:29500"), ()])
def test_a_name_that_stands_for_nothing(words: tuple[str, ...], machine: Machine) -> None:
    flags = read_flags("--nnodes=2", *words, *([] if words else ["--master-addr=nowhere"]))
    with pytest.raises(PacelineError, match="'nowhere' does not resolve on this node") as caught:
        machine.choose(flags)
    assert caught.value.code == "PL346"


def test_the_own_name_need_not_resolve(machine: Machine) -> None:
    del machine.names["node1"]
    flags = read_flags("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.10:29500")
    assert machine.choose(flags) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert (flags.rdzv_conf, flags.local_addr) == ("", "10.77.0.11")


def test_no_route(machine: Machine) -> None:
    def fail(address: str) -> str:
        raise OSError(101, "Network is unreachable")

    machine.route = fail
    with pytest.raises(PacelineError, match=r"No route .* to node0: Network is unreachable") as caught:
        machine.choose(read_flags("--nnodes=2", "--master-addr=node0"))
    assert caught.value.code == "PL346"


# ---- IPv6, etcd


@pytest.mark.parametrize("endpoint", ["[fd00::10]:29500", "[fd00::10]"])
def test_ipv6(endpoint: str, machine: Machine) -> None:
    machine.interfaces["eth0"] = ["fd00::11", "fe80::1%eth0"]
    machine.route = lambda address: {"fd00::10": "fd00::11"}[address]
    flags = read_flags("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
    assert machine.choose(flags) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert (flags.rdzv_conf, flags.local_addr) == ("", "fd00::11")


def test_no_endpoint_is_left_to_torch(machine: Machine) -> None:
    flags = read_flags("--nnodes=2", "--rdzv-backend=c10d")
    assert machine.choose(flags) == {}
    assert (flags.rdzv_conf, flags.local_addr) == ("", None)


# ---- srun and mpirun


def test_tasks_of_slurm_are_the_nodes(machine: Machine) -> None:
    flags = read_flags()
    environ = machine.choose(flags, SLURM, {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"})
    assert environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert (flags.nnodes, flags.rdzv_backend, flags.rdzv_endpoint) == ("4", "c10d", "node0:23456")
    assert (flags.rdzv_id, flags.rdzv_conf, flags.local_addr) == ("77.2", "is_host=false", "10.77.0.11")


def test_the_first_task_hosts(machine: Machine) -> None:
    flags = read_flags("--rdzv-id=mine", "--rdzv-conf=timeout=9")
    machine.choose(flags, RankPlace("mpi", 0, 2, 0, 1, 0, 2, "node1", 23456), {"PMIX_NAMESPACE": "ns"})
    assert (flags.rdzv_id, flags.rdzv_conf) == ("mine", "timeout=9,is_host=true")
    flags = read_flags()
    machine.choose(flags, RankPlace("mpi", 0, 2, 0, 1, 0, 2, "node1", 23456), {"PMIX_NAMESPACE": "ns"})
    assert flags.rdzv_id == "ns.0"


def test_one_task_stands_alone(machine: Machine) -> None:
    flags = read_flags()
    assert machine.choose(flags, RankPlace("mpi")) == {}
    assert flags.nnodes in ("1", "1:1")


def test_what_is_given_beside_slurm_stays(machine: Machine) -> None:
    flags = read_flags("--master-addr=node0", "--master-port=29511")
    machine.choose(flags, SLURM)
    assert (flags.nnodes, flags.node_rank, flags.rdzv_backend, flags.rdzv_endpoint) == ("4", 1, "static", "")
    flags = read_flags("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29511")
    machine.choose(flags, SLURM)
    assert (flags.nnodes, flags.rdzv_endpoint, flags.node_rank) == ("2", "node0:29511", 0)


def test_torchruns_variables_of_a_place() -> None:
    assert describe_place(SLURM) == {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "4",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "23456",
    }
