"""`paceline recipes`: lists the recipes that come with the package, and prints one."""

from __future__ import annotations

import argparse

from paceline.errors import PacelineError


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    text = "list the built-in recipes, or print one to start from"
    parser = subparsers.add_parser("recipes", help=text, description=f"{text.capitalize()}.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="of a recipe; without it, all are listed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    from paceline.recipe.load import BUILT_IN

    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(BUILT_IN.glob("*.toml"))}
    if args.name is None:
        for name, text in texts.items():
            about = " ".join(line.lstrip("# ") for line in text.partition("\n\n")[0].splitlines())
            print(f"{name:<16} {about}")
        return 0
    if args.name not in texts:
        raise PacelineError(
            "PL121",
            saw=f"there is no built-in recipe {args.name}.",
            rule=f"There are {', '.join(texts)}.",
            fix="Name one of them.",
        )
    print(texts[args.name], end="")
    return 0
