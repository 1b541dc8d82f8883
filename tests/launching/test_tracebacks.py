"""Tracebacks as text: real ones, as Python, torch and faulthandler write them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from paceline.launching.ending.tracebacks import find_error_line, find_last, find_own_frame, fold

HERE = Path(__file__).name


def format_error(fn: Callable[[], object]) -> str:
    try:
        fn()
    except BaseException as error:
        # As in a log: without the frame of this function.
        trace = error.__traceback__
        assert trace is not None
        return "".join(traceback.format_exception(type(error), error, trace.tb_next))
    raise AssertionError("it does not raise")


def run_python(text: str, folder: Path, *flags: str) -> str:
    """Return the stderr of a script that fails."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    command = [sys.executable, *flags, str(path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    return done.stderr


def surround(trace: str) -> str:
    """Return a log with other output before and after."""
    return f'step 1\nwarn: File "x"\n  indented\n{trace.rstrip()}\nbye\n  Traceback: none\nstep 2\n'


def fail(word: str = "boo") -> None:
    raise ValueError(word)


def fail_through_libraries() -> None:
    textwrap.re.sub("a", lambda match: fail(), "a")  # type: ignore[attr-defined]


class Boom(Exception):  # noqa: N818 (its name must not end in Error)
    pass


def chain_directly() -> None:
    try:
        fail("first")
    except ValueError as error:
        raise KeyError("second") from error


def chain_by_handling() -> None:
    try:
        chain_directly()
    except KeyError:
        raise RuntimeError("third")  # noqa: B904


def chain_to_an_odd_name() -> None:
    try:
        fail("first")
    except ValueError as error:
        raise Boom("the last one") from error


# ---- plain and chained


def test_a_plain_error() -> None:
    trace = format_error(fail)
    frame = find_own_frame(trace)
    assert frame is not None
    assert Path(frame.path).name == HERE
    assert (frame.name, frame.line) == ("fail", fail.__code__.co_firstlineno + 1)
    assert frame.where.endswith(f"{HERE}:{frame.line} in fail")
    assert find_error_line(trace) == "ValueError: boo"
    assert find_last(surround(trace)) == trace.rstrip()
    assert fold(trace) == trace.rstrip()


def test_frames_of_libraries_are_folded() -> None:
    import json

    class Odd(dict):  # type: ignore[type-arg]
        def items(self) -> None:  # type: ignore[override]
            fail()

    trace = format_error(lambda: json.dumps([[[Odd(a=1)]]], indent=1))
    folded = fold(trace)
    # Python 3.13 shows fewer frames of its encoder.
    assert trace.count("json") > (6 if sys.version_info < (3, 13) else 3)
    assert folded.count("frames of libraries: json/__init__.py:") == 1
    assert "json/encoder.py" in folded
    assert len(folded.splitlines()) < len(trace.splitlines())
    own = [line for line in trace.splitlines() if HERE in line]
    assert [line for line in folded.splitlines() if HERE in line] == own, "no frame of one's own goes"
    assert folded.splitlines()[-1] == "ValueError: boo"
    frame = find_own_frame(trace)
    assert frame is not None
    assert frame.name == "fail"


def test_a_few_frames_of_libraries_stay() -> None:
    trace = format_error(fail_through_libraries)
    assert "re/__init__.py" in trace
    assert fold(trace) == trace.rstrip()


def test_the_innermost_frame_of_ones_own_before_libraries() -> None:
    import json

    trace = format_error(lambda: json.loads("{"))
    frame = find_own_frame(trace)
    assert frame is not None
    assert frame.name == "<lambda>"
    assert find_error_line(trace).startswith("json.decoder.JSONDecodeError: Expecting property name")


@pytest.mark.parametrize(
    ("fn", "words", "last"),
    [
        (chain_directly, ["first", "direct cause", "second"], "KeyError: 'second'"),
        (
            chain_by_handling,
            ["first", "direct cause", "second", "During handling", "third"],
            "RuntimeError: third",
        ),
        (chain_to_an_odd_name, ["first", "direct cause", "the last one"], f"{__name__}.Boom: the last one"),
    ],
)
def test_chained_errors(fn: Callable[[], None], words: list[str], last: str) -> None:
    trace = format_error(fn)
    found = find_last(surround(trace))
    assert found == trace.rstrip()
    places = [found.index(word) for word in words]
    assert places == sorted(places)
    assert find_error_line(trace) == last
    frame = find_own_frame(trace)
    assert frame is not None
    assert frame.name == fn.__name__


def test_of_several_attempts_it_is_the_last() -> None:
    log = surround(format_error(chain_by_handling)) * 2 + surround(format_error(fail))
    assert find_last(log) == format_error(fail).rstrip()
    log = surround(format_error(fail)) * 2 + surround(format_error(chain_directly))
    assert find_last(log) == format_error(chain_directly).rstrip()


def test_a_log_without_one() -> None:
    for log in ("", "\n", "step 1\nstep 2\n", "Traceback of things\n"):
        assert find_last(log) == ""
    assert find_own_frame("") is None
    assert find_error_line("") == ""
    assert fold("") == ""


def test_a_log_that_is_cut_short() -> None:
    whole = surround(format_error(chain_directly))
    for end in range(0, len(whole), 7):
        find_last(whole[:end])
        find_last(whole[end:])
        fold(whole[:end])


# ---- messages


def test_a_message_of_several_lines() -> None:
    trace = format_error(lambda: fail("two\n  lines\n\tand more"))
    assert find_last(surround(trace)) == trace.rstrip()
    assert find_error_line(trace) == "ValueError: two"
    assert fold(trace) == trace.rstrip()


def test_a_message_without_words() -> None:
    trace = format_error(lambda: fail(""))
    assert find_error_line(trace) == "ValueError"
    assert find_error_line("no more road") == "no more road"


def test_names_of_errors_with_dots() -> None:
    error = subprocess.CalledProcessError(3, "x")
    trace = "".join(traceback.format_exception(error))
    assert find_error_line(trace).startswith("subprocess.CalledProcessError: Command 'x'")

    def expire() -> None:
        raise subprocess.TimeoutExpired("x", 3)

    trace = format_error(expire)
    assert find_error_line(trace) == "subprocess.TimeoutExpired: Command 'x' timed out after 3 seconds"


def test_an_error_named_in_a_message_is_not_the_error() -> None:
    text = "no luck. It was:\nKeyErrors happen\nfoo.ErrorLog says more"
    assert find_error_line(format_error(lambda: fail(text))) == "ValueError: no luck. It was:"


def test_deep_recursion() -> None:
    def dig(n: int) -> int:
        return dig(n + 1) + 1

    trace = format_error(lambda: dig(0))
    assert "[Previous line repeated" in fold(trace)
    assert find_error_line(trace).startswith("RecursionError: maximum recursion depth exceeded")
    assert find_last(surround(trace)) == trace.rstrip()


# ---- loader workers, torch's prefix


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ValueError(f"no sample {index}")


@pytest.fixture(scope="module")
def worker_error() -> str:
    loader = DataLoader(Broken(), num_workers=1, multiprocessing_context="fork")
    return format_error(lambda: next(iter(loader)))


def test_an_error_in_a_loader_worker_is_where_the_dataset_raised(worker_error: str) -> None:
    frame = find_own_frame(worker_error)
    assert frame is not None
    assert frame.name == "__getitem__"
    assert find_error_line(worker_error) == "ValueError: no sample 0"
    folded = fold(worker_error)
    assert "frames of libraries: torch/utils/data/" in folded
    assert "Original Traceback" in folded


def test_it_is_found_whole_in_a_log(worker_error: str) -> None:
    found = find_last(f"step 1\n{worker_error}")
    assert found == worker_error.rstrip()


PREFIXED = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def load():
    try:
        {}["a"]
    except KeyError as error:
        raise ValueError("boo") from error
print("[rank0]:[W1121 a warning of torch's", file=sys.stderr)
load()
"""


def test_torchs_prefix_is_taken_away(tmp_path: Path) -> None:
    err = run_python(PREFIXED, tmp_path)
    assert '[rank0]:   File "' in err, "torch writes it no more"
    trace = find_last(surround(err))
    assert "[rank" not in trace
    assert trace.startswith("Traceback (most recent call last):")
    assert trace.endswith("\nValueError: boo")
    assert "direct cause" in trace
    assert "KeyError: 'a'" in trace
    frame = find_own_frame(trace)
    assert frame is not None
    assert (Path(frame.path).name, frame.line, frame.name) == ("train.py", 8, "load")
    assert find_error_line(trace) == "ValueError: boo"


# ---- crashes, syntax errors, groups


CRASH = "import ctypes\ndef read():\n    return ctypes.string_at(0)\ndef train():\n    read()\ntrain()\n"


def test_a_crash_in_compiled_code(tmp_path: Path) -> None:
    trace = find_last(surround(run_python(CRASH, tmp_path, "-X", "faulthandler")))
    assert trace.startswith("Fatal Python error: Segmentation fault\n\nCurrent thread 0x")
    assert trace.endswith("line 6 in <module>")
    frame = find_own_frame(trace)
    assert frame is not None
    assert (Path(frame.path).name, frame.line, frame.name) == ("train.py", 3, "read")
    assert find_error_line(trace) == "Fatal Python error: Segmentation fault"
    assert "in string_at" in fold(trace)


def test_a_crash_in_code_of_the_command_line() -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", "import ctypes; ctypes.string_at(0)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    trace = find_last(done.stderr)
    assert "in string_at" in trace
    assert find_own_frame(trace) is None
    assert find_error_line(trace) == "Fatal Python error: Segmentation fault"


def test_the_later_one_counts(tmp_path: Path) -> None:
    crash = run_python(CRASH, tmp_path, "-X", "faulthandler")
    error = format_error(fail)
    assert find_last(surround(error) + surround(crash)).startswith("Fatal Python error")
    assert find_last(surround(crash) + surround(error)) == error.rstrip()


def test_a_syntax_error_of_the_script(tmp_path: Path) -> None:
    """Python writes no `Traceback` above it."""
    err = run_python("def f():\n    x = = 2\n", tmp_path)
    trace = find_last(surround(err))
    assert trace == err.rstrip()
    assert find_error_line(trace) == "SyntaxError: invalid syntax"
    frame = find_own_frame(trace)
    assert frame is not None
    assert (Path(frame.path).name, frame.line) == ("train.py", 2)


def test_a_syntax_error_of_an_imported_module(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("x = = 2\n")
    trace = find_last(surround(run_python("import nets\n", tmp_path)))
    assert find_error_line(trace) == "SyntaxError: invalid syntax"
    frame = find_own_frame(trace)
    assert frame is not None
    assert Path(frame.path).name == "nets.py"


def test_a_group_of_errors() -> None:
    def gather() -> None:
        raise ExceptionGroup("both", [ValueError("one"), KeyError("two")])

    trace = format_error(gather)
    assert find_last(surround(trace)) == trace.rstrip()
    assert find_error_line(trace) == "ExceptionGroup: both (2 sub-exceptions)"
    frame = find_own_frame(trace)
    assert frame is not None
    assert frame.name == "gather"
