"""A subject that a function of the user's file describes: `paceline verify train.py:check`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError
from paceline.named import find_named
from paceline.train.batches import count_samples
from paceline.verifying.check import build_default_optimizer, verify
from paceline.verifying.subject import UserSubject

_TOLD = ("layouts", "steps", "dtype", "hang_after_s", "settings")  # by flags, or by their own names


@dataclass(frozen=True)
class NamedSubject(UserSubject):
    """A `UserSubject` that ranks load from its source, because lambdas cannot be sent to them."""

    source: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (self.source, self.num_steps, self.dtype, self.settings.get("compress"))


def _load_again(source: str, num_steps: int, dtype: str, compress: Any) -> NamedSubject:
    subject = load_subject(source, num_steps, dtype)
    if compress is not None:
        subject.settings["compress"] = compress
    return subject


def load_subject(source: str, num_steps: int, dtype: str) -> NamedSubject:
    """Load the description of a subject and return the subject.

    Args:
        source: `FILE.py:FUNCTION` or `MODULE:FUNCTION`. The function takes nothing and returns a dict of the
            arguments of `paceline.verify`. Without `loss`, `forward` returns the mean loss of a batch, as the
            body of a loop computes it, and `weight` is as for `Loop`.
        num_steps, dtype: see `Subject`.
    """
    try:
        find = find_named(source)
    except LookupError as error:
        raise _source_error(str(error)) from error
    made = find()
    if not isinstance(made, dict):
        raise _source_error(f"{source} returned a {type(made).__name__}.")
    given: dict[str, Any] = {"optimizer": build_default_optimizer, "forward": None} | made
    weight = given.pop("weight", count_samples)
    if "loss" not in given and given["forward"] is not None:
        given["loss"] = lambda loss, batch: (loss * float(weight(batch)), float(weight(batch)))
    known = inspect.signature(verify).parameters
    told = [key for key in _TOLD if key in given]
    missing = [key for key in ("model_fn", "batch_fn", "loss") if key not in given]
    if told or missing:
        raise _source_error(f"{source} returned {'no ' + missing[0] if missing else told[0]}.")
    defaults = {key: each.default for key, each in known.items() if key not in (*_TOLD, *given)}
    own = {key: given[key] for key in known if key in given} | defaults
    settings = {key: each for key, each in given.items() if key not in known}
    return NamedSubject(**own, num_steps=num_steps, dtype=dtype, settings=settings, source=source)


def _source_error(saw: str) -> PacelineError:
    return PacelineError(
        "PL720",
        saw=saw,
        rule="It names a function without arguments. It returns a dict with model_fn, batch_fn and loss (or "
        "forward and weight in place of loss), as paceline.verify takes them.",
        fix='Return for example {"model_fn": Net, "batch_fn": make_batch, "forward": mean_loss}. Layouts, '
        "steps and dtype are flags of the command.",
    )
