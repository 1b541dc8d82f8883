"""The base of every table of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

PositiveInt = Annotated[int, Field(gt=0, lt=2**63)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of a recipe: unknown keys are errors, values are never coerced from other types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def broken_rule(code: str, saw: str, rule: str, fix: str) -> PydanticCustomError:
    """Return an error of a rule over several keys, in the form that `load.py` turns into a
    `PacelineError`."""
    return PydanticCustomError("paceline", "{saw}", {"code": code, "saw": saw, "rule": rule, "fix": fix})
