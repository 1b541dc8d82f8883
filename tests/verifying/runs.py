"""Runs `verify` on the warm ranks of the tests, with a fault planted in the layouts' ranks or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import PacelineError
from paceline.launching.ending.endings import RankFailed
from paceline.recipe import Layout, Recipe
from paceline.verifying.check import Verified, verify_subject
from paceline.verifying.subject import RecipeSubject
from tests.dist.pool import Pool, RankError
from tests.verifying.faults import FAULTS, HARMLESS

TIMEOUT_S = 60.0


def faulty(fault: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call `fn(*args)` while the library has a fault."""
    with {**FAULTS, **HARMLESS}[fault]():
        return fn(*args)


class PoolRunner:
    """In place of `paceline.launch`; ranks of worlds of several are faulty.

    Args:
        pool: the warm ranks.
        fault: name of what to plant, empty for none.
        timeout_s: of each call.
    """

    def __init__(self, pool: Pool, fault: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self._pool, self._fault, self._timeout_s = pool, fault, timeout_s

    def __call__(self, fn: Callable[..., Any], nproc: int, args: tuple[Any, ...]) -> list[Any]:
        if self._fault and nproc > 1:
            fn, args = faulty, (self._fault, fn, args)
        try:
            return self._pool.run(fn, nproc, args, self._timeout_s, world=False)
        except RankError as error:  # in the words of paceline.launch
            for cause in error.causes.values():
                if isinstance(cause, PacelineError):
                    raise cause from None
            rank = min(set(error.reports) - set(error.stuck), default=0)
            raise RankFailed(rank, 1, error.reports.get(rank, "")) from None


def verify_recipe(recipe: Recipe, layouts: Sequence[Layout], *, steps: int = 3, **words: Any) -> Verified:
    """Verify layouts of a recipe as the command does."""
    return verify_subject(RecipeSubject(recipe, steps), layouts, **words)
