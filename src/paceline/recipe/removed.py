"""Lists the keys that recipes had before, so that an old recipe gets advice and an old run resumes."""

from __future__ import annotations

from typing import Any

# By key or table: what holds now, and the next move. None of them changed the result of a run.
REMOVED: dict[str, tuple[str, str]] = {
    "algorithm": (
        "A fixed rule chooses how ranks exchange numbers.",
        "Remove the table; no bit of a result changes.",
    ),
    "checkpoint.memory_every": (
        "States are no longer kept in memory; a run goes on from its newest checkpoint.",
        "Remove it. To lose fewer steps at a crash, set a smaller checkpoint.every with "
        "checkpoint.asynchronous = true.",
    ),
}


def drop_removed(table: dict[str, Any]) -> None:
    """Remove these keys from the recipe that an older version wrote into a run's folder."""
    for name in REMOVED:
        section, _, key = name.partition(".")
        if not key:
            table.pop(section, None)
        elif isinstance(table.get(section), dict):
            table[section].pop(key, None)
