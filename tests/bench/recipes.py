"""A recipe so small that a step of it takes a few milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.recipe import Recipe, parse_recipe


def write_text(folder: Path) -> Path:
    """Return a file of text of some 8,000 bytes."""
    path = folder / "text.txt"
    path.write_text("".join(f"line {number} of a text that says little\n" for number in range(200)))
    return path


def tiny_table(folder: Path) -> dict[str, Any]:
    """Return a gpt on that text, its cache in `folder`."""
    return {
        "model": {"kind": "gpt", "layers": 1, "hidden": 16, "heads": 2},
        "data": {
            "kind": "text",
            "files": [str(write_text(folder))],
            "seq_len": 16,
            "valid_fraction": 0.1,
            "cache_dir": str(folder / "cache"),
        },
        "train": {
            "epochs": 1,
            "global_batch_size": 6,
            "microbatch_size": 2,
            "threads_per_rank": 1,
            "device": "cpu",
            "timeout_s": 30.0,
        },
        "layout": {"dp_replicate": 4},
    }


def tiny_recipe(folder: Path, *settings: str) -> Recipe:
    """Return the recipe, with settings as on the command line."""
    return parse_recipe(tiny_table(folder), settings)
