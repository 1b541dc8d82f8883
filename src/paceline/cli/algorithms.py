"""Defines `--algorithm OPERATION=NAME` and `--links FILE`: short for keys of the recipe's `[algorithm]`."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.recipe.algorithm import AlgorithmSection


def add_algorithm_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    parser.add_argument(
        "--algorithm",
        action="append",
        default=[],
        metavar="OPERATION=NAME",
        help="how CPU ranks exchange numbers: exact_sum=auto|shared-memory|by-node|direct, "
        "agreement=auto|board|direct|library, broadcast=auto|pipeline|library; may be given several times. "
        "The result has the same bits",
    )
    parser.add_argument(
        "--links",
        metavar="FILE",
        help="links that `paceline bench collectives --save-links FILE` measured on these hosts: the "
        "algorithms with the smallest predicted times are taken",
    )


def list_algorithm_settings(algorithms: Sequence[str], links: str | None) -> list[str]:
    """Return the settings of the recipe, as for `--set`, that the flags stand for.

    Raises:
        PacelineError: PL967 for an unknown operation or algorithm.
    """
    from paceline.recipe.algorithm import AlgorithmSection  # too slow for --help

    fields = {name: field for name, field in AlgorithmSection.model_fields.items() if name != "links"}
    settings = []
    for given in algorithms:
        operation, _, name = (part.strip() for part in given.partition("="))
        known = list(get_args(fields[operation].annotation)) if operation in fields else []
        if name not in known:
            raise _unknown_error(given, operation, name, known, list(fields))
        settings.append(f"algorithm.{operation}={json.dumps(name)}")
    return settings + ([] if links is None else [f"algorithm.links={json.dumps(links)}"])


def show_choices(section: AlgorithmSection) -> None:
    """Show on rank 0's terminal, once, how algorithms are chosen, if the recipe or a flag concerns them."""
    if section != type(section)():
        for name in ("paceline.train.algorithms", "paceline.comm.algorithms"):
            logging.getLogger(name).setLevel(logging.INFO)


def check_links_file(links: str | None) -> None:
    """Raise PL950 if there is no such file, before ranks are started to read it."""
    if links is not None and not Path(links).is_file():
        raise PacelineError(
            "PL950",
            saw=f"algorithm.links={links[:200]} is not a file.",
            rule="It is the JSON that `paceline bench collectives --save-links FILE` writes.",
            fix="Check the path, or leave the links out: a fixed rule then chooses the algorithms.",
        )


def _unknown_error(
    given: str, operation: str, name: str, known: Sequence[str], operations: Sequence[str]
) -> PacelineError:
    choices, asked = (known, name) if known else (operations, operation)
    near = difflib.get_close_matches(asked, choices, n=2, cutoff=0.5) or [choices[0]]
    spelled = [f"{operation}={each}" if known else f"{each}={name or 'auto'}" for each in near]
    what = f"The algorithms of {operation} are" if known else "The operations are"
    return PacelineError(
        "PL967",
        saw=f"--algorithm {given[:100]}.",
        rule=f"{what} {', '.join(choices)}.",
        fix=f"Did you mean --algorithm {' or '.join(spelled)}?",
    )
