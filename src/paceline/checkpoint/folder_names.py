"""Names the entries of a `checkpoints` folder, and defines the meaning of each name.

step-00000050                a committed checkpoint
.replaced-step-00000050      the former one of that step, while a new one takes its place; counts as
                             the checkpoint of that step wherever `step-00000050` is not there
corrupt-step-00000050        found broken when the run came to that step again; kept for a look
.tmp-..., .trash-...         being written, being removed; worth nothing once their process is gone
.lock                        held by the process that is saving
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline.errors import PacelineError

CHECKPOINTS = "checkpoints"
LOCK = ".lock"
REPLACED, TMP, TRASH = ".replaced-", ".tmp-", ".trash-"
_STEP = re.compile(rf"(?:{re.escape(REPLACED)})?step-(\d{{8,}})")


def step_name(step: int) -> str:
    """Return the name of a step's folder: `step-00000050` for `50`."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step that a checkpoint's folder is named after, or `None` for another name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match is not None else None


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints by rising step, valid or not; empty if there is no such folder.

    Raises:
        PacelineError: PL514 where the folder cannot be read: that must not look like a run without any.
    """
    found: dict[int, Path] = {}
    try:
        entries = sorted(folder.iterdir(), key=lambda path: path.name.startswith(REPLACED))
        for entry in entries:
            step = step_of(entry)
            if step is not None and entry.is_dir():
                found.setdefault(step, entry)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise PacelineError(
            "PL514",
            saw=f"{folder} cannot be read: {error.strerror}.",
            rule="The checkpoints of a run are found by listing that folder.",
            fix="Check its permissions and the disk.",
        ) from error
    return dict(sorted(found.items()))
