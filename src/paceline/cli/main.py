"""The command line: finds the command, runs it, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import errno
import importlib
import json
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

import paceline
from paceline.cli.examples import add_examples
from paceline.cli.output import forget_output, standard_streams
from paceline.cli.watching import as_table, print_error, with_places
from paceline.errors import PacelineError, RecipeErrors
from paceline.launching.ending.endings import PumpLost, RankFailed
from paceline.launching.rank.script import Become, run_as_main
from paceline.launching.watcher import JobStuck

# One module per command; each has `register(subparsers)` and is light to import.
_COMMANDS = (
    "run",
    "train",
    "verify",
    "checkpoint",
    "compare",
    "import_config",
    "bench",
    "plan",
    "probe",
    "profile",
    "lint",
    "launch",
    "doctor",
    "recipes",
    "completion",
    "explain",
)
_DESCRIPTION = "Distributed PyTorch training that gives the same answer on any number of machines."


class _Parser(argparse.ArgumentParser):
    """A parser whose error messages suggest what was meant, in one line."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("invalid choice: ")[2].split("'")[1:2]
        choices = [name for action in self._actions if action.choices for name in action.choices]
        if message.startswith("unrecognized arguments: "):
            unknown = [message.split(": ", 1)[1].split()[0].split("=")[0]]
            choices = list(_list_options(self))
        near = difflib.get_close_matches(unknown[0], map(str, choices), n=1) if unknown else []
        hint = f" Did you mean {near[0]}?" if near else f" See {self.prog} --help."
        if near and near == unknown:
            hint = f" It is an option of another command; see {self.prog} --help."
        passes_on = any(action.nargs == argparse.REMAINDER for action in self._actions)
        if passes_on and message.startswith("the following arguments are required: -"):
            hint = f" They come before the recipe or script, which gets all that follows it.{hint}"
        self.exit(2, f"{self.prog}: {message}.{hint} [PL600]\n")


def _list_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _list_options(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `paceline ARGV...`.

    Returns:
        0 for success, 1 for a finding, 2 for wrong input, 130 after Ctrl-C, 75 if another signal stopped
        a run before its end.
    """
    launcher = os.getpid()
    wish: Become | None = None
    try:
        with standard_streams():
            code = _run_command(argv)
    except KeyboardInterrupt:
        if argv is None:  # the process ends here, and a second one would break its exit
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = 130
    except SystemExit as end:
        if not sys.flags.inspect or os.getpid() != launcher:
            raise
        code = end.code if isinstance(end.code, int) else 1
    except Become as asked:
        wish = asked
    if wish is None:
        return _leave(code)
    # A rank of `paceline run`: everything above has ended, and this process is the script from here on.
    script, place, prepare = wish.script, wish.place, wish.prepare
    del wish
    run_as_main(script, place, prepare)
    if sys.flags.inspect:  # as Python ends a script, since `_leave` may not return
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    return _leave(0)


def _leave(code: int) -> int:
    """Return an exit code; under PYTHONINSPECT, exit, because Python would print a traceback for it."""
    if sys.flags.inspect:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run_command(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    args = parser.parse_args(words)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return 2
    try:
        if args.command != "explain":
            _check_place()
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except PacelineError as error:
        return _print_problem(error, as_json=getattr(args, "json", False))
    except (RankFailed, JobStuck, PumpLost) as failure:
        if getattr(args, "json", False):
            print(json.dumps({"error": as_table(failure)}))
        else:
            print_error(str(failure))
        return failure.exit_code
    except BrokenPipeError:
        if not _is_stdout_broken():
            raise  # Some other pipe, so this is not a success.
        # The reader of the output has gone (`| head`), so nothing more can be printed there.
        forget_output()
        return 0
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return _print_problem(_too_many_files(), as_json=False)  # a JSON object may be there in part


def _check_place() -> None:
    """Raise PL385 without /proc, and PL604 if the working folder is gone: every relative path would
    lead nowhere."""
    if not os.path.isdir("/proc/self"):
        raise PacelineError(
            "PL385",
            saw="/proc/self is missing.",
            rule="Launchers find their processes and threads in /proc, which Linux mounts.",
            fix="Mount it (mount -t proc proc /proc), or start the container with it.",
        )
    try:
        os.getcwd()
    except OSError as error:
        raise PacelineError(
            "PL604",
            saw=f"the working folder cannot be found ({error.strerror}).",
            rule="Relative paths, such as runs/demo, start there.",
            fix="Change to a folder that exists: cd ~",
        ) from None


def _too_many_files() -> PacelineError:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = f"{soft} (the most that may be set here: {'any' if hard == resource.RLIM_INFINITY else hard})"
    return PacelineError(
        "PL605",
        saw=f"a process ran out of open files; its limit is {limit}.",
        rule="A launcher and its ranks hold files, pipes and connections open.",
        fix="Raise the limit in this shell: ulimit -n 1024.",
    )


def _is_stdout_broken() -> bool:
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # not a file of the system
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all commands, importing none of their heavy parts."""
    parser = _Parser(prog="paceline", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"paceline {paceline.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name in _COMMANDS:
        importlib.import_module(f"paceline.cli.{name}").register(subparsers)
    add_examples(parser)
    return parser


def _print_problem(error: PacelineError, *, as_json: bool) -> int:
    """Report a mistake, and return its exit code."""
    if error.code == "PL603":
        forget_output()
    elif as_json:
        problems = error.problems if isinstance(error, RecipeErrors) else [error]
        found = [as_table(problem) for problem in problems]
        print(json.dumps({"error": found[0], "errors": found}))
        return error.exit_code
    with contextlib.suppress(OSError):  # If this cannot be written either, only the exit code is left.
        print_error(with_places(error))
    return error.exit_code
