"""Reads the table of torch's private names, `names.md`: each with its use here, and the public way if any.

The table is a page without torch, so that all names can be checked at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TorchName:
    """A name of torch that Paceline uses although torch does not document it.

    Args:
        path: dotted, beginning with `torch`; the alternatives of different versions are separated by " or ".
        public: the public way, and why it is not sufficient; "" if there is none.
        fallback: what happens without it. A torch that lacks a name without fallback is refused.
    """

    path: str
    use: str
    public: str = ""
    fallback: str = ""

    @property
    def paths(self) -> list[str]:
        """The alternatives."""
        return self.path.split(" or ")


def _read_part(text: str) -> tuple[TorchName, ...]:
    rows = [line.strip(" |").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return tuple(TorchName(path.replace("`", ""), *map(str.strip, rest)) for path, *rest in rows)


def _read_table() -> dict[str, tuple[TorchName, ...]]:
    _, *parts = Path(__file__).with_name("names.md").read_text(encoding="utf-8").split("\n## ")
    return {part.partition("\n")[0]: _read_part(part) for part in parts}


NAMES = _read_table()
"""The names by the file of this folder that uses them."""

# Autograd nodes that only view, copy or cut their input: no value changes.
VIEW_NODES = tuple(name.path.rpartition(".")[2] for name in NAMES["autograd"])
