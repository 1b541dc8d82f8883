"""The last world of a job, noted on the disk of the node that begins it.

Without a witness, the launcher at the first endpoint begins a job that nobody knows of. If it starts again
and reaches no other node, it knows from the note that the job may go on elsewhere. A note is needed only if
the minimum number of nodes is at most half of the maximum: otherwise only one part of the job can be large
enough.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from paceline.launching.members.records import Address, Terms
from paceline.launching.members.world import NodeWorld, world_from_json, world_to_json

log = logging.getLogger(__name__)


class WorldNote:
    """The note of one job on this machine.

    Args:
        path: its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_warned = False

    def read(self) -> NodeWorld | None:
        """Return the noted world, or None without a readable note."""
        try:
            return world_from_json(json.loads(self.path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, world: NodeWorld) -> None:
        """Note a world; durable on return. A failure is a warning."""
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("w", encoding="utf-8") as file:
                json.dump(world_to_json(world), file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
        except OSError as error:
            if not self._has_warned:
                log.warning(
                    "%s cannot be written (%s): if this node starts again while it is cut off from the "
                    "others, it has no record of them",
                    *(self.path, error.strerror or error),
                )
            self._has_warned = True

    def remove(self) -> None:
        """Remove the note, because the job has ended."""
        with suppress(OSError):
            self.path.unlink()


def find_note(terms: Terms, endpoint: Address) -> WorldNote | None:
    """Return the note of a job that begins at an endpoint of this machine, or None if it needs none.

    It is in `$XDG_STATE_HOME`, by default `~/.local/state`.
    """
    if 2 * terms.least > terms.most:
        return None
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()
    name = hashlib.sha256(json.dumps([terms.job, *endpoint]).encode()).hexdigest()[:16]
    return WorldNote(folder / "paceline" / "jobs" / f"{name}.json")
