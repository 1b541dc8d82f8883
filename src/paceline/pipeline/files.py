"""Reads a schedule from a file, checks it, and adapts it to steps with fewer microbatches."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.errors import PacelineError
from paceline.pipeline.check import check_schedule
from paceline.pipeline.schedule import Schedule, read_schedule
from paceline.reading import read_file

_MOST_BYTES = 10_000_000


def read_list(path: Path) -> Schedule:
    """Return the schedule in a file; `check_schedule` checks whether it works.

    A file has a line of actions per rank, or is what `paceline plan schedule NAME --json` prints.

    Raises:
        PacelineError: PL470 for a file that cannot be read, PL470 and PL471 for one without actions per rank.
    """
    try:
        text = read_file(path, _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "it cannot be opened") if isinstance(error, OSError) else "it is not text"
        raise _content_error(path, reason) from None
    if text.lstrip().startswith("{"):
        try:
            lines = [" ".join(words) for words in json.loads(text)["actions"]]
        except (ValueError, KeyError, TypeError):
            raise _content_error(path, 'its object has no "actions", a list of words per rank') from None
        text = "\n".join(lines)
    return read_schedule(text, str(path))


def read_schedule_file(path: str, num_ranks: int) -> Schedule:
    """Return the schedule in a file for so many ranks, after checking it.

    Raises:
        PacelineError: as `read_list`; PL479 for another number of ranks.
        RecipeErrors: PL472 and PL473, all problems of the list.
    """
    schedule = read_list(Path(path))
    if schedule.num_ranks != num_ranks:
        raise PacelineError(
            "PL479",
            saw=f"{path} has actions of {schedule.num_ranks} ranks, and layout.pp={num_ranks}.",
            rule="A list has a line for each rank of pp.",
            fix=f"Set pp={schedule.num_ranks}, or write a list for {num_ranks} ranks.",
        )
    check_schedule(schedule)
    return schedule


def shorten(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return a schedule without the actions of the last microbatches, for a step that has fewer.

    What is left keeps its order, so it ends if the whole schedule does.

    Raises:
        PacelineError: PL489 for a step with more microbatches than the schedule.
    """
    if num_microbatches > schedule.num_microbatches:
        raise PacelineError(
            "PL489",
            saw=f"a step of {num_microbatches} microbatches, and {schedule.name} has actions for "
            f"{schedule.num_microbatches}.",
            rule="A list has the actions of every microbatch that a rank of dp runs in a step; for fewer, "
            "the last ones are left out.",
            fix="Write a list for the largest number, or use one of the known schedules.",
        )
    return schedule.keep_first(num_microbatches)


def _content_error(path: Path, reason: str) -> PacelineError:
    return PacelineError(
        "PL470",
        saw=f"{path} cannot be read: {reason}.",
        rule="A list of actions is a text file with a line for each rank.",
        fix="Choose another file, or one of the known schedules; `paceline plan schedule` lists them.",
    )
