"""`paceline completion`: prints a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse

from paceline.errors import import_optional


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    text = "print a script that completes commands and options in a shell"
    parser = subparsers.add_parser("completion", help=text, description=f"{text.capitalize()}.")
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="that reads it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    use = "It writes the script from the options of all commands."
    shtab = import_optional("shtab", "paceline[completion]", use)
    from paceline.cli.main import build_parser

    print(shtab.complete(build_parser(), shell=args.shell))
    return 0
