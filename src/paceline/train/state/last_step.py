"""Keeps the state of the last complete step when another rank ends, so that only the step under way is lost.

Nothing here communicates, except for `end_step` once per start: the group has failed when it is of use.

1. Before a step, a rank notes what the step changes before its update: counters, positions, generators, and
   which versions tensors have (`note`). This takes microseconds; weights and optimizer state are not copied.
2. Before an update changes anything, the note is dropped (`forget`).
3. If this rank ends because another one has, and has a note, it restores what the forward has changed. It
   copies its share of the state into memory that a keeper of its own holds for the next start (`hand_over`).
4. The next start chooses the newest whole state (`memory_restore.py`).

Replicas hold the same bits, so each rank plans its share as if there was no other replica. Shares of ranks
at the same place of different replicas are interchangeable. The state is whole if one rank of each place is
left, and these ranks ended in the same step.

A restriction means that nothing is handed over. Weights that code outside of the optimizer changes between
two steps are detected by their version, except through `.data`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.content.sharded import NAME as SHARDED
from paceline.checkpoint.memory.free_memory import read_free_memory
from paceline.checkpoint.memory.held_states import HeldShare
from paceline.checkpoint.memory.keeper import KeeperProcess
from paceline.checkpoint.writing.state_copy import CopyMemory, copy_files, lay_out, measure
from paceline.errors import PacelineError, comes_from_lost_peer
from paceline.generators import GeneratorCopier, GeneratorCopies
from paceline.parallel.batchnorm import RunningStatistics
from paceline.parallel.placement import local
from paceline.place import KEEPING, find_keeps
from paceline.recipe.layout import Layout
from paceline.torch_seams.modules import own_buffers
from paceline.torch_seams.tensors import read_version
from paceline.train.recording import StepRecords
from paceline.train.state.memory_saves import find_obstacle
from paceline.train.state.parts import Parts, model_tensors
from paceline.train.state.saver import Saver
from paceline.train.state.transfer import run_on_main
from paceline.train.state.write import prepare_share
from paceline.train.update import Update
from paceline.units import format_bytes
from paceline.world import World

log = logging.getLogger(__name__)

# How long a rank may take to hand its share over. Launchers give ranks 30 s after the first one has failed.
_LIMIT_S = 10.0
# Share of the free memory that the ranks of a node may take together.
_MAX_MEMORY = 0.5


@dataclass(frozen=True)
class _Facts:
    """The facts of rank 0 that any rank may have to write.

    Attributes:
        identity: of this start's checkpoints.
        settings: that the result depends on.
        flops: by model, the operations per sample; `None` before they are counted.
    """

    identity: dict[str, Any]
    settings: dict[str, Any]
    flops: dict[str, float | None]


@dataclass(frozen=True)
class _Note:
    """The state between two steps, as far as a step changes it before its update.

    Attributes:
        step: optimizer steps taken.
        progress: counters and positions, on the first rank of a replica.
        generators: their states, on the first rank of a replica.
        groups: options of each optimizer's groups.
        versions: number of writes to all parameters.
        buffers: the buffers with the number of writes to each.
    """

    step: int
    progress: dict[str, Any] | None
    generators: GeneratorCopies | None
    groups: list[dict[str, Any]]
    versions: int
    buffers: list[tuple[Tensor | None, int]]


class LastStep:
    """The state of the last complete step, on this rank.

    Args:
        world: the ranks.
        layout: of the ranks.
        models: by name, laid out.
        updates: of the models.
        statistics: of BatchNorm, which forwards change.
        saver: of the same models.
        records: metrics of the run.
        is_wanted: whether a state is to be handed over where that is possible.
    """

    def __init__(
        self,
        world: World,
        layout: Layout,
        models: Mapping[str, nn.Module],
        updates: Mapping[str, Update],
        statistics: RunningStatistics,
        saver: Saver,
        records: StepRecords,
        *,
        is_wanted: bool,
    ) -> None:
        self._world, self._models, self._updates = world, models, updates
        self._statistics, self._saver, self._records = statistics, saver, records
        # Stages complete each other's state by a collective, and experts are divided over replicas. Residuals
        # and the state of hooks are lost with their rank. NCCL ends or blocks a rank without an exception.
        self._is_possible = (
            is_wanted
            and (layout.dp_replicate or 1) > 1
            and layout.pp == layout.ep == 1
            and world.device.type == "cpu"
            and all(update.compression is None and update.hook_state is None for update in updates.values())
        )
        self._layout = replace(layout, dp_replicate=1) if self._is_possible else layout
        self._place = world.rank % self._layout.num_ranks
        self._num_tries, self._is_in_step = 0, False
        self._facts: _Facts | None = None
        self._note: _Note | None = None
        self._generators = GeneratorCopier()
        self._parameters: list[Tensor] = []
        self._named: dict[str, list[tuple[str, Tensor]]] = {}
        self._buffers: list[tuple[nn.Module, str]] = []
        self._parts: Parts | None = None
        for update in updates.values():
            update.before_update = self.forget

    def reset(self) -> None:
        """Forget everything, because another state was loaded."""
        self._facts, self._note, self._num_tries, self._is_in_step = None, None, 0, False
        self._tell_launcher(None)
        self._records.keeps_recent = False

    def forget(self) -> None:
        """Drop the note: an update changes the state from here on."""
        self._note = None

    def begin_step(self) -> None:
        """Take no notes until the step has ended; if it fails, none are taken any more."""
        self._is_in_step = True

    def end_step(self) -> None:
        """Get ready after the first step of a start; collective until operations are counted."""
        self._is_in_step = False
        if self._facts is None and self._is_possible and self._saver.survives:
            self._num_tries += 1
            if self._num_tries & (self._num_tries - 1) == 0:
                self._get_ready()

    def note(self, describe_counters: Callable[[], dict[str, Any]], *, again: bool = True) -> None:
        """Note the state between two steps.

        Args:
            describe_counters: returns those of the trainer.
            again: whether to replace a note of the same step.
        """
        if self._facts is None or self._is_in_step or (self._note is not None and not again):
            return
        if not self._saver.tracked.is_empty:  # a forward may change the user's objects
            self._note = None
            return
        counters, is_first = describe_counters(), self._place == 0
        self._note = _Note(
            counters["step"],
            self._saver.describe_progress(counters) if is_first else None,
            self._generators.copy() if is_first else None,
            [
                {key: _own(value) for key, value in group.items() if key != "params"}
                for update in self._updates.values()
                for group in update.optimizer.param_groups
            ],
            sum(map(read_version, self._parameters)),
            [_describe_buffer(own_buffers(module).get(key)) for module, key in self._buffers],
        )

    def hand_over(self, error: BaseException | None) -> None:
        """Hand this rank's share to a keeper, if it ends because another rank has.

        Returns within 10 s. A share that is not complete by then is not used.

        Args:
            error: by which this rank ends.
        """
        note, self._note = self._note, None
        if note is None or error is None or not comes_from_lost_peer(error):
            self._tell_launcher(None)
            return
        self._tell_launcher(KEEPING)
        thread = threading.Thread(target=self._try_to_keep, args=(note,), name="paceline-keep", daemon=True)
        thread.start()
        thread.join(_LIMIT_S)
        if thread.is_alive():
            _warn(note.step, f"the copy took longer than {_LIMIT_S:g} s")
        self._tell_launcher(None)

    def _tell_launcher(self, text: str | None) -> None:
        """Write the file by which the launcher gives this rank time when a node is lost, or remove it."""
        file = find_keeps(None, os.getpid())
        if file is None or not self._is_possible:
            return
        with suppress(OSError):
            if text is None:
                file.unlink(missing_ok=True)
            else:
                file.write_text(text)

    def _get_ready(self) -> None:
        facts = run_on_main(self._world, self._collect_facts)
        if None in facts.flops.values():
            return
        for name, update in self._updates.items():
            if update.runner.flops_per_sample is None:  # counted by rank 0's replica alone
                update.runner.flops_per_sample = facts.flops[name]
        tensors = model_tensors(self._models, keep_vars=True)
        self._named = {name: list(self._models[name].named_parameters()) for name in self._updates}
        with torch.no_grad():
            self._parameters = [local(each) for each in tensors.values() if isinstance(each, nn.Parameter)]
        names = {id(each) for each in tensors.values()}
        self._buffers = [
            (module, key)
            for model in self._models.values()
            for module in model.modules()
            for key, buffer in own_buffers(module).items()
            if buffer is not None and id(buffer) in names
        ]
        known = {id(own_buffers(module)[key]) for module, key in self._buffers}
        if all(isinstance(each, nn.Parameter) or id(each) in known for each in tensors.values()):
            self._parts = Parts(self._models, self._updates, self._layout, self._place)
            self._facts = facts
            self._records.keeps_recent = True
            self._tell_launcher("")

    def _collect_facts(self) -> _Facts:
        flops = {name: update.runner.flops_per_sample for name, update in self._updates.items()}
        return _Facts(self._saver.describe(), self._saver.describe_settings(), flops)

    def _try_to_keep(self, note: _Note) -> None:
        try:
            with torch.no_grad():
                why_not = find_obstacle() or self._restore(note) or self._keep(note)
        except (PacelineError, OSError, RuntimeError, EOFError) as error:
            why_not = str(error)
        if why_not:
            _warn(note.step, why_not)
        else:
            log.info("step %d stays in memory for the next start, because another rank has ended", note.step)

    def _restore(self, note: _Note) -> str:
        """Restore what the forward and the loop have changed since; return why that is impossible, or ""."""
        if sum(map(read_version, self._parameters)) != note.versions:
            return "weights were changed outside of the optimizer's step"
        is_begun = self._statistics.is_begun
        changed = [
            place
            for place, (tensor, version) in zip(self._buffers, note.buffers, strict=True)
            if (now := own_buffers(place[0]).get(place[1])) is not tensor
            or (now is not None and read_version(now) != version)
        ]
        for module, key in changed:
            if not (is_begun and self._statistics.covers(module, key)):
                return f"the buffer {key} of {type(module).__name__} was changed"
        if is_begun:
            self._statistics.restore()
        groups = [group for update in self._updates.values() for group in update.optimizer.param_groups]
        for group, options in zip(groups, note.groups, strict=True):
            group.update(options)
        return ""

    def _keep(self, note: _Note) -> str:
        """Copy this rank's share, and let a keeper hold it; return why that is impossible, or ""."""
        assert self._parts is not None
        assert self._facts is not None
        assert self._saver.folder is not None
        facts = self._facts
        self._parts.renew_buffers()
        state = self._saver.list_last(lambda: self._describe(note), self._named, self._parts)
        share, _ = prepare_share(self._place, state)
        plans = share.list_files()
        wanted, free = measure(plans) * self._world.local_world_size, read_free_memory()
        if wanted > free * _MAX_MEMORY:
            return (
                f"the copies of this node's ranks take {format_bytes(wanted)}, more than half of the "
                f"{format_bytes(free)} that are free"
            )
        memory, unused = CopyMemory(), CopyMemory()  # a keeper has two slots
        memory.reserve(measure(plans), self._world.device)
        folder = str(self._saver.folder.absolute())
        keeper = KeeperProcess([memory.fd, unused.fd], os.getppid(), folder)
        try:
            copy_files(memory, plans)  # while it starts
            token = f"{facts.identity['run']}-{facts.identity['generation']}-last"
            held = HeldShare(
                note.step,
                token,
                self._place,
                self._layout.num_ranks,
                SHARDED,
                facts.identity,
                lay_out(plans),
                [],
                last_rows=self._records.dump_recent(self._updates.values()),
            )
            keeper.wait_until_started()
            keeper.keep(0, held.dump(), None)
        except BaseException:
            keeper.close()
            raise
        keeper.leave_behind()  # it checks what it has, and the next start waits for that
        for each in (memory, unused):
            with suppress(OSError):
                each.close()
        return ""

    def _describe(self, note: _Note) -> dict[str, Any]:
        """Return the state of the run without tensors, as `Saver` describes it for a save."""
        assert self._facts is not None
        assert note.progress is not None
        assert note.generators is not None
        settings = self._facts.settings
        if settings["loaders"].keys() != note.progress["loaders"].keys():  # a loader has moved since
            settings = self._saver.describe_settings()
        rest = {"settings": settings, "rng": note.generators.describe(), "hooks": {}, "tracked": {}}
        return note.progress | rest


def _describe_buffer(buffer: Tensor | None) -> tuple[Tensor | None, int]:
    return buffer, 0 if buffer is None else read_version(buffer)


def _own(value: Any) -> Any:
    """Return an option that later writes do not change."""
    return value.clone() if isinstance(value, Tensor) else value


def _warn(step: int, reason: str) -> None:
    log.warning(
        "Step %d does not stay in memory for the next start: %s. The next start goes on from an older state. "
        "[PL567]",
        step,
        reason,
    )
