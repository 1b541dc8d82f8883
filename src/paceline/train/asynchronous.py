"""Updates that ranks compute without waiting for each other: asynchronous data parallelism.

Every rank is a worker, and serves the weights to itself. Protocol for `num_steps` updates:

1. To *pull*, a rank takes the number of the next global batch, applies all updates pushed so far, and
   computes the gradient of this batch on the weights that it then has. Their number of updates is the
   version.
2. To *push*, it takes the next place in the order of updates, and sends the gradient to every other rank.
3. Every rank applies the same updates in the same order, so all have the same weights after each of them.

The order is a text in the ranks' store, which is changed by comparing and setting. It has the version of
every rank that has pulled and not pushed. A rank pushes only if all of these can still push within the bound,
the oldest version first; else it waits for them. A rank pulls under the same condition.

Sent per update: W - 1 times the bytes of the gradients, on a group that nothing else uses; and about six
small requests to the store per rank.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from paceline.data.sampled import Sampled
from paceline.errors import PacelineError
from paceline.mesh import join_senders
from paceline.recipe import Layout, Recipe, load_recipe
from paceline.recipe.resume import check_resumable
from paceline.train.arguments import Arguments
from paceline.train.belongings import RECIPE
from paceline.train.loaders import TrainerLoader
from paceline.train.metrics import read_rows
from paceline.train.versions import Pushed
from paceline.world import World

State = dict[str, Any]


class UpdateRow(NamedTuple):
    """An update of the record.

    Attributes:
        step: its number, from 1.
        worker: the rank that computed the gradient.
        version: the number of updates in the weights that it was computed on.
        batch: number of the global batch, counted over epochs.
    """

    step: int
    worker: int
    version: int
    batch: int

    @property
    def staleness(self) -> int:
        """The number of updates between its weights and those that it was applied to."""
        return self.step - 1 - self.version


class Workers:
    """A rank's place among those that update without waiting.

    Collective: all ranks construct it, and iterate over `run` to its end.

    Args:
        first_batch: number of the next global batch.
        num_steps: updates to apply.

    Attributes:
        stop_signum: the signal that ended the updates early, or 0.
    """

    def __init__(
        self, world: World, staleness: int, *, first_step: int, first_batch: int, num_steps: int
    ) -> None:
        self.stop_signum = 0
        self._me, self._bound, self._timeout_s = str(world.rank), staleness, world.timeout_s
        self._first_step, self._first_batch = first_step, first_batch
        self._num_done, self._end = 0, num_steps
        self._peers = [rank for rank in range(world.world_size) if rank != world.rank]
        self._group: dist.ProcessGroup | None = None
        store = world.store or HashStore()
        if self._peers:
            self._group = join_senders(world)
            dist.barrier(self._group)  # so that no rank is in another call
        call = (store.add("asynchronous", 1) - 1) // world.world_size
        self._store = PrefixStore(f"asynchronous/{call}", store)
        if world.is_main:
            state = {"end": num_steps, "taken": 0, "applied": 0, "stop": 0, "out": {}}
            self._store.set("state", json.dumps(state))
        self._own: dict[int, Tensor] = {}
        self._sent: deque[tuple[list[Any], Tensor]] = deque()

    def run(
        self, compute: Callable[[int], Tensor], read_signum: Callable[[], int]
    ) -> Iterator[tuple[UpdateRow, Tensor]]:
        """Yield the updates of all ranks in their order, with messages; the caller applies each one.

        Args:
            compute: from the number of a global batch to the message of its gradient.
            read_signum: returns the signal that this rank received, or 0. It ends the updates early.
        """
        while True:
            state = self._change(partial(self._pull, signum=read_signum()))
            if state is None or self._me not in state["out"]:
                if self._num_done == self._end:
                    break
                yield self._next()
                continue
            version, batch = state["out"][self._me], self._first_batch + state["taken"] - 1
            while self._num_done < version:
                yield self._next()
            message = compute(batch)
            while (state := self._change(self._push)) is None:
                yield self._next()
            number = state["applied"] - 1
            self._own[number] = message
            self._send(number, message, {"worker": int(self._me), "version": version, "batch": batch})
        for works, _ in self._sent:
            for work in works:
                work.wait()

    def _pull(self, state: State, *, signum: int) -> bool:
        if signum and state["taken"] < state["end"]:
            state["end"], state["stop"] = state["taken"], signum
            return True
        applied = state["applied"]
        if state["taken"] == state["end"] or not self._fits([*state["out"].values(), applied], applied):
            return False
        state["taken"] += 1
        state["out"][self._me] = applied
        return True

    def _push(self, state: State) -> bool:
        del state["out"][self._me]
        state["applied"] += 1
        return self._fits(state["out"].values(), state["applied"])

    def _fits(self, versions: Any, applied: int) -> bool:
        """Return whether ranks that have pulled these versions can all push within the bound."""
        return all(applied + n - version <= self._bound for n, version in enumerate(sorted(versions)))

    def _change(self, change: Callable[[State], bool]) -> State | None:
        """Change the state of all ranks, and return it; `None` if `change` does not want to."""
        while True:
            old = self._store.get("state").decode()
            state: State = json.loads(old)
            is_changed = change(state)
            if is_changed:
                new = json.dumps(state)
                if self._store.compare_set("state", old, new).decode() != new:
                    continue
            else:
                state = json.loads(old)
            self._end, self.stop_signum = state["end"], state["stop"]
            return state if is_changed else None

    def _send(self, number: int, message: Tensor, row: Mapping[str, int]) -> None:
        works = [dist.isend(message, group=self._group, group_dst=peer) for peer in self._peers]
        self._sent.append((works, message))
        self._store.set(str(number), json.dumps({**row, "bytes": len(message)}))
        while len(self._sent) > self._bound + len(self._peers) + 1:  # a rank may be slow to apply them
            for work in self._sent.popleft()[0]:
                work.wait()

    def _next(self) -> tuple[UpdateRow, Tensor]:
        number = self._num_done
        row = json.loads(self._await(str(number)))
        if str(row["worker"]) == self._me:
            message = self._own.pop(number)
        else:
            message = torch.empty(row["bytes"], dtype=torch.uint8)
            dist.recv(message, group=self._group, group_src=row["worker"])
        self._num_done += 1
        step, version = (self._first_step + each for each in (number + 1, row["version"]))
        return UpdateRow(step, row["worker"], version, row["batch"]), message

    def _await(self, key: str) -> bytes:
        """Wait for a text in the store; in parts, between which a signal is noted."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            with suppress(dist.DistStoreError):
                self._store.wait([key], timedelta(seconds=1))
                return bytes(self._store.get(key))
            if time.monotonic() > deadline:
                state = json.loads(self._store.get("state"))
                raise PacelineError(
                    "PL679",
                    saw=f"no update came for {self._timeout_s:g} s, and rank {', '.join(state['out'])} "
                    "computes one.",
                    rule="A rank that has pulled weights pushes a gradient within train.timeout_s.",
                    fix="Look at that rank's log. Resume from the last checkpoint, or allow more time.",
                )


def pack(pushed: Pushed) -> Tensor:
    """Return a gradient as one message of bytes, on the CPU."""
    has = [float(gradient is not None) for gradient in pushed.gradients]
    head = torch.tensor([pushed.unit, *has], dtype=torch.float64)
    tensors = [head, pushed.agreement, *(each for each in pushed.gradients if each is not None)]
    return torch.cat([each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in tensors])


def unpack(message: Tensor, trained: Sequence[Tensor]) -> Pushed:
    """Return the gradient that a message has."""
    start = 8 * (1 + len(trained))
    unit, *has = message[:start].clone().view(torch.float64).tolist()
    sizes = [
        p.numel() * p.element_size() if is_there else 0 for p, is_there in zip(trained, has, strict=True)
    ]
    first = len(message) - sum(sizes)
    gradients: list[Tensor | None] = []
    for parameter, part, is_there in zip(trained, torch.split(message[first:], sizes), has, strict=True):
        gradient = torch.empty_like(parameter) if is_there else None
        if gradient is not None:
            gradient.copy_(part.clone().view(parameter.dtype).view(parameter.shape))
        gradients.append(gradient)
    return Pushed(unit, message[start:first].clone().view(torch.float64), gradients)


def refuse_asynchronous(
    given: Arguments, layout: Layout, loader: TrainerLoader[Any], world: World, staleness: int
) -> None:
    """Raise PL677 for settings under which a rank cannot compute an update alone."""
    axes = [f"layout.{axis}" for axis in layout.list_several() if axis != "dp_replicate"]
    is_set = loader.num_samples is not None and not loader.is_own and not isinstance(loader.dataset, Sampled)
    for what, is_there, reason in (
        (f"staleness={staleness!r}", staleness < 1, "The bound is 1 or more; 0 is synchronous training."),
        (", ".join(axes), bool(axes), "Each rank computes an update alone, so it has the whole model."),
        ("islands", given.islands_section.count > 1, "Islands do not share weights between exchanges."),
        ("compress", given.has_compression, "Gradients are sent as they are."),
        ("several models", given.step is not None, "An update has one model and one optimizer."),
        ('loss_over="global_batch"', given.loss_over == "global_batch", "Ranks run no forward together."),
        ('dtype="fp16"', given.dtype == "fp16", "The loss scale would be that of other weights."),
        ('reduction="fast"', given.reduction != "exact", "Only exact sums can be replayed."),
        ("data without an index", not is_set, "A rank reads the global batch whose turn it is."),
        ("loader.num_workers", loader.num_workers > 0, "A rank learns only at a pull which batch to read."),
        ("another process group", world.store is None and world.world_size > 1, "The order is in its store."),
    ):
        if is_there:
            raise refusal(what, reason)


def refusal(what: str, reason: str) -> PacelineError:
    """Return PL677."""
    return PacelineError(
        "PL677",
        saw=f"asynchronous updates with {what}.",
        rule=reason,
        fix="Change this setting, or train synchronously with asynchronous.staleness=0.",
        on_every_rank=True,
    )


def read_updates(path: Path, recipe: Recipe) -> list[UpdateRow]:
    """Return the updates of a record in a run's folder."""
    if not path.exists() or not (path.parent / RECIPE).exists():
        raise record_error(f"{path} or the {RECIPE} beside it does not exist.")
    check_resumable(load_recipe(path.parent / RECIPE), recipe, where=str(path.parent))
    try:
        rows = [UpdateRow(**{key: int(row[key]) for key in UpdateRow._fields}) for row in read_rows(path)]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise record_error(f"{path} is no record of updates ({error!r}).") from None
    if not rows:
        raise record_error(f"{path} has no updates.")
    return rows


def find_oldest(rows: Sequence[UpdateRow], *, step: int, batch: int) -> list[int]:
    """Return, by update, the oldest version that it or a later one needs.

    Args:
        batch: number of the next global batch.
    """
    if not rows:
        raise record_error(f"the record ends after update {step}.")
    steps, batches = [row.step for row in rows], sorted(row.batch for row in rows)
    if steps != list(range(step + 1, step + 1 + len(rows))):
        raise record_error(f"after update {step} the record has updates {steps[:3]}...")
    if batches != list(range(batch, batch + len(rows))):
        raise record_error(f"updates {steps[0]} to {steps[-1]} of the record have other global batches.")
    if bad := [row for row in rows if not step <= row.version < row.step]:
        raise record_error(f"update {bad[0].step} is computed on version {bad[0].version}.")
    return list(accumulate(reversed([row.version for row in rows]), min))[::-1]


def record_error(saw: str) -> PacelineError:
    """Return PL678."""
    return PacelineError(
        "PL678",
        saw=saw,
        rule="A record has every update of a run from the first on. A replay evaluates and saves after the "
        "same steps, before which ranks had applied all that they had computed.",
        fix="Replay updates.jsonl of a run's folder, with the recipe.toml beside it.",
        on_every_rank=True,
    )
