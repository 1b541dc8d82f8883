"""torchrun's flags as `paceline run` reads them, against torch's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from paceline.cli.main import build_parser
from paceline.launching.flags import add_torchrun_flags

# Documented: None here where torch has a number, so that srun and mpirun can fill in what nobody has given.
# torch has a number for the port up to 2.12.
_FILLED_LATER: dict[str, Any] = {"nnodes": "1:1", "nproc_per_node": "1"}
if get_args_parser().get_default("master_port") is not None:
    _FILLED_LATER["master_port"] = get_args_parser().get_default("master_port")

_TORCHS = {action.dest for action in get_args_parser()._actions}
# Flags that `paceline run` has on every torch, because it carries them out itself.
_OURS_ON_OLDER_TORCH = {"shutdown_timeout"} - _TORCHS

# A value of the right kind for each flag that is no plain word.
_SAMPLES = {
    "nnodes": "2:4",
    "nproc_per_node": "3",
    "max_restarts": "5",
    "monitor_interval": "0.25",
    "start_method": "forkserver",
    "redirects": "0:1,1:3",
    "tee": "3",
    "duplicate_stdout_filters": "apple,,pie,pear",
    "duplicate_stderr_filters": "one",
    "node_rank": "2",
    "master_port": "29511",
    "numa_binding": "socket",
    "shutdown_timeout": "7",
}


def parse_as_torch(argv: Sequence[str]) -> dict[str, Any]:
    return vars(get_args_parser().parse_args(argv))


def parse_as_ours(argv: Sequence[str]) -> dict[str, Any]:
    """Return the flags of torchrun as `paceline run` parses them."""
    seen = vars(build_parser().parse_args(["run", *argv]))
    return {name: value for name, value in seen.items() if name in _TORCHS}


def parse_alone(argv: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_torchrun_flags(parser)
    seen = vars(parser.parse_args(argv))
    return {name: value for name, value in seen.items() if name not in _OURS_ON_OLDER_TORCH}


def assert_same(argv: Sequence[str]) -> dict[str, Any]:
    torchs = parse_as_torch(argv)
    for parse in (parse_as_ours, parse_alone):
        ours = parse(argv)
        filled = {name: _FILLED_LATER.get(name) if value is None else value for name, value in ours.items()}
        assert filled == torchs
        assert {n: type(v) for n, v in filled.items()} == {n: type(v) for n, v in torchs.items()}
    return torchs


def torchs_options() -> list[tuple[str, argparse.Action]]:
    return [
        (option, action)
        for action in get_args_parser()._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    ]


@pytest.mark.parametrize(
    ("option", "action"), torchs_options(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_each_flag_of_torchrun_means_the_same(option: str, action: argparse.Action) -> None:
    value = [] if action.nargs == 0 else [_SAMPLES.get(action.dest, "word")]
    seen = assert_same([option, *value, "train.py", "--x"])
    default = parse_as_torch(["train.py", "--x"])[action.dest]
    assert seen[action.dest] != default, "the sample must differ from the default"
    if value:
        joined = f"{option}={value[0]}" if option.startswith("--") else option + value[0]
        assert_same([joined, "train.py"])


def test_defaults_are_torchs_but_for_two() -> None:
    ours, torchs = parse_as_ours(["train.py"]), parse_as_torch(["train.py"])
    assert {name for name in torchs if ours[name] != torchs[name]} == set(_FILLED_LATER)
    assert {name: torchs[name] for name in _FILLED_LATER} == _FILLED_LATER
    assert {ours[name] for name in _FILLED_LATER} == {None}
    assert set(ours) == set(torchs)


def test_nothing_is_known_that_torchrun_does_not_know() -> None:
    parser = argparse.ArgumentParser()
    add_torchrun_flags(parser)
    ours = {option for action in parser._actions for option in action.option_strings}
    newer = {f"--{dest.replace('_', mark)}" for dest in _OURS_ON_OLDER_TORCH for mark in "-_"}
    assert ours - {option for option, _ in torchs_options()} == {"-h", "--help", "--nproc", *newer}


def test_nproc_is_short_for_nproc_per_node() -> None:
    assert parse_as_ours(["--nproc", "3", "train.py"])["nproc_per_node"] == "3"


def find_action(parser: argparse.ArgumentParser, dest: str) -> argparse.Action:
    return next(action for action in parser._actions if action.dest == dest)


@pytest.mark.parametrize("dest", ["numa_binding", "start_method"])
def test_choices_are_torchs(dest: str) -> None:
    parser = argparse.ArgumentParser()
    add_torchrun_flags(parser)
    torchs = find_action(get_args_parser(), dest).choices
    assert torchs
    assert list(find_action(parser, dest).choices or ()) == list(torchs)


# ---- the script's own arguments


@pytest.mark.parametrize(
    "argv",
    [
        ["train.py"],
        ["train.py", "--nnodes", "9", "--tee=3", "-m", "-r", "1"],
        ["--nproc-per-node", "2", "train.py", "--nproc-per-node", "7", "--standalone"],
        ["train.py", "--cold", "--threads-per-rank", "4"],
        ["train.py", "--", "--lr", "1"],
        ["train.py", "--lr", "1", "--", "rest", "--"],
        ["--", "train.py", "--lr", "1"],
        ["--standalone", "--", "train.py", "-m"],
        ["train.py", "-h"],
        ["train.py", "--help", "--version"],
        ["train.py", "", "a b", "-1", "-x=3", "--flag=a,b", "@file"],
        ["-m", "pack.train", "-m", "other"],
        ["--no-python", "./run.sh", "-c", "echo"],
        ["--nnodes=1:4", "-r3", "-t0:1", "--max_restarts=2", "train.py"],
        ["--rdzv_b", "c10d", "--stand", "train.py"],
        ["--node-rank", "1", "--node_rank", "2", "train.py"],
        ["--rdzv-conf", "a=1,b=2", "--duplicate-stdout-filters", "a,,b,c", "train.py"],
        ["--duplicate-stderr-filters", "a,", "train.py"],
        ["--log-dir", "-", "train.py"],
        *([] if _OURS_ON_OLDER_TORCH else [["--shutdown-timeout", "-1", "train.py"]]),
    ],
    ids=" ".join,
)
def test_the_same_command_line_gives_the_same(argv: list[str]) -> None:
    assert_same(argv)


def test_an_empty_list_of_filters_means_the_same() -> None:
    assert_same(["--duplicate-stdout-filters", "", "train.py"])


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--nproc-per-node", "2"],
        ["--max-restarts", "two", "train.py"],
        ["--monitor-interval", "often", "train.py"],
        ["--start-method", "thread", "train.py"],
        ["--numa-binding", "nodes", "train.py"],
        ["--standalone=1", "train.py"],
        ["--master-port", "", "train.py"],
        ["--master", "a", "train.py"],
        ["--no-such-flag", "train.py"],
    ],
    ids=" ".join,
)
def test_what_torchrun_refuses_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for parse in (parse_as_torch, parse_as_ours, parse_alone):
        with pytest.raises(SystemExit) as caught:
            parse(argv)
        assert caught.value.code == 2
    assert "[PL600]" in capsys.readouterr().err


# ---- PET_ variables


def variables() -> list[str]:
    return sorted({action.dest for _, action in torchs_options()})


@pytest.mark.parametrize("dest", variables())
def test_each_variable_means_the_same(dest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without one (--logs-specs, --numa-binding) are among them."""
    before = parse_as_torch(["train.py"])
    monkeypatch.setenv(f"PET_{dest.upper()}", _SAMPLES.get(dest, "1"))
    seen = assert_same(["train.py"])
    assert (seen == before) == (dest in ("logs_specs", "numa_binding"))


def test_a_flag_goes_before_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    monkeypatch.setenv("PET_STANDALONE", "0")
    seen = assert_same(["--nproc_per_node", "2", "--standalone", "train.py"])
    assert (seen["nproc_per_node"], seen["max_restarts"], seen["standalone"]) == ("2", 1, True)


@pytest.mark.parametrize(("text", "is_on"), [("0", False), ("1", True), ("2", True)])
def test_variables_of_switches(text: str, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", text)
    assert assert_same(["train.py"])["standalone"] is is_on


@pytest.mark.parametrize("name", ["PET_NODE_RANK", "PET_MASTER_PORT", "PET_MONITOR_INTERVAL"])
@pytest.mark.parametrize("text", ["", "many"])
def test_a_variable_that_is_no_number_is_refused(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, text)
    for parse in (parse_as_torch, parse_as_ours, parse_alone):
        with pytest.raises(SystemExit):
            parse(["train.py"])
    assert "invalid" in capsys.readouterr().err


def test_variables_come_from_where_the_caller_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    parser = argparse.ArgumentParser()
    add_torchrun_flags(parser, {"PET_ROLE": "worker"})
    seen = parser.parse_args(["train.py"])
    assert (seen.nnodes, seen.role) == (None, "worker")
