"""Reading a launcher's environment: every launcher, and everything half set or contradictory."""

from __future__ import annotations

import pytest

from paceline.errors import PacelineError
from paceline.place import RankPlace, check_interfaces, find_first_host, is_launched, read_environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "node[0-2,5]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "3141592653",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_torchrun() -> None:
    assert read_environment(TORCHRUN) == RankPlace(
        launcher="torchrun",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        master_addr="host0",
        master_port=29500,
        agent_store=True,
    )


def test_a_world_of_one_needs_no_address() -> None:
    place = read_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert (place.launcher, place.rank, place.world_size) == ("torchrun", 0, 1)


def test_slurm() -> None:
    place = read_environment(SLURM)
    assert (place.launcher, place.rank, place.world_size) == ("slurm", 5, 7)
    assert (place.local_rank, place.local_world_size, place.node_rank, place.num_nodes) == (1, 2, 2, 4)
    assert place.master_addr == "node0"
    assert place.master_port is not None
    assert 1024 <= place.master_port < 32768
    assert not place.agent_store


def test_slurm_ranks_agree_on_a_port_and_steps_differ() -> None:
    port = read_environment(SLURM).master_port
    assert read_environment({**SLURM, "SLURM_PROCID": "4", "SLURM_LOCALID": "0"}).master_port == port
    assert read_environment({**SLURM, "SLURM_STEP_ID": "1"}).master_port != port
    assert read_environment({**SLURM, "SLURM_JOB_ID": "78"}).master_port != port


def test_slurm_takes_an_address_that_is_set() -> None:
    place = read_environment({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4242"})
    assert (place.master_addr, place.master_port) == ("10.0.0.1", 4242)


def test_slurm_last_node_has_one_task() -> None:
    last = {**SLURM, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    assert read_environment(last).local_world_size == 1


def test_slurm_step_of_fewer_tasks_than_the_job() -> None:
    env = {**SLURM, "SLURM_NTASKS": "14", "SLURM_STEP_NUM_TASKS": "7"}
    assert read_environment(env).world_size == 7


def test_slurm_cores_and_gpus_per_task() -> None:
    env = {**SLURM, "SLURM_CPUS_PER_TASK": "6", "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}
    place = read_environment(env)
    assert place.cores_per_rank == 6


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"},
        {"RANK": "", "WORLD_SIZE": " "},
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
        # a batch script: it has a PROCID, but belongs to no step
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {**SLURM, "SLURM_STEP_ID": "4294967290"},
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    ],
    ids=["nothing", "address only", "empty", "allocation", "batch script", "interactive step", "one task"],
)
def test_plain_process(env: dict[str, str]) -> None:
    assert read_environment(env) == RankPlace(launcher="single")
    assert not is_launched(env)


@pytest.mark.parametrize("env", [TORCHRUN, SLURM, MPI, {"RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_is_launched(env: dict[str, str]) -> None:
    assert is_launched(env)


def test_torchrun_inside_srun_wins() -> None:
    assert read_environment({**SLURM, **TORCHRUN}).launcher == "torchrun"


# The first of the two common batch scripts exports these; the second starts a launcher in every task.
EXPORTED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "7", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
MANY_LAUNCHERS = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    "env",
    [
        {**EXPORTED, "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},  # a wrapper in each task
        {"RANK": "0", "WORLD_SIZE": "1"},  # a world of one in each task
        {**MANY_LAUNCHERS, "SLURM_STEP_TASKS_PER_NODE": "1(x7)"},  # one launcher on each node
        {**MANY_LAUNCHERS, "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"},
        {**MANY_LAUNCHERS, "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"},  # a job of its own in each task
        {**without(MANY_LAUNCHERS, "TORCHELASTIC_RUN_ID")},  # srun paceline run: each task is a rank
    ],
    ids=["wrapper", "worlds of one", "launcher per node", "two nodes on one", "jobs", "tasks as ranks"],
)
def test_variables_of_torchrun_inside_srun_that_are_right(env: dict[str, str]) -> None:
    assert read_environment({**SLURM, **env}).launcher == "torchrun"


def test_mpi() -> None:
    place = read_environment(MPI)
    assert (place.launcher, place.rank, place.world_size, place.num_nodes) == ("mpi", 1, 2, 1)
    assert place.master_addr == "127.0.0.1"
    other = read_environment({**MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert other.master_port == place.master_port
    assert read_environment({**MPI, "PMIX_NAMESPACE": "2"}).master_port != place.master_port


def test_mpi_over_nodes() -> None:
    env = {
        **MPI,
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "MASTER_ADDR": "host0",
    }
    place = read_environment(env)
    assert (place.node_rank, place.num_nodes, place.master_addr) == (1, 2, "host0")


@pytest.mark.parametrize(
    ("env", "code", "words"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "PL300", ["RANK=3", "Missing: WORLD_SIZE"]),
        (without(TORCHRUN, "MASTER_ADDR"), "PL300", ["Missing: MASTER_ADDR."]),
        (without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "PL300", ["LOCAL_RANK, LOCAL_WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, "PL300", ["Missing: RANK"]),
        ({"LOCAL_RANK": "0"}, "PL300", ["Missing: RANK"]),
        ({**TORCHRUN, "RANK": "three"}, "PL301", ["RANK='three'"]),
        ({**TORCHRUN, "WORLD_SIZE": "4.0"}, "PL301", ["WORLD_SIZE='4.0'"]),
        ({**TORCHRUN, "RANK": "4"}, "PL302", ["rank 4 in a world of 4"]),
        ({**TORCHRUN, "RANK": "-1"}, "PL302", ["rank -1"]),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "PL302", ["world size 0"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "PL302", ["local rank 2"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "PL302", ["9 ranks on this node"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "PL302", ["0 ranks on this node"]),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "PL302", ["MASTER_PORT=99999"]),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "PL301", ["MASTER_PORT='http'"]),
        ({**SLURM, "WORLD_SIZE": "2"}, "PL302", ["WORLD_SIZE=2", "slurm started 7"]),
        (without(SLURM, "SLURM_LOCALID"), "PL300", ["Missing: SLURM_LOCALID"]),
        (without(SLURM, "SLURM_STEP_NODELIST"), "PL300", ["SLURM_STEP_NODELIST"]),
        ({**SLURM, "SLURM_PROCID": "7"}, "PL302", ["rank 7"]),
        ({**SLURM, "SLURM_NODEID": "9"}, "PL302", ["0 ranks on this node"]),
        ({**SLURM, "SLURM_STEP_NODELIST": "node[0-"}, "PL304", ["node[0-"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, "PL304", ["many"]),
        ({**SLURM, **EXPORTED}, "PL361", ["RANK=0 in task 5 of the 7", "Remove the exports"]),
        ({**SLURM, **EXPORTED, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "PL361", ["RANK=0 in task 0"]),
        (
            {**SLURM, **EXPORTED, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"},
            "PL361",
            ["RANK=0 in task 5"],
        ),
        ({**SLURM, **MANY_LAUNCHERS}, "PL362", ["2 tasks on this node", "2 ranks: 4 ranks on one node"]),
        (without(MPI, "OMPI_COMM_WORLD_SIZE"), "PL300", ["Missing: OMPI_COMM_WORLD_SIZE"]),
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "PL303", ["MASTER_ADDR is not set"]),
    ],
)
def test_refused(env: dict[str, str], code: str, words: list[str]) -> None:
    with pytest.raises(PacelineError) as caught:
        read_environment(env)
    assert caught.value.code == code
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node0", "node0"),
        ("node[0-2,5]", "node0"),
        ("n[08-10],login", "n08"),
        ("rack[1-2]-n[0-1].lan", "rack1-n0.lan"),
        ("b-01,c", "b-01"),
    ],
)
def test_the_first_host_of_a_list(text: str, host: str) -> None:
    assert find_first_host(text) == host


@pytest.mark.parametrize("text", ["", "node[", "node]", "node[a-b]", "n[]", ",a"])
def test_a_list_without_a_first_host_is_refused(text: str) -> None:
    with pytest.raises(PacelineError) as caught:
        find_first_host(text)
    assert caught.value.code == "PL304"


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    check_interfaces({})
    check_interfaces({"GLOO_SOCKET_IFNAME": "lo"})
    with pytest.raises(PacelineError) as caught:
        check_interfaces({"GLOO_SOCKET_IFNAME": "lo,ib7"})
    assert caught.value.code == "PL347"
    assert "no interface ib7. It has lo" in str(caught.value)
