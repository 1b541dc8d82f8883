"""Numbers of `paceline run`'s flags that cannot be, refused before anything starts."""

from __future__ import annotations

import argparse

import pytest

from paceline.cli import run
from paceline.errors import PacelineError


@pytest.mark.parametrize("given", [{"threads_per_rank": 0}, {"detect_s": 0.1}, {"join_timeout": -1.0}])
def test_a_number_that_is_too_small(given: dict[str, float]) -> None:
    args = argparse.Namespace(**{"threads_per_rank": None, "detect_s": None, "join_timeout": None, **given})
    with pytest.raises(PacelineError, match="PL345") as caught:
        run._run(args)
    [(name, value)] = given.items()
    assert f"--{name.replace('_', '-')} {value:g}." in str(caught.value)
