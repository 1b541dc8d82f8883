"""Errors that a user can fix: each message has the value, the rule, the next move and a code."""

from __future__ import annotations

import importlib
import re
import traceback
from types import ModuleType

# The words of gloo, NCCL and the store for a peer that has gone, in a RuntimeError or an error of torch. The
# same words in others, or in what a loader's worker raised, are about sockets, pipes and locks of the script.
_PEER_GONE = re.compile(
    r"^(RuntimeError|torch\.[\w.]+): (?!Caught ).*"
    r"(connection (closed|reset) by peer|connection refused|broken pipe|socket closed|remote process exited"
    r"|connectfullmesh failed|application timeout caused pair closure|timed out waiting|wait timeout"
    r"|failed to recv|nccl communicator was aborted)",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
_MANY_CAUSES = 10


class PacelineError(Exception):
    """A mistake that the user can fix, reported in one message without a traceback.

    Every message has the value that was found, the rule that it breaks and the next move.
    `paceline explain CODE` prints the page behind the code (`codes/`).

    Args:
        code: the page's code, `PLnnn`.
        saw: the fact that was found, with its value.
        rule: the rule that it breaks.
        fix: the next move.
        on_every_rank: whether all ranks raise it, so that only one of them needs to report it.
    """

    exit_code = 2

    def __init__(self, code: str, *, saw: str, rule: str, fix: str, on_every_rank: bool = False) -> None:
        super().__init__(code, saw, rule, fix)
        self.code = code
        self.saw = saw
        self.rule = rule
        self.fix = fix
        self.on_every_rank = on_every_rank

    def __str__(self) -> str:
        return f"{self.saw} {self.rule} {self.fix} [{self.code}]"

    def __reduce__(self) -> tuple[object, ...]:
        # The default pickling loses keyword-only arguments, and errors are sent between processes.
        return (_rebuild, (type(self), self.code, self.saw, self.rule, self.fix))


def import_optional(name: str, install: str, use: str) -> ModuleType:
    """Import a library that training does not need; raise PL901, with `use` as its reason, without it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # something that it needs itself
            raise
        fix = f"Install it: pip install '{install}'."
        raise PacelineError("PL901", saw=f"{name} is not installed.", rule=use, fix=fix) from None


def _rebuild(kind: type[PacelineError], code: str, saw: str, rule: str, fix: str) -> PacelineError:
    return kind(code, saw=saw, rule=rule, fix=fix)


class RecipeErrors(PacelineError):  # noqa: N818 (it is several)
    """An error with all problems of one recipe.

    Args:
        where: the recipe's path.
        problems: one error per problem, in the order of the file.
    """

    def __init__(self, where: str, problems: list[PacelineError]) -> None:
        first = problems[0]
        super().__init__(first.code, saw=first.saw, rule=first.rule, fix=first.fix)
        self.where = where
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.where}: {self.problems[0]}"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{self.where}: {len(self.problems)} problems\n{lines}"

    def __reduce__(self) -> tuple[object, ...]:
        return (RecipeErrors, (self.where, self.problems))


def comes_from_lost_peer(error: BaseException) -> bool:
    """Return whether an exception, or its cause, reports that another rank has ended."""
    met: BaseException | None = error
    for _ in range(_MANY_CAUSES):
        if met is None:
            break
        # This function survives a __str__ that raises, and includes the notes.
        if has_lost_peer("".join(traceback.format_exception_only(met))):
            return True
        met = met.__cause__ or (None if met.__suppress_context__ else met.__context__)
    return False


def has_lost_peer(words: str) -> bool:
    """Return whether an error, with its name, reports that another rank has ended."""
    return _PEER_GONE.search(words) is not None
