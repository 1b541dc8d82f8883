"""Steps whose messages run in NCCL's order: those of a group one after the other, as they were posted.

Only a simulation: gloo carries the messages, so no communicator of NCCL is made.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.dist.pool import Pool
from tests.train.test_pipeline import DIVIDED, MODELS, TWO, Series, build, train
from tests.train.test_pipeline_layouts import train as train_gpt


class Queued:
    """A send or receive that runs once those before it in its group have ended."""

    def __init__(self, start: Callable[[], list[Any]]) -> None:
        self._start, self._done = start, threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            for work in self._start():
                work.wait()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self, timeout: Any = None) -> bool:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()


@contextlib.contextmanager
def one_after_the_other() -> Iterator[None]:
    """Run all sends and receives of a group in one queue; those of a batch together."""
    queues: dict[int, queue.SimpleQueue[Queued | None]] = {}
    right_send, right_receive, right_batch = dist.isend, dist.irecv, dist.batch_isend_irecv
    right_operation = dist.P2POp

    def work_off(line: queue.SimpleQueue[Queued | None]) -> None:
        while (queued := line.get()) is not None:
            queued.run()

    def put(group: Any, start: Callable[[], list[Any]]) -> Queued:
        if id(group) not in queues:
            line = queues[id(group)] = queue.SimpleQueue()
            threading.Thread(target=work_off, args=(line,), daemon=True).start()
        queued = Queued(start)
        queues[id(group)].put(queued)
        return queued

    def send(*args: Any, group: Any = None, **settings: Any) -> Queued:
        return put(group, lambda: [right_send(*args, group=group, **settings)])

    def receive(*args: Any, group: Any = None, **settings: Any) -> Queued:
        return put(group, lambda: [right_receive(*args, group=group, **settings)])

    def batch(operations: list[Any]) -> list[Queued]:
        [group] = {id(each.group): each.group for each in operations}.values()
        return [put(group, lambda: right_batch(operations))]

    patches = {
        "isend": send,
        "irecv": receive,
        "batch_isend_irecv": batch,
        "send": lambda *args, **settings: send(*args, **settings).wait(),
        "recv": lambda *args, **settings: receive(*args, **settings).wait(),
        "P2POp": lambda kind, *args, **settings: right_operation(
            {send: right_send, receive: right_receive}[kind], *args, **settings
        ),
    }
    with mock.patch.multiple(dist, **patches):
        yield
    for line in queues.values():
        line.put(None)


def train_in_order(world: Any, layouts: tuple[str, ...]) -> list[Any]:
    """Return what steps give in NCCL's order and in gloo's, and an evaluation in NCCL's."""
    found = []
    with one_after_the_other():
        found += train(world, MODELS["Tied"], layouts)
        trainer = build(layouts[0], MODELS["Tied"])
        found.append(trainer.evaluate(trainer.loader(Series(), global_batch_size=11, shuffle=False)))
        trainer.close()
    return found


@pytest.mark.timeout(120)
def test_every_schedule_ends_in_the_order_of_nccl(ranks: Pool) -> None:
    """With weights that several stages use, and evaluation."""
    layouts = (*TWO, *DIVIDED)
    [alone] = ranks.run(train, 1, (MODELS["Tied"], ("",)))[0]
    *steps, losses = ranks.run(train_in_order, 2, (layouts,), timeout_s=60)[0]
    assert steps == [alone] * len(layouts)
    assert losses


MIXES = (
    "pp=2 dp_shard=2 zero=2 schedule=zbv",  # the data ranks have different numbers of microbatches
    "pp=2 cp=2 cp_by=gather",
    "pp=4 schedule=zero_bubble",
)


def train_mixes(world: Any, layouts: tuple[str, ...], *, in_order: bool) -> list[Any]:
    with one_after_the_other() if in_order else contextlib.nullcontext():
        return train_gpt(world, [(layout, {}) for layout in layouts])


@pytest.mark.timeout(180)
def test_mixes_of_axes_end_in_the_order_of_nccl(ranks: Pool) -> None:
    """Rings of keys and values, and data ranks that have no microbatch at the end of a step."""
    found = {
        in_order: ranks.run(partial(train_mixes, in_order=in_order), 4, (MIXES,), timeout_s=90)[0]
        for in_order in (True, False)
    }
    assert found[True] == found[False]
