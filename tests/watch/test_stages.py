"""A pipeline that hangs is explained by stage, microbatch and direction."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

import paceline
from paceline.parallel.stages.stages import Stages
from paceline.parallel.stages.transfer import StageTransfer
from paceline.pipeline.messages import Message, Payload
from paceline.pipeline.orders import B, F, make_schedule
from paceline.pipeline.schedule import Action, Schedule
from paceline.train.runners.staged import StagedRunner
from paceline.watch.protocol.report import Call, Group
from paceline.watch.reasoning.hang import explain_hang
from tests.train.test_pipeline import Outside, Series, build
from tests.watch.situations import Job, call, user

PP = Group("3", "pp", (0, 2))


def name(content: Payload, microbatch: int, source: int) -> str:
    target = source + (1 if content is Payload.OUTPUT else -1)
    return str(Message(content, source, target, microbatch))


def transfer(operation: str, number: int, peer: int, purpose: str, **settings: Any) -> Call:
    return replace(call(number, operation, group="3", peer=peer, **settings), purpose=purpose)


def waiting_job() -> Job:
    """Rank 0 (stage 0) waits for the gradient of microbatch 5 from rank 2 (stage 1)."""
    job = Job(4, [PP, Group("4", "pp", (1, 3))])
    wanted = name(Payload.GRADIENT, 5, 1)
    sends = transfer("send", 9, 2, name(Payload.OUTPUT, 6, 0), age_s=70.0)  # nobody has taken it yet
    job.waits(0, sends, transfer("recv", 6, 2, wanted))
    job.reports[0] = replace(job.reports[0], awaited=wanted)
    return job


def test_a_stage_that_computes_is_named_with_its_action() -> None:
    job = waiting_job()
    frames = (user(50, "forward", file="/job/model.py"), user(31, "step"))
    job.is_in(2, *frames, calls=[transfer("send", 5, 0, name(Payload.GRADIENT, 4, 1), done=True)])
    job.process(2, cpu_share=1.0)
    job.reports[2] = replace(job.reports[2], action="the backward of microbatch 5 on stage 1")
    verdict = explain_hang(job.seen)
    assert verdict is not None
    assert verdict.code == "PL808"
    assert verdict.headline.startswith(
        "rank 2 never sent the gradient of microbatch 5 from stage 1 to stage 0, for which rank 0 has waited"
    )
    assert "in the backward of microbatch 5 on stage 1" in verdict.headline
    waits, computes = (place.what for place in verdict.places if set(place.ranks) & {0, 2})
    assert waits.startswith("waits for the gradient of microbatch 5 from stage 1 to stage 0 (recv number 6")
    assert computes.endswith("in the backward of microbatch 5 on stage 1")
    assert "model.py:50" in verdict.fix


def test_ranks_of_other_pipelines_that_wait_for_the_same_rank_are_told() -> None:
    job = waiting_job()
    job.process(2, state="stopped")
    verdict = explain_hang(job.seen)
    assert verdict is not None
    assert verdict.code == "PL809"
    assert "microbatch 5 from stage 1 to stage 0" in verdict.headline
    assert "is stopped" in verdict.headline


@pytest.mark.parametrize("is_later", [False, True])
def test_a_message_that_is_taken_for_another_is_named(is_later: bool) -> None:
    job = waiting_job()
    calls = [transfer("send", 6, 0, name(Payload.GRADIENT, 6, 1), done=True)]
    if is_later:
        calls.append(transfer("send", 7, 0, name(Payload.GRADIENT, 5, 1)))
    job.is_in(2, user(31, "step"), calls=calls)
    verdict = explain_hang(job.seen)
    assert verdict is not None
    assert verdict.code == "PL808"
    when = "later" if is_later else "never"
    assert verdict.headline == (
        f"rank 2 sent the gradient of microbatch 5 from stage 1 to stage 0 {when}: what rank 0 takes for it, "
        "number 6 between them, is the gradient of microbatch 6 from stage 1 to stage 0"
    )
    assert "layout.schedule" in verdict.fix


def test_messages_that_fit_are_not_taken_for_others() -> None:
    job = waiting_job()
    job.waits(2, transfer("send", 6, 0, name(Payload.GRADIENT, 5, 1)))
    verdict = explain_hang(job.seen)
    assert verdict is not None
    assert "never" not in verdict.headline


# ---- real ranks


def train_a_pipeline(global_batch_size: int = 10) -> None:
    with paceline.start(device="cpu"):
        trainer = build("pp=2", Outside)
        for share in trainer.loader(Series(), global_batch_size=global_batch_size):
            trainer.step(share)


def leave_out(content: Payload, microbatch: int, global_batch_size: int = 10) -> None:
    """Leave out a message of a stage, which goes on."""
    right = StageTransfer.give

    def give(self: StageTransfer, message: Message, tensors: Any) -> None:
        if (message.content, message.microbatch) != (content, microbatch):
            right(self, message, tensors)

    with mock.patch.object(StageTransfer, "give", give):
        train_a_pipeline(global_batch_size)


def leave_a_send_out() -> None:
    """Stage 1 does not send the gradient of microbatch 3."""
    leave_out(Payload.GRADIENT, 3)


def leave_the_last_send_out() -> None:
    """Stage 1 does not send the gradient of the last microbatch, and goes on to the end of the step."""
    leave_out(Payload.GRADIENT, 4)


def leave_a_gradient_out_before_a_ragged_one() -> None:
    """The next message is shorter: the last microbatch has one sample, the others two."""
    leave_out(Payload.GRADIENT, 4, 11)


def leave_an_output_out_before_a_ragged_one() -> None:
    """The same in the other direction."""
    leave_out(Payload.OUTPUT, 4, 11)


def stop_a_stage() -> None:
    """Stage 1 is stopped before its backward of microbatch 2."""
    right = StagedRunner._run_backward

    def run(self: StagedRunner, state: Any, action: Any, *rest: Any) -> Any:
        if os.environ["RANK"] == "1" and action.microbatch == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return right(self, state, action, *rest)

    with mock.patch.object(StagedRunner, "_run_backward", run):
        train_a_pipeline()


def follow_other_lists() -> None:
    """Stage 0 runs one microbatch after the other, stage 1 all forwards first."""

    def make(self: Stages, num_microbatches: int) -> Schedule:
        schedule = make_schedule("gpipe", 2, num_microbatches)
        if os.environ["RANK"] == "1":
            return schedule
        own = [
            tuple(Action(kind, stage, m) for m in range(num_microbatches) for kind in (F, B))
            for stage in range(2)
        ]
        return replace(schedule, actions=tuple(own))

    with mock.patch.object(Stages, "make_schedule", make):
        train_a_pipeline()


# A job, the code of its verdict, and what the verdict says.
VERDICTS: dict[str, tuple[Any, str, list[str]]] = {
    "a send left out": (
        leave_a_send_out,
        "PL808",
        [
            "rank 1 sent the gradient of microbatch 3 from stage 1 to stage 0 never",
            "is the gradient of microbatch 4",
        ],
    ),
    "a gradient left out before a ragged one": (
        leave_a_gradient_out_before_a_ragged_one,
        "PL808",
        [
            "rank 1 sent the gradient of microbatch 4 from stage 1 to stage 0 never",
            "is the gradient of microbatch 5",
        ],
    ),
    "an output left out before a ragged one": (
        leave_an_output_out_before_a_ragged_one,
        "PL808",
        [
            "rank 0 sent the output of microbatch 4 from stage 0 to stage 1 never",
            "is the output of microbatch 5",
        ],
    ),
    "the last send left out": (
        leave_the_last_send_out,
        "PL808",
        ["rank 0 waits for the gradient of microbatch 4 from stage 1 to stage 0 (rank 1)"],
    ),
    "a stage stopped": (
        stop_a_stage,
        "PL809",
        ["rank 1 never sent the gradient of microbatch 2 from stage 1 to stage 0", "is stopped"],
    ),
    "other lists": (
        follow_other_lists,
        "PL808",
        [
            "rank 0 waits for the gradient of microbatch 0 from stage 1 to stage 0 (rank 1)",
            "rank 1 waits for the output of microbatch 1 from stage 0 to stage 1 (rank 0)",
            "layout.schedule",
        ],
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_a_hang_of_a_pipeline_is_explained(case: str) -> None:
    job, code, says = VERDICTS[case]
    with pytest.raises(paceline.JobStuck) as raised:
        paceline.launch(job, nproc=2, hang_after_s=3)
    text = str(raised.value)
    assert raised.value.message.table["code"] == code, text
    for words in says:
        assert words in text, text
