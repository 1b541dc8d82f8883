"""The reports of a rank while it waits, computes, forks and ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.watch.protocol import stacks
from paceline.watch.protocol.report import Call, Report
from paceline.watch.protocol.stacks import SIGNAL, read_main_stack
from paceline.watch.protocol.words import own_frames
from paceline.watch.rank.reporter import WatchedProcess
from paceline.world import World
from tests.watch.listener import Listener, ask_all

TIMEOUT_S = 25.0


@pytest.fixture
def listener(tmp_path):
    with Listener(tmp_path, 2) as listening:
        yield listening


def find_open(report: Report) -> list[Call]:
    return [call for call in report.calls if not call.done]


# ---- what a report says of a rank that waits


def take_part(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)  # WAITS HERE


def wait_in_all_reduce(world: World, socket: str, folder: str) -> None:
    watched = WatchedProcess(world.rank)
    watched.begin(socket, f"{folder}/stacks-{world.rank}")
    tensor = torch.ones(3, 2, dtype=torch.float64)
    dist.broadcast(tensor, 0)
    if world.rank == 1:
        while not Path(folder, "waits").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        ask_all(folder)
    else:
        Path(folder, "waits").touch()
    take_part(tensor)
    watched.end()


def test_report_of_a_rank_in_all_reduce(ranks, listener):
    ranks.run(wait_in_all_reduce, args=(listener.socket, listener.folder), timeout_s=TIMEOUT_S)
    waiting, other = listener.reports[0], listener.reports[1]
    (call,) = find_open(waiting)
    assert (call.operation, call.reduce_op, call.sizes, call.dtypes) == (
        "all_reduce",
        "max",
        ((3, 2),),
        ("float64",),
    )
    before = waiting.calls[-2]
    assert (before.operation, before.number, before.done) == ("broadcast", call.number - 1, True)
    assert "WAITS HERE" in own_frames(call.frames)[0].text
    assert own_frames(call.frames)[0].function == "take_part"
    assert abs(waiting.time_s - call.began_s) < TIMEOUT_S
    # Its main thread is stuck in C++, and the thread beside it has answered.
    assert waiting.stacks[0].thread == "MainThread"
    assert "WAITS HERE" in own_frames(waiting.stacks[0].frames)[0].text
    assert waiting.groups[call.group].label == "world"
    assert waiting.groups[call.group].ranks == (0, 1)
    assert waiting.phase == "running"
    assert find_open(other) == []
    assert any(frame.function == "ask_all" for frame in other.stacks[0].frames)


def wait_in_backward(world: World, socket: str, folder: str) -> None:
    watched = WatchedProcess(world.rank)
    watched.begin(socket, f"{folder}/stacks-{world.rank}")
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    loss = net(torch.ones(2, 4)).sum()
    if world.rank == 1:
        while not Path(folder, "waits").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        ask_all(folder)
    else:
        Path(folder, "waits").touch()
    loss.backward()
    watched.end()


def test_report_of_a_rank_in_backward(ranks, listener):
    ranks.run(wait_in_backward, args=(listener.socket, listener.folder), timeout_s=TIMEOUT_S)
    (call,) = find_open(listener.reports[0])
    assert (call.operation, call.sizes, call.dtypes) == ("all_reduce", ((15,),), ("float32",))
    assert own_frames(call.frames)[0].text == "loss.backward()"
    assert find_open(listener.reports[1]) == []


def wait_in_receive(world: World, socket: str, folder: str) -> None:
    watched = WatchedProcess(world.rank)
    watched.begin(socket, f"{folder}/stacks-{world.rank}")
    for _ in range(2):
        if world.rank == 0:
            dist.send(torch.ones(5), 1)
        else:
            dist.recv(torch.ones(5), 0)
    if world.rank == 1:
        while not Path(folder, "waits").exists():
            time.sleep(0.01)
        time.sleep(1.2)  # for a beat meanwhile
        ask_all(folder)
        dist.send(torch.ones(2, dtype=torch.int32), 0)
    else:
        Path(folder, "waits").touch()
        dist.recv(torch.ones(2, dtype=torch.int32), 1)  # RECEIVES
        time.sleep(0.5)  # gloo's thread notes the end of a transfer after it has woken the receiver
    watched.end()


def test_report_of_a_rank_in_a_receive(ranks, listener):
    ranks.run(wait_in_receive, args=(listener.socket, listener.folder), timeout_s=TIMEOUT_S)
    (call,) = find_open(listener.reports[0])
    last = listener.beats[0][-1]
    told = [(beat.issued["0:transfers"], beat.completed["0:transfers"]) for beat in listener.beats[0][1:]]
    assert (3, 2) in told
    assert (last.issued["0:transfers"], last.completed["0:transfers"]) == (3, 3)
    assert (call.operation, call.number, call.peer) == ("recv", 1, 1)
    assert (call.sizes, call.dtypes) == (((2,),), ("int32",))
    assert "RECEIVES" in own_frames(call.frames)[0].text
    sent = [call for call in listener.reports[0].calls if call.operation == "send"]
    assert [(call.number, call.peer, call.done) for call in sent] == [(1, 1, True), (2, 1, True)]
    received = [call for call in listener.reports[1].calls if call.operation == "recv"]
    assert [(call.number, call.peer, call.done) for call in received] == [(1, 0, True), (2, 0, True)]


# ---- processes of their own: starts, forks, signals, ends

SCRIPT_HEAD = """
import ctypes, os, sys, threading, time
from paceline.watch.rank.reporter import begin
watched = begin(0, sys.argv[1], sys.argv[2])
assert "torch" not in sys.modules
"""


def start(listener: Listener, text: str) -> subprocess.Popen[str]:
    path = Path(listener.folder, "script.py")
    path.write_text(SCRIPT_HEAD + textwrap.dedent(text))
    stacks = str(Path(listener.folder, "stacks"))
    return subprocess.Popen(
        [sys.executable, str(path), listener.socket, stacks],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_script_without_torch(listener):
    process = start(
        listener,
        """
        def wait_here():
            time.sleep(30)  # ASLEEP
        print(threading.active_count(), flush=True)
        wait_here()
        """,
    )
    try:
        listener.wait_for_beats(0, 2)
        beats = listener.wait_for_beats(0, 3)
        assert beats[2].place == beats[1].place
        assert beats[2].phase == "running"
        listener.ask()
        report = listener.wait_for_report(0)
        assert (report.groups, report.calls) == ({}, ())
        assert "ASLEEP" in own_frames(report.stacks[0].frames)[0].text
        names = [Path(path, "comm").read_text() for path in Path(f"/proc/{process.pid}/task").iterdir()]
        assert "paceline-watch\n" in names
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
    finally:
        process.kill()
        process.communicate()


def test_beats_count_collectives(listener):
    process = start(
        listener,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(25):
            dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
            time.sleep(0.1)
        time.sleep(3.0)  # for a beat after the last call
        """,
    )
    process.communicate(timeout=60)
    beats = [beat for beat in listener.beats[0] if beat.issued]
    assert len(beats) >= 3
    phases = [beat.phase for beat in beats]
    assert phases == sorted(phases, key=["running", "leaving"].index)  # of the latter none, one or two
    assert phases.count("running") >= 3
    issued = [beat.issued["0"] for beat in beats]
    assert issued == sorted(issued)
    assert issued[-1] - issued[0] >= 10
    assert (beats[-1].issued, beats[-1].completed) == ({"0": 25}, {"0": 25})


def test_stacks_while_python_is_locked(listener):
    process = start(
        listener,
        """
        def hold():
            # A mutex that is locked already; a signal doesn't wake who waits for it.
            library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)  # HOLDS PYTHON
        def other():
            time.sleep(60)
        threading.Thread(target=other, daemon=True).start()
        print("ready", flush=True)
        hold()
        """,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(1.5)
        assert len(listener.beats[0]) == 1  # the one from the start
        frames = read_main_stack(process.pid, Path(listener.folder, "stacks"))
        assert [frame.function for frame in frames] == ["hold", "<module>"]
        lines = Path(listener.folder, "script.py").read_text().splitlines()
        assert "HOLDS PYTHON" in lines[frames[0].line - 1]
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_a_stack_written_with_pauses_is_read_whole(tmp_path, monkeypatch):
    # A handler that has no core for a while, as on a full machine.
    path = tmp_path / "stacks"
    path.write_text("")
    lines = [
        "Thread 0x01 (most recent call first):",
        '  File "t.py", line 1 in run',
        "",
        "Thread 0x02 (most recent call first):",
    ]
    lines += ['  File "a.py", line 7 in wait', '  File "a.py", line 9 in <module>']

    def write():
        for line in lines:
            with path.open("a") as file:
                file.write(line + "\n")
            time.sleep(0.15)

    monkeypatch.setattr(stacks, "find_watching_thread", lambda pid: Path("1"))
    monkeypatch.setattr(stacks, "_catches", lambda pid: True)
    monkeypatch.setattr(os, "kill", lambda thread, signal: threading.Thread(target=write).start())
    assert [(frame.line, frame.function) for frame in read_main_stack(1, path)] == [
        (7, "wait"),
        (9, "<module>"),
    ]


def test_reading_a_stack_ends_no_call_that_sleeps(listener):
    process = start(
        listener,
        """
        library = ctypes.PyDLL(None)
        time.sleep(0.5)  # the watching thread begins
        print("ready", flush=True)
        print("left", library.sleep(5), flush=True)  # the seconds that are left if a signal ends it
        """,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(1.5)
        frames = read_main_stack(process.pid, Path(listener.folder, "stacks"))
        assert [frame.function for frame in frames] == ["<module>"]
        assert process.stdout.readline() == "left 0\n"
    finally:
        process.kill()
        process.communicate()


def test_no_signal_to_a_process_that_does_not_catch_it(tmp_path):
    (tmp_path / "stacks").touch()
    process = subprocess.Popen(["sleep", "30"])
    try:
        assert read_main_stack(process.pid, tmp_path / "stacks") == ()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_fork_answers_the_signal_and_has_not_the_socket(listener):
    process = start(
        listener,
        f"""
        import socket, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of forks with threads
        time.sleep(0.2)
        pid = os.fork()
        if pid == 0:
            caught = open("/proc/self/status").read().split("SigCgt:")[1].split()[0]
            paths = [f"/proc/self/fd/{{fd}}" for fd in os.listdir("/proc/self/fd")]
            names = [os.readlink(path) for path in paths if os.path.islink(path)]
            print(any(name.startswith("socket:") for name in names), any("stacks" in name for name in names),
                  int(caught, 16) >> ({int(SIGNAL)} - 1) & 1, flush=True)
            began_s = time.monotonic()
            if os.fork() == 0:  # a fork of the fork finds nothing that it would have to wait for
                os._exit(0)
            os.wait()
            print(time.monotonic() - began_s < 1.0, flush=True)
            sys.exit()
        os.waitpid(pid, 0)
        time.sleep(4)
        """,
    )
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert output == "False True 1\nTrue\n"
    assert len(listener.beats[0]) >= 3  # the parent's went on
    assert {beat.rank for beat in listener.beats[0]} == {0}


def test_the_end_is_not_delayed(listener):
    took_s = []
    for _ in range(3):  # on a busy machine any one may take long
        process = start(listener, "time.sleep(0.2); print(time.time(), flush=True)")
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
        took_s.append(time.time() - float(output))
    assert min(took_s) < 0.4
    listener.wait_for_hang_up(0)
    assert listener.beats[0][-1].phase == "leaving"


def test_a_launcher_that_does_not_read_delays_no_end(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.bind(str(tmp_path / "s"))
        deaf.listen()
        text = SCRIPT_HEAD + textwrap.dedent(
            """
            watched._socket.setblocking(False)
            try:
                while True:
                    watched._socket.send(bytes(1000))
            except BlockingIOError:
                watched._socket.setblocking(True)
            time.sleep(1.2)  # by now the thread waits to send its beat
            print(time.time(), flush=True)
            """
        )
        words = [sys.executable, "-c", text, str(tmp_path / "s"), str(tmp_path / "stacks")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert time.time() - float(done.stdout) < 2.0


def test_leaving_while_other_threads_go_on(listener):
    process = start(
        listener,
        """
        threading.Thread(target=time.sleep, args=(2.5,)).start()
        """,
    )
    process.communicate(timeout=TIMEOUT_S)
    phases = [beat.phase for beat in listener.beats[0]]
    assert phases.count("leaving") >= 3  # two seconds, and the last


def test_a_lost_launcher_is_no_matter(tmp_path):
    with Listener(tmp_path, 1) as listening:
        process = start(
            listening,
            """
            time.sleep(2.5)
            print("done", flush=True)
            """,
        )
        listening.wait_for_beats(0, 1)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (output, process.returncode) == ("done\n", 0)


def test_no_launcher_at_all(tmp_path):
    text = SCRIPT_HEAD + "import torch.distributed as dist; print(type(dist.ProcessGroup.allreduce).__name__)"
    words = [sys.executable, "-c", text, str(tmp_path / "none"), str(tmp_path / "stacks")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    kind = type(dist.ProcessGroup.allreduce).__name__  # differs between versions of torch
    assert kind != "function"
    assert (done.stdout, done.stderr) == (f"{kind}\n", ""), "torch is as it was"


def test_a_descriptor_that_is_anothers_is_not_written_to(listener):
    process = start(
        listener,
        """
        time.sleep(0.3)
        os.closerange(3, 100)
        file = [open(f"{sys.argv[2]}-{n}", "w") for n in range(20)]
        time.sleep(2.5)
        """,
    )
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert {path.stat().st_size for path in Path(listener.folder).glob("stacks-*")} == {0}


# ---- with packages that were imported ahead

WARM = """
import os, sys, types
from paceline.launching.warm.warm import Warmth
from paceline.watch.rank.reporter import begin

warmth = Warmth()
warmth.load(("torch", "torch.distributed"))
for order in (("begin", "hide"), ("hide", "begin")):
    pid = os.fork()
    if pid == 0:
        for word in order:
            if word == "begin":
                begin(0, sys.argv[1], sys.argv[2])
            else:
                warmth.hide(lambda names: os._exit(9))
        assert "torch" not in sys.modules
        import torch
        import torch.distributed as dist

        assert "exec_module" not in vars(torch.__spec__.loader)
        kind = type(dist.ProcessGroup.allreduce).__name__
        print(order, kind, os.environ["TORCH_FR_BUFFER_SIZE"], flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_warm_ranks(listener):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    words = [sys.executable, "-c", WARM, listener.socket, f"{listener.folder}/stacks"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert done.stdout.splitlines() == [
        "('begin', 'hide') function 1000",
        "('hide', 'begin') function 1000",
    ], done.stderr


def test_the_users_own_buffer_size_stays(listener):
    text = SCRIPT_HEAD + "import torch; print(os.environ.get('TORCH_FR_BUFFER_SIZE'))"
    words = [sys.executable, "-c", text, listener.socket, f"{listener.folder}/stacks"]
    environ = {**os.environ, "TORCH_NCCL_TRACE_BUFFER_SIZE": "77"}
    environ.pop("TORCH_FR_BUFFER_SIZE", None)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert (done.stdout, done.returncode) == ("None\n", 0), done.stderr


def test_parameters_without_a_gradient_are_named(listener):
    process = start(
        listener,
        """
        import torch
        from paceline.watch.rank import reporter
        names = [f"layers.{n}.weight" for n in range(12)]
        reporter.list_reduced_names = lambda: [names, names[:2]]
        error = RuntimeError("Parameter indices which did not receive grad for rank 1: 2 7")
        reporter._name_unused(error)
        print(*error.__notes__)
        """,
    )
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert output == "Parameters without a gradient: 2 is layers.2.weight and 7 is layers.7.weight.\n"
