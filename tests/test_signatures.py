"""Public calls refuse arguments of wrong types and names, before they do anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline import Loop, PacelineError, Trainer
from paceline.signatures import check_arguments
from paceline.train.own_step import LoopStep
from paceline.train.training import Training

CALLS: list[Callable[..., Any]] = [
    *(Trainer.__init__, Loop.__init__, Training.loader, Training.resume, paceline.parallelize),
    *(Trainer.evaluate, Training.predict, Training.keep_best, Trainer.whole_state, Trainer.gather_into),
    *(Trainer.on_gradients, Loop.evaluate, Loop.step, Loop.split, LoopStep.clip_grad_norm_),
    *(paceline.start, paceline.launch, paceline.verify, paceline.Average.__init__, paceline.pretrained),
    *(paceline.load_recipe, paceline.schedule),
]


def check(call: Callable[..., Any], **kwargs: Any) -> str:
    """Return the message of arguments of a call that are refused, or an empty text."""
    args = (Trainer,) if "self" in inspect.signature(call).parameters else ()
    try:
        check_arguments(call, args, kwargs, is_whole=False)
    except PacelineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_every_argument_of_every_public_call_has_a_type_that_is_checked(call: Callable[..., Any]) -> None:
    parameters = inspect.signature(call).parameters
    hints = {
        name: hint for name, hint in get_type_hints(call).items() if name in parameters and hint is not Any
    }
    assert hints
    for name in hints:
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD or name == "watcher":  # a protocol
            continue
        message = check(call, **{name: object()})
        assert message.endswith("[PL400]"), (name, message)
        assert f"{name}=object(...)). {name} takes " in message
        default = parameters[name].default
        if default is not inspect.Parameter.empty:
            assert not check(call, **{name: default}), name


@pytest.mark.parametrize(
    ("call", "arguments", "words"),
    [
        (
            Trainer.__init__,
            {"layout": None},
            ["Trainer(layout=None)", "Leave layout= out", "dp_shard=4 tp=2"],
        ),
        (Trainer.__init__, {"checkpoint_mode": "async"}, ["Literal['full', 'sharded']"]),
        (Trainer.__init__, {"loss": "mse"}, ["loss=lambda output, batch"]),
        (Trainer.__init__, {"dtype": torch.bfloat16}, ['dtype="bf16"']),
        (Trainer.__init__, {"microbatch_size": True}, ["int | None"]),
        (Trainer.__init__, {"keep": 1.5}, ["takes int"]),
        (Trainer.__init__, {"compile": "no"}, ["takes bool"]),
        (Trainer.__init__, {"optimizer": {"model": "adamw"}}, ["lambda named: torch.optim"]),
        (Loop.__init__, {"means": "accuracy"}, ["Sequence[str]"]),
        (Trainer.evaluate, {"loader": DataLoader([1])}, ["loader=DataLoader(...)", "loader=trainer.loader("]),
        (paceline.pretrained, {"factory": "gpt2"}, ["factory='gpt2'"]),
        (paceline.start, {"timeout_s": timedelta(seconds=60)}, ["start(timeout_s=timedelta(...))", "600.0"]),
        (paceline.start, {"devise": 2}, ["use device=", "[PL929]"]),
        (paceline.launch, {"args": "text"}, ["launch(args='text')"]),
        (paceline.launch, {"world_size": 2}, ["For world_size=, use nproc="]),
        (paceline.verify, {"layouts": "tp=2"}, ["verify(layouts='tp=2')", "Sequence[str | Layout]"]),
    ],
)
def test_a_wrong_argument_is_named_with_what_it_takes(
    call: Callable[..., Any], arguments: dict[str, Any], words: list[str]
) -> None:
    message = check(call, **arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "arguments",
    [
        {"clip_norm": np.float32(1), "seed": np.int64(3), "compile": 0},
        {"clip_norm": 1, "model": nn.Linear, "optimizer": {"a": nn.Linear}},
        {"ema": {"a": 0.9}, "sinks": ["csv"], "shard": {"prefetch": 1}},
        {"loss": nn.MSELoss(), "microbatch_size": None},
    ],
)
def test_what_works_is_not_refused(arguments: dict[str, Any]) -> None:
    assert not check(Trainer.__init__, **arguments)


def test_verify_checks_the_arguments_that_it_passes_on_before_ranks_start() -> None:
    for wrong, code in (({"batch_size": 3}, "PL929"), ({"ema": "x"}, "PL400"), ({}, "PL721")):
        with pytest.raises(PacelineError) as caught:
            paceline.verify(nn.ReLU, None, lambda output, batch: output.mean(), layouts=["tp=2"], **wrong)
        assert caught.value.code == code
