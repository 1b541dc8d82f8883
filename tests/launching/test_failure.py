"""The records of how ranks ended."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.watching import with_places
from paceline.errors import PacelineError
from paceline.launching.ending.endings import (
    Ending,
    describe_ending,
    may_follow,
    read_endings,
    write_ending,
)
from paceline.watch.protocol.report import Report
from paceline.watch.protocol.wire import Unpacker, pack

GLOO = (
    "step 3\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble."
    "length <= op.nbytes. 216 vs 4. Received data size doesn't match expected size. Is there a distributed "
    "collective mismatch in your code?\nFatal Python error: Aborted\n"
)
LOST = (
    "RuntimeError: [/__w/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:22. "
    "This is typically caused by a remote worker crashing."
)


@pytest.mark.parametrize(
    ("ending", "is_one"),
    [
        (Ending(0, "error", 1, 0.0, follower=True), True),
        (Ending(0, "error", -signal.SIGABRT, 0.0), True),
        (Ending(0, "error", -signal.SIGKILL, 0.0), False),
        (Ending(0, "error", 1, 0.0), False),
    ],
)
def test_what_may_be_another_ranks_doing(ending: Ending, is_one: bool) -> None:
    assert may_follow(ending, ["", "what():  no"]) == is_one


def test_the_error_of_a_rank_that_was_given_too_little() -> None:
    error = Ending(0, "error", 1, 5.0, trace="IndexError: index 7 is out of bounds\n")
    assert may_follow(error, ["", GLOO, "step 3"])


def test_one_record_serves_the_file_and_the_watcher(tmp_path: Path) -> None:
    """The launcher reads with the watch off what the watcher is sent with it on."""
    lost = RuntimeError("Connection closed by peer")
    error = ValueError("no rows")
    error.__cause__ = lost
    ending = describe_ending(3, error)
    write_ending(tmp_path, ending)
    assert read_endings(tmp_path) == [ending]
    report = Report(3, 5.0, "leaving", {}, (), (), replace(ending, trace="", pickled=""))
    (received,) = Unpacker().feed(pack(report))
    assert isinstance(received, Report)
    assert received.last is not None
    assert replace(received.last, trace=ending.trace) == ending
    assert (ending.words, ending.follower) == ("failed with ValueError: no rows", True)
    assert ending.trace.rstrip().endswith("ValueError: no rows")


def test_a_mistake_names_the_line_that_led_to_it() -> None:
    try:
        raise PacelineError("PL400", saw="lr=-1.", rule="It is positive.", fix="Set lr=0.1.")
    except PacelineError as error:
        found = describe_ending(0, error).error()
    assert found is not None
    (place,) = found.__notes__
    assert "test_failure.py:" in place
    assert with_places(found).splitlines() == ["lr=-1. It is positive. Set lr=0.1. [PL400]", f"  {place}"]


def test_colours_of_terminals_are_left_out() -> None:
    try:
        raise ValueError("\x1b[1;31mred\x1b[0m\rover")
    except ValueError as error:
        ending = describe_ending(0, error)
    assert ending.words == "failed with ValueError: redover"
    assert "\x1b" not in ending.trace
