"""Adds torchrun's flags to a parser, without importing torch.

Names, defaults and environment variables (`PET_NPROC_PER_NODE` and so on) are those of
`torch.distributed.run.get_args_parser` (torch 2.13); a test compares the two. torch itself turns them into a
configuration (`config_from_args`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

_NUMA_MODES = ("node", "socket", "exclusive", "core-complex")


def _split_words(text: str) -> list[str]:
    """Split words at commas: `"a,b,,c"` gives a and `b,c`, as a doubled comma belongs to the word."""
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]


_WORDS: dict[str, Any] = {"type": _split_words}

# Two defaults are None here, so that srun and mpirun can supply values that the user has not given.
# Flag, default, keywords of argparse, help.
_VALUES: tuple[tuple[str, Any, dict[str, Any], str], ...] = (
    ("--nnodes", None, {}, "number of nodes, or a range MIN:MAX (default 1)"),
    (
        "--nproc-per-node",
        None,
        {"short": "--nproc"},
        "ranks on this node: a number, auto, cpu, gpu or xpu (default 1)",
    ),
    ("--rdzv-backend", "static", {}, "how nodes meet: static, c10d, etcd, folder"),
    ("--rdzv-endpoint", "", {}, "where nodes meet: HOST:PORT of a node or an etcd, or a folder"),
    ("--rdzv-id", "none", {}, "the job's name, the same on all nodes"),
    ("--rdzv-conf", "", {}, "more for the rendezvous: KEY=VALUE,..."),
    ("--max-restarts", 0, {"type": int}, "how often failed ranks are restarted"),
    ("--monitor-interval", 0.1, {"type": float}, "seconds between two checks of the ranks"),
    (
        "--start-method",
        "spawn",
        {"choices": ["spawn", "fork", "forkserver"]},
        "accepted as by torchrun; ranks are still forked from the warm process, unless --cold is set",
    ),
    ("--event-log-handler", "null", {}, "name of a registered handler of torchelastic's events"),
    ("--role", "default", {}, "the ranks' role"),
    ("--log-dir", None, {}, "folder for the ranks' logs (default: logs, kept if a rank fails)"),
    ("--redirects", "0", {"short": "-r"}, "send streams to files: 1 stdout, 2 stderr, 3 both; or 0:1,1:3"),
    ("--tee", "0", {"short": "-t"}, "to files and to the terminal; the same numbers"),
    ("--local-ranks-filter", "", {}, "only these local ranks write to the terminal: 0,1"),
    ("--duplicate-stdout-filters", [], _WORDS, "copy lines of stdout with these words to a file"),
    ("--duplicate-stderr-filters", [], _WORDS, "copy lines of stderr with these words to a file"),
    ("--node-rank", 0, {"type": int}, "number of this node, for a static rendezvous"),
    ("--master-addr", "127.0.0.1", {}, "address of node 0, for a static rendezvous"),
    ("--master-port", None, {"type": int}, "port on node 0, for a static rendezvous (default 29500)"),
    ("--local-addr", None, {}, "address of this node"),
    ("--logs-specs", None, {"env": False}, "entry point in the group torchrun.logs_specs"),
    ("--numa-binding", None, {"choices": _NUMA_MODES, "env": False}, "bind ranks to cores near their GPU"),
    (
        "--signals-to-handle",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        {},
        "signals that are passed on to the ranks and end the job",
    ),
    ("--shutdown-timeout", None, {"type": int}, "seconds for ranks to exit when asked (default 30)"),
)
_SWITCHES: tuple[tuple[str, str | None, str], ...] = (
    ("--standalone", None, "one node, on a free port"),
    ("--module", "-m", "run a module, as python -m does"),
    ("--no-python", None, "run a program that is not a Python script"),
    ("--run-path", None, "run the script in the rank's own process, as the warm start always does"),
    ("--virtual-local-rank", None, "each rank sees its own GPU only, as device 0, with LOCAL_RANK=0"),
)


def add_torchrun_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ
) -> tuple[argparse.Action, argparse.Action]:
    """Add torchrun's flags (with dashes or underscores), the script and its arguments; return these two."""
    for flag, default, settings, words in _VALUES:
        options = {k: v for k, v in settings.items() if k not in ("short", "env")}
        value = environ.get(_variable(flag), default) if settings.get("env", True) else default
        names = [settings["short"]] if "short" in settings else []
        dest = flag[2:].replace("-", "_")
        parser.add_argument(*names, *_spellings(flag), dest=dest, default=value, help=words, **options)
    for flag, short, words in _SWITCHES:
        names = [short] if short else []
        is_on = environ.get(_variable(flag), "0") not in ("", "0")
        parser.add_argument(*names, *_spellings(flag), action="store_true", default=is_on, help=words)
    script = parser.add_argument(
        "training_script", metavar="SCRIPT", help="a path; a module with -m; a program with --no-python"
    )
    arguments = parser.add_argument(
        "training_script_args", metavar="ARGS", nargs=argparse.REMAINDER, help="go to the script"
    )
    return script, arguments


def _spellings(flag: str) -> list[str]:
    under = "--" + flag[2:].replace("-", "_")
    return [flag] if under == flag else [flag, under]


def _variable(flag: str) -> str:
    return "PET_" + flag[2:].replace("-", "_").upper()
