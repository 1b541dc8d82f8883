"""The records of collectives, sends and groups, whatever code issues them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from paceline.torch_seams import flight
from paceline.torch_seams.flight import FlightEntry, Status
from paceline.watch.protocol.report import Call, Group
from paceline.watch.protocol.words import own_frames
from paceline.watch.rank import entries, recorder
from paceline.watch.rank.entries import Groups
from paceline.watch.rank.operations import Operations, Windows, name_reduce_op
from paceline.watch.rank.recorder import CollectiveRecorder
from paceline.world import World

Told = tuple[dict[str, Group], list[Call]]


def record(issue):
    """Make a function for ranks of one that issues calls: it gives the groups and these calls."""

    @functools.wraps(issue)
    def run(world: World, *args) -> Told:
        operations = Operations()
        operations.install(torch)
        began_s = time.time()
        try:
            issue(world, *args)
            ends_s = time.monotonic() + 1.0
            while True:  # gloo's threads note the end after they have woken the waiting one
                time.sleep(0.05)
                groups, calls = CollectiveRecorder(operations).read_calls()
                calls = [call for call in calls if call.began_s >= began_s]
                if all(call.done for call in calls) or time.monotonic() > ends_s:
                    return groups, calls
        finally:
            operations.remove()

    return run


def tell(calls: list[Call], *fields: str) -> list[tuple]:
    return [tuple(getattr(call, field) for field in fields) for call in calls]


def destroy_a_group(world: World) -> tuple[set[str], Told]:
    operations = Operations()
    operations.install(torch)
    told = CollectiveRecorder(operations)
    try:
        group = dist.new_group([1, 0], group_desc="pair")
        dist.broadcast(torch.ones(3), 1, group=group)
        name = group.group_name
        dist.destroy_process_group(group)
        living, _ = told.read_calls()
        groups, calls = told.read_calls(is_full=True, has_destroyed=True)
        return set(living) & {name}, ({name: groups[name]}, [c for c in calls if c.group == name])
    finally:
        operations.remove()


def test_destroyed_groups_are_kept_for_the_end(ranks):
    for living, (groups, calls) in ranks.run(destroy_a_group):
        assert not living
        assert [(group.label, set(group.ranks)) for group in groups.values()] == [("pair", {0, 1})]
        assert tell(calls, "operation", "peer") == [("broadcast", 1)]


# ---- names, numbers and reduce operations


@record
def issue_all_kinds(world):
    one, both = torch.ones(4), [torch.ones(4), torch.ones(4)]
    dist.all_reduce(one, op=dist.ReduceOp.MIN)
    dist.reduce(one, 0, op=dist.ReduceOp.PRODUCT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # has another name in torch 2.13
        dist.reduce_scatter_tensor(one, torch.ones(8), op=dist.ReduceOp.MAX)
    dist.broadcast(one, 0)
    dist.all_gather(both, one)
    dist.gather(one, both if world.rank == 0 else None, 0)
    dist.scatter(one, both if world.rank == 0 else None, 0)
    dist.all_to_all_single(torch.ones(4), one)
    dist.barrier()
    dist.all_reduce(torch.ones(2, dtype=torch.bfloat16))
    dist.all_reduce(torch.ones(2, dtype=torch.int64))


def test_names_and_reduce_operations(ranks):
    told = ranks.run(issue_all_kinds)
    for _, calls in told:
        assert tell(calls, "operation", "reduce_op") == [
            ("all_reduce", "min"),
            ("reduce", "product"),
            ("reduce_scatter", "max"),
            ("broadcast", None),
            ("all_gather", None),
            ("gather", None),
            ("scatter", None),
            ("all_to_all", None),
            ("barrier", None),
            ("all_reduce", "sum"),
            ("all_reduce", "sum"),
        ]
        numbers = [call.number for call in calls]
        assert numbers == list(range(numbers[0], numbers[0] + 11))
        assert [call.dtypes for call in calls[-2:]] == [("bfloat16",), ("int64",)]
        assert all(call.done for call in calls)
        assert all(own_frames(call.frames)[0].function == "issue_all_kinds" for call in calls)
        assert own_frames(calls[3].frames)[0].text == "dist.broadcast(one, 0)"
    assert tell(told[0][1], "number") == tell(told[1][1], "number")


@record
def issue_rooted(world):
    ends = dist.new_group([0, 2])
    one, both = torch.ones(4), [torch.ones(4), torch.ones(4)]
    dist.broadcast(one, 1)
    dist.reduce(one, dst=2, op=dist.ReduceOp.MAX)
    if world.rank != 1:
        dist.broadcast(one, src=2, group=ends)
        dist.broadcast(one, group=ends, group_src=0)
        dist.gather(one, both if world.rank == 2 else None, dst=2, group=ends)
        dist.scatter(one, both if world.rank == 2 else None, src=2, group=ends)
        ends.broadcast(one, root=1).wait()
        ends.reduce([one]).wait()


def test_roots_are_global_ranks(ranks):
    told = ranks.run(issue_rooted, nproc=3)
    for rank, (_, calls) in enumerate(told):
        peers = tell([call for call in calls if call.group != "0"], "operation", "peer", "reduce_op")
        assert tell(calls[:2], "operation", "peer", "reduce_op") == [
            ("broadcast", 1, None),
            ("reduce", 2, "max"),
        ]
        assert (
            peers == []
            if rank == 1
            else peers
            == [
                ("broadcast", 2, None),
                ("broadcast", 0, None),
                ("gather", 2, None),
                ("scatter", 2, None),
                ("broadcast", 2, None),
                ("reduce", 0, None),
            ]
        )


@record
def issue_coalesced(world):
    one, other = torch.ones(4), torch.ones(3)
    dist.reduce_scatter(one, [torch.ones(4), torch.ones(4)], op=dist.ReduceOp.MAX)
    with dist._coalescing_manager(async_ops=False):
        dist.all_reduce(one, op=dist.ReduceOp.MAX)
        dist.all_reduce(other, op=dist.ReduceOp.MAX)
    dist.broadcast(one, 0)


def test_coalesced_calls_are_one(ranks):
    told = ranks.run(issue_coalesced)
    for _, calls in told:
        # gloo makes one all-reduce per rank of a reduce-scatter into lists.
        assert tell(calls, "operation", "reduce_op", "sizes") == [
            ("reduce_scatter", "max", ((4,),)),
            ("reduce_scatter", "max", ((4,),)),
            ("all_reduce", "max", ((4,), (3,))),
            ("broadcast", None, ((4,),)),
        ]
    assert tell(told[0][1], "number") == tell(told[1][1], "number")


@record
def issue_between_transfers(world):
    one = torch.ones(4)
    dist.all_reduce(one)
    if world.rank == 0:
        dist.send(one, 1)
        dist.isend(one, 1).wait()
    else:
        dist.recv(one, 0)
        dist.recv(one)  # from any
    dist.monitored_barrier()
    dist.all_reduce(one)
    with pytest.raises((ValueError, RuntimeError)):
        dist.send(torch.ones(4, 4).t(), 1 - world.rank)
    swap = [
        dist.P2POp(dist.isend, one, 1 - world.rank),
        dist.P2POp(dist.irecv, torch.ones(4), 1 - world.rank),
    ]
    for work in dist.batch_isend_irecv(swap):
        work.wait()


def test_transfers_have_numbers_of_their_own(ranks):
    told = ranks.run(issue_between_transfers)
    first = told[0][1][0].number
    for rank, (_, calls) in enumerate(told):
        collective = [c for c in calls if c.operation == "all_reduce"]
        assert [call.number for call in collective] == [first, collective[1].number]
        (monitored,) = [c for c in calls if c.operation == "monitored_barrier"]
        assert collective[0].number < monitored.number < collective[1].number
        transfers = [c for c in calls if c.operation in ("send", "recv")]
        assert all(call.done and call.sizes == ((4,),) for call in transfers)
        expected = {
            0: [("send", 1, 1), ("send", 2, 1), ("send", 3, 1), ("recv", 1, 1)],
            1: [("recv", 1, 0), ("recv", 1, None), ("send", 1, 0), ("recv", 2, 0)],
        }
        assert tell(transfers, "operation", "number", "peer") == expected[rank]
        assert own_frames(transfers[0].frames)[0].text in ("dist.send(one, 1)", "dist.recv(one, 0)")
    assert told[0][1][3].number == told[1][1][3].number


@record
def issue_late(world):
    works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(6)]
    threads = [
        threading.Thread(target=dist.all_reduce, args=(torch.ones(2),), kwargs={"group": group, "op": op})
        for group, op in (
            (dist.new_group(group_desc="a"), dist.ReduceOp.MAX),
            (dist.new_group(group_desc="b"), dist.ReduceOp.MIN),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for work in works:
        work.wait()


def test_async_calls_and_threads(ranks):
    for groups, calls in ranks.run(issue_late):
        at_once = [call for call in calls if call.group == "0" and call.operation == "all_reduce"]
        assert all(call.done and call.reduce_op == "sum" for call in at_once[:6])
        named = {groups[call.group].label: call.reduce_op for call in calls if call.sizes == ((2,),)}
        assert named == {"a": "max", "b": "min"}


# ---- groups


@record
def issue_in_groups(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one = torch.ones(2)
    dist.all_reduce(one, group=mesh.get_group("dp"))
    dist.all_reduce(one, group=mesh.get_group("tp"))
    groups = [dist.new_group([0, 1, 3]), dist.new_group([2, 0], group_desc="edges")]
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.all_reduce(one, group=group)
    if world.rank == 0:
        dist.send(one, 2, group=groups[1])
    elif world.rank == 2:
        dist.recv(one, 0, group=groups[1])


def test_names_of_groups(ranks):
    told = ranks.run(issue_in_groups, nproc=4)
    groups, calls = told[0]
    labels = [(groups[call.group].label, groups[call.group].ranks) for call in calls]
    assert labels == [
        ("dp", (0, 2)),
        ("tp", (0, 1)),
        ("ranks 0, 1, 3", (0, 1, 3)),
        ("edges", (0, 2)),
        ("edges", (0, 2)),
    ]
    assert (calls[-1].operation, calls[-1].peer) == ("send", 2)
    assert [call.number for call in calls] == [1] * 5
    assert groups["0"].label == "world"
    shared = {call.group for call in calls} & {call.group for call in told[2][1]}
    assert {groups[name].label for name in shared} == {"dp", "edges"}
    # Members alone know a group.
    assert not any(group.label == "edges" for group in told[1][0].values())


def remake(rank: int, size: int, folder: str) -> list[Told]:
    told = []
    for attempt in range(2):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{attempt}", rank=rank, world_size=size)
        told.append(record(lambda _: dist.all_reduce(torch.ones(2)))(None))
        dist.barrier()
        dist.destroy_process_group()
    return told


def run_remake(folder: str) -> list[Told]:
    return remake(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), folder)


def test_a_name_that_is_used_again(ranks, tmp_path):
    for told in ranks.run(run_remake, args=(str(tmp_path),), world=False):
        for _, calls in told:
            assert tell(calls, "group", "number", "operation") == [("0", 1, "all_reduce")]


def run_remake_and_read(folder: str) -> list[int]:
    operations = Operations()
    operations.install(torch)
    watched = CollectiveRecorder(operations)
    counts = []

    def count(calls: Iterable[Call]) -> int:
        return sum(call.group == "0" for call in calls)

    try:
        for attempt in range(2):
            place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            method = f"file://{folder}/{attempt}"
            dist.init_process_group("gloo", init_method=method, rank=place[0], world_size=place[1])
            counts.append(count(watched.read_calls()[1]))
            for _ in range(3):
                dist.all_reduce(torch.ones(2))
            counts.append(count(watched.read_calls()[1]))
            dist.destroy_process_group()
    finally:
        operations.remove()
    return counts


def test_a_new_group_has_no_calls_of_one_before_it(ranks, tmp_path):
    assert ranks.run(run_remake_and_read, args=(str(tmp_path),), world=False) == [[0, 3, 0, 3]] * 2


# ---- whatever issues


@record
def issue_by_ddp(world):
    net = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    net(torch.ones(1, 3)).sum().backward()


def test_ddp_with_a_hook(ranks):
    for _, calls in ranks.run(issue_by_ddp):
        last = calls[-1]
        assert (last.operation, last.dtypes, last.reduce_op) == ("all_reduce", ("float16",), "sum")
        assert own_frames(last.frames)[0].text == "net(torch.ones(1, 3)).sum().backward()"


@record
def issue_by_fsdp(world):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net[0])
    fully_shard(net)
    net(torch.ones(1, 4)).sum().backward()
    spread = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    spread.redistribute(placements=[Replicate()]).to_local().sum()


def test_fsdp_and_dtensor(ranks):
    for _, calls in ranks.run(issue_by_fsdp):
        words = [(call.operation, call.reduce_op) for call in calls]
        assert ("all_gather", None) in words
        assert any(operation == "reduce_scatter" and op for operation, op in words)
        assert all(own_frames(call.frames) for call in calls)


@record
def issue_compiled(world):
    def step(x):
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        dist.all_reduce(y, op=dist.ReduceOp.MAX)
        return y + 1

    run = torch.compile(step, backend="aot_eager")
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 5.0))
    assert torch.equal(run(torch.ones(3)), step(torch.ones(3)))


def test_compiled_code(ranks):
    for _, calls in ranks.run(issue_compiled, timeout_s=60.0):
        assert [call.operation for call in calls] == ["all_reduce"] * 6


def keep_raising(world):
    operations = Operations()
    operations.install(torch)
    try:
        with pytest.raises(RuntimeError, match="invalid output tensor list"):
            dist.all_gather([torch.ones(2)], torch.ones(2))
        with pytest.raises(TypeError):
            dist.group.WORLD.allreduce()
        with pytest.raises(TypeError):
            dist.group.WORLD.send(3)
        assert operations.transfers() == []
        assert dist.ProcessGroup.allreduce.__doc__
    finally:
        operations.remove()
    dist.group.WORLD.allreduce([torch.ones(1)]).wait()  # torch's own again, and still bound
    return type(vars(dist.ProcessGroup)["allreduce"]).__name__


def test_errors_are_torchs_own(ranks):
    assert ranks.run(keep_raising) == ["instancemethod"] * 2


# ---- the buffer


def test_an_overflowing_buffer():
    text = """
    import os, time, torch, torch.distributed as dist
    from paceline.watch.rank.operations import Operations
    from paceline.watch.rank.recorder import CollectiveRecorder, choose_buffer_size
    operations = Operations()
    operations.install(torch)
    choose_buffer_size()  # after the import of torch: the buffer is made with the first group
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "1000"
    os.environ["TORCH_FR_BUFFER_SIZE"] = "150"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one, rare = torch.ones(2), dist.new_group([0])
    recorder = CollectiveRecorder(operations)
    dist.all_reduce(one, group=rare)
    recorder.read_progress()
    for _ in range(400):
        dist.all_reduce(one)
    for _ in range(4):  # while the ranks stand still the entries are read, if not at once
        time.sleep(0.5)
        progress = recorder.read_progress()
    print(progress.issued, progress.completed)
    groups, calls = recorder.read_calls()
    print(len(calls), calls[0].number, calls[-1].number, len(recorder.read_calls(is_full=True)[1]))
    dist.monitored_barrier()
    print(recorder.read_calls()[1][-1].number)
    """
    environ = {name: value for name, value in os.environ.items() if name != "TORCH_FR_BUFFER_SIZE"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    progress, counts, barrier = done.stdout.splitlines()
    assert progress == "{'0': 400, '1': 1} {'0': 400, '1': 1}"
    assert counts == "100 301 400 150"
    assert barrier == "401"


# ---- pure parts


def entry(operation: str, backend: str = "nccl", **changes) -> FlightEntry:
    raw = {
        "record_id": 3,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 7,
        "profiling_name": f"{backend}:{operation}",
        "time_created_ns": 5_000,
        "thread_id": "11",
        "input_sizes": [[2, 3]],
        "input_dtypes": ["BFloat16"],
        "state": "scheduled",
        "retired": False,
    }
    return flight._build_entry(1, raw | changes)


@pytest.mark.parametrize(
    ("recorded", "operation"),
    [
        ("_all_gather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_reduce_barrier", "barrier"),
        ("ALLGATHER_coalesced", "all_gather"),
        ("all_to_all", "all_to_all"),
    ],
)
def test_names_of_other_backends(recorded, operation):
    call = entries.build_call(entry(recorded), Groups({}, {}), Windows([]))
    assert (call.operation, call.dtypes, call.done) == (operation, ("bfloat16",), False)


def test_sizes_of_an_all_to_all_without_a_window():
    read = functools.partial(entries.build_call, groups=Groups({}, {}), windows=Windows([]))
    assert read(entry("all_to_all", output_sizes=[[1, 3]])).splits == ((6,), (3,))
    lists = {"input_sizes": [[2], [3]], "output_sizes": [[4], [5]]}
    assert read(entry("all_to_all", **lists)).splits == ((2, 3), (4, 5))
    assert read(entry("broadcast", output_sizes=[[1, 3]])).splits == ()


def test_a_call_that_completes_after_it_was_read_is_completed_when_it_is_pushed_out(monkeypatch):
    told = {}
    monkeypatch.setattr(recorder, "read_status", lambda: told["status"])
    monkeypatch.setattr(recorder, "read_entries", lambda **_: told["entries"])
    monkeypatch.setattr(recorder, "read_groups", lambda: Groups({}, {}))
    rare, often = {"pg_id": 1, "process_group": ("1", "")}, {"record_id": 9, "collective_seq_id": 2}
    reader = CollectiveRecorder(Operations())
    told["status"] = {(1, 1): Status(1, 0)}
    told["entries"] = [entry("all_reduce", collective_seq_id=1, **rare)]
    assert reader.read_progress().completed == {"1": 0}
    told["status"] = {(1, 1): Status(1, 1), (1, 0): Status(2, 2)}
    told["entries"] = [entry("all_reduce", retired=True, **often)]
    for _ in range(2):
        progress = reader.read_progress()
        assert (progress.issued, progress.completed) == ({"0": 2, "1": 1}, {"0": 2, "1": 1})


def test_nccl_completes_by_its_state():
    assert entry("broadcast", state="completed").is_done
    assert not entry("broadcast", state="started").is_done


def test_a_group_with_two_backends_has_two_sequences():
    groups = Groups({"0": Group("0", "world", (0, 1))}, {"0": "cpu:gloo,cuda:nccl"})
    assert groups.name_sequence(entry("broadcast", "gloo")) == "0"
    assert groups.name_sequence(entry("broadcast", "nccl")) == "0:nccl"
    alone = Groups(groups.by_name, {"0": "nccl"})
    assert alone.name_sequence(entry("broadcast", "nccl")) == "0"


def test_names_of_reduce_operations():
    assert name_reduce_op(dist.ReduceOp.SUM) == "sum"
    assert name_reduce_op(dist.ReduceOp(dist.ReduceOp.AVG)) == "avg"
    assert name_reduce_op(None) is None
