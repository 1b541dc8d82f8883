"""The report of a process before it ends: by an exception, `os._exit` or C++; in forks; without a reader."""

from __future__ import annotations

import signal
import socket
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from paceline.launching.ending.endings import Ending, describe_ending
from paceline.watch.protocol.words import own_frames
from tests.watch.listener import Listener
from tests.watch.test_rank import TIMEOUT_S, start

pytestmark = pytest.mark.timeout(60)
TERMINATE = "ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev"
"""A thread of C++ that nobody catches an exception of ends in this function."""


@pytest.fixture
def listener(tmp_path):
    with Listener(tmp_path, 1) as listening:
        yield listening


def run(listener: Listener | SimpleNamespace, text: str) -> tuple[int, str]:
    """Run a script, with the rank's watch begun; its exit code and output."""
    process = start(listener, text)
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, output


def show(ending: Ending) -> tuple[str, str, int, bool]:
    return ending.kind, ending.words, ending.code, ending.follower


def get_last(listener: Listener) -> tuple[str, str, int, bool]:
    last = listener.wait_for_report(0).last
    assert last is not None
    assert (last.rank, last.trace, last.pickled) == (0, "", "")
    return show(last)


# ---- the words


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (ValueError("no\nsuch thing"), ("error", "failed with ValueError: no", 1, False)),
        (KeyError(), ("error", "failed with KeyError", 1, False)),
        (SystemExit(), ("exit", "called sys.exit()", 0, False)),
        (SystemExit(0), ("exit", "called sys.exit(0)", 0, False)),
        (SystemExit(-1), ("exit", "called sys.exit(-1)", 255, False)),
        (SystemExit("no data"), ("exit", "called sys.exit('no data')", 1, False)),
        (
            RuntimeError("[pair.cc:553] Connection closed by peer [::1]:5"),
            ("error", "failed with RuntimeError: [pair.cc:553] Connection closed by peer [::1]:5", 1, True),
        ),
    ],
)
def test_what_ends_a_script_in_words(error, last):
    assert show(describe_ending(0, error)) == last


def test_an_error_raised_from_a_lost_peer_has_lost_it():
    error = OSError("training failed")
    error.__context__ = RuntimeError("Socket closed")
    assert describe_ending(0, error).follower
    error.__suppress_context__ = True  # raise ... from None
    assert not describe_ending(0, error).follower
    error.__cause__ = RuntimeError("Connection reset by peer")
    assert describe_ending(0, error).follower


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "Connection refused"),  # a download
        BrokenPipeError(32, "Broken pipe"),  # a subprocess that has ended
        ConnectionResetError(104, "Connection reset by peer"),  # a worker of the script's own
        TimeoutError("timed out waiting for the lock file"),
    ],
)
def test_a_scripts_own_connections_and_locks_are_no_peers(error):
    assert not describe_ending(0, error).follower
    caught = f"Caught {type(error).__name__} in DataLoader worker process 0.\nOriginal Traceback\n{error}"
    assert not describe_ending(0, RuntimeError(caught)).follower
    for torchs in (dist.DistNetworkError, dist.DistStoreError):
        assert describe_ending(0, torchs(str(error))).follower


def test_an_error_that_can_not_be_reported_is_reported_by_name():
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert show(describe_ending(0, BrokenError())) == ("error", "failed with BrokenError", 1, False)


# ---- the processes


def test_an_error_is_reported_with_the_line_that_raised_it(listener):
    code, _ = run(
        listener,
        """
        def load():
            raise ValueError("no rows")  # RAISES
        try:
            load()
        except ValueError as error:
            watched.note_error(error)
            watched.note_error(KeyError("later"))
        """,
    )
    assert code == 0
    assert get_last(listener) == ("error", "failed with ValueError: no rows", 1, False)
    (stack,) = listener.reports[0].stacks
    assert "RAISES" in stack.frames[0].text
    assert stack.frames[0].function == "load"


def test_os_exit_is_reported_with_its_line(listener):
    code, _ = run(
        listener,
        """
        def leave():
            os._exit(7)  # LEAVES
        leave()
        """,
    )
    assert code == 7
    assert get_last(listener) == ("exit", "called os._exit(7)", 7, False)
    assert "LEAVES" in own_frames(listener.reports[0].stacks[0].frames)[0].text


@pytest.mark.parametrize("holds_lock", [False, True])
def test_std_terminate_is_reported_and_ends_the_process_as_before(listener, holds_lock):
    kind = "PyDLL" if holds_lock else "CDLL"
    code, output = run(
        listener,
        f"""
        import torch
        def wait_here():
            threading.Event().wait(60)  # WAITS
        def end():
            time.sleep(0.3)
            {TERMINATE.replace("CDLL", kind)}()
        threading.Thread(target=end, daemon=True).start()
        wait_here()
        """,
    )
    assert code == -signal.SIGABRT
    assert "terminate called without an active exception" in output
    assert get_last(listener) == ("abort", "called std::terminate", -signal.SIGABRT, False)
    assert "WAITS" in own_frames(listener.reports[0].stacks[0].frames)[0].text


def test_forks_state_nothing_and_have_what_was_there_before(listener):
    code, output = run(
        listener,
        f"""
        import torch, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of forks with threads
        print(os._exit.__module__, flush=True)
        for end in (lambda: os._exit(3), lambda: {TERMINATE}()):
            if os.fork() == 0:
                print(os._exit.__module__, flush=True)
                end()
            print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        watched.end()
        print(os._exit.__module__, flush=True)
        {TERMINATE}()
        """,
    )
    assert code == -signal.SIGABRT
    lines = [line for line in output.splitlines() if "terminate called" not in line]
    assert lines == ["paceline.watch.rank.exits", "posix", "3", "posix", "-6", "posix"]
    assert listener.reports == {}


def test_a_launcher_that_does_not_read_does_not_keep_the_process(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        code, _ = run(
            SimpleNamespace(folder=str(tmp_path), socket=str(tmp_path / "s")),
            """
            watched._rank = "r" * 10_000_000  # more than the socket takes
            os._exit(4)
            """,
        )
    assert code == 4
