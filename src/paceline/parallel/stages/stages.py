"""`Stages`: a model cut into stages over `pp`, with the stages of this rank.

The cut follows from one trial forward on an example batch. Parameters of other stages stay in the model under
their names, on the meta device. A weight that several stages use is on each of them.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.parallel.blocks import find_blocks
from paceline.parallel.context.row_exchange import Rows
from paceline.parallel.dropout.random_draws import find_random
from paceline.parallel.dropout.replacements import Masks
from paceline.parallel.objective import Trial
from paceline.parallel.placement import lay_out_like, local
from paceline.parallel.stages.by_hand import add_layers, add_named, find_named
from paceline.parallel.stages.compiling import compile_blocks
from paceline.parallel.stages.cut import StageCut
from paceline.parallel.stages.record import ForwardRecord, Made, record_forward
from paceline.parallel.stages.stage import StageRun
from paceline.parallel.stages.stage_shards import StageShards
from paceline.phrases import name_some
from paceline.pipeline.even_cut import find_starts
from paceline.pipeline.orders import make_schedule
from paceline.pipeline.schedule import Schedule
from paceline.recipe.layout import Layout
from paceline.torch_seams.modules import own_parameters, read_compiled_call
from paceline.torch_seams.trees import tree_leaves

log = logging.getLogger(__name__)

# Records are kept for so many shapes of batches.
_MOST_RECORDS = 256


class Stages:
    """The stages of one model.

    Args:
        model: whole, on any device.
        mesh: with several ranks of pp.
        example: calls the model on a batch of a few samples.
        has_modes: see `StageRun`.

    Attributes:
        homes: by stage, the rank of pp that holds it.
        own: the stages of this rank.
        shared: by name of a weight that several stages use, these stages.
        holders: by name of a parameter, the ranks of pp that hold it, that of its first stage first; also of
            a buffer that a stage changes, the rank of that stage.
        shards: of the parameters over dp_shard, if it has several ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        example: Callable[[nn.Module], Any] | None,
        masks: Masks,
        device: torch.device,
        rows: Sequence[Rows] = (),
        *,
        has_modes: bool = False,
    ) -> None:
        if example is None:
            raise PacelineError(
                "PL486",
                saw=f"layout.pp={mesh.pp.size} without example=.",
                rule="The cut of a model into stages follows from one forward on a batch of a few samples.",
                fix="Pass example= to Trainer: a batch in the form that step gets.",
            )
        layout = mesh.layout
        _refuse_layers(model, layout)
        self.homes = mesh.homes
        self.own = [stage for stage, home in enumerate(self.homes) if home == mesh.pp.rank]
        self._rank = mesh.pp.rank
        self._layout: Layout = layout
        self._model = model
        self._device = device
        self._has_modes = has_modes
        self._rows = rows
        blocks = [name for name, _ in find_blocks(model) if name]
        self._blocks = add_named(model, blocks, layout)
        self.shards: StageShards | None = None
        self._records: OrderedDict[Any, StageCut] = OrderedDict()
        self._modules: list[tuple[str, nn.Module]] = []
        self._schedules: dict[int, Schedule] = {}
        record = self._try(example, masks)
        if record.num_segments < len(self.homes) and not layout.stages_by_hand:
            self._blocks = add_layers(model, self._blocks)
            record = self._try(example, masks)
        if record.num_segments < len(self.homes):
            raise _few_blocks_error(record.num_segments - 1, len(self.homes), layout)
        self._starts = find_named(record.entered, layout) or find_starts(tuple(record.costs), len(self.homes))
        self._entered = record.entered
        cut = StageCut(record, self._starts)
        cut.check_writes()
        self._names = {id(p): name for name, p in model.named_parameters()}
        users = self._find_users(cut)
        self.shared = {name: stages for name, stages in users.items() if len(stages) > 1}
        self.users = users
        self.holders = {
            name: tuple(dict.fromkeys(self.homes[stage] for stage in stages))
            for name, stages in users.items()
        }
        for name, segments in record.buffers.items():
            if not segments:
                continue
            self.holders[name] = (self.homes[cut.find_stage(min(segments))],)
        self.kept = record.buffers.keys() - record.dependent
        log.info("%s", self._describe(record.costs))

    @property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return len(self.homes)

    def holds(self, name: str) -> bool:
        """Return whether this rank holds a parameter."""
        return self._rank in self.holders[name]

    def make_schedule(self, num_microbatches: int) -> Schedule:
        """Return the schedule of a step in which this pipeline runs so many microbatches."""
        if num_microbatches not in self._schedules:
            num_ranks = self._layout.pp
            self._schedules[num_microbatches] = make_schedule(
                self._layout.schedule, num_ranks, num_microbatches, len(self.homes) // num_ranks
            )
        return self._schedules[num_microbatches]

    def drop_others(self) -> None:
        """Put a tensor of one number in the place of every parameter of another stage.

        The optimizer's factory then sees parameters on the device, of their shapes. `vacate` follows.
        """
        for name, parameter in list(self._model.named_parameters()):
            if not self.holds(name):
                small = torch.zeros((), dtype=parameter.dtype, device=self._device).expand(parameter.shape)
                self._replace(parameter, nn.Parameter(small, requires_grad=parameter.requires_grad))

    def shard(
        self,
        mesh: Mesh,
        shapes: Mapping[str, torch.Size],
        *,
        zero: int,
        prefetch: bool,
        apart: Collection[str],
    ) -> None:
        """Divide the parameters over dp_shard, except those of `apart`; see `StageShards`."""
        self.shards = StageShards(
            self._model, mesh, shapes, self.users, self.own, zero=zero, prefetch=prefetch, apart=apart
        )

    def vacate(self) -> None:
        """Move the parameters of other stages to the meta device, where computing with them is an error."""
        for name, parameter in self._model.named_parameters():
            if not self.holds(name):
                other = nn.Parameter(_empty_like(parameter), requires_grad=parameter.requires_grad)
                other.__dict__.update(parameter.__dict__)
                with contextlib.suppress(RuntimeError):  # nn.LSTM has weak references to its weights
                    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Start the forwards of a step or an evaluation; precedes `find_cut` and `build_run`."""
        # Once for all of them: listing is a walk through the whole model.
        self._modules = list(self._model.named_modules())

    def find_cut(
        self, batch: Any, run: Callable[[], Any], loss: Callable[[Any], Any] | None = None
    ) -> StageCut:
        """Return the cut of a forward on a batch, from a trial forward for each new shape.

        Args:
            batch: on the device.
            run: calls the model on it.
        """
        leaves = [
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in tree_leaves(batch)
        ]
        training = tuple(module.training for _, module in self._modules)
        key = tuple(leaves), hash(training), torch.is_grad_enabled()
        found = self._records.get(key)
        if found is None:
            self._names = {id(p): name for name, p in self._model.named_parameters()}
            record = record_forward(self._model, self._blocks, run, self._device, loss)
            divisions = tuple(rows.division for rows in self._rows)
            found = StageCut(record, (*self._starts[:-1], record.num_segments), divisions)
            if record.num_segments != self._starts[-1]:
                raise _segments_error(record.num_segments - 1, self._starts[-1] - 1)
            found.check_writes()
            self._check_users(found)
            self._records[key] = found
            if len(self._records) > _MOST_RECORDS:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return found

    def build_run(self, cut: StageCut, stage: int, received: dict[Made, Tensor]) -> StageRun:
        """Return what runs one stage, at once."""
        self.divide_rows(cut)
        return StageRun(self._modules, self._blocks, cut, stage, received, self._device, self._has_modes)

    def compile(self) -> None:
        """Compile each block of this rank's stages."""
        names = [name for name in self._blocks if name]
        compile_blocks(self._model, names, [name for name in names if self._computes(name)])

    def _computes(self, block: str) -> bool:
        entered = zip(self._entered, itertools.count(1), strict=False)
        return any(
            name == block and self.homes[bisect.bisect_right(self._starts, segment) - 1] == self._rank
            for name, segment in entered
        )

    def divide_rows(self, cut: StageCut) -> None:
        """Divide sequences over cp as the trial forward did, before a forward or backward of a stage.

        The forward that enters a stretch of blocks divides it. A later stage does not run that part, and
        other microbatches, whose sequences may have other lengths, have run since.
        """
        for rows, division in zip(self._rows, cut.divisions, strict=True):
            rows.division = division

    def list_summed(self, stage: int) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters whose gradients are added up on a stage: those it uses first.

        Sharded ones as they are in steps, whole.
        """
        return [
            (name, self.whole(p))
            for name, p in self._model.named_parameters()
            if self.users[name][0] == stage and p.requires_grad
        ]

    def whole(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that stands for one of the model in steps."""
        return parameter if self.shards is None else self.shards.whole(parameter)

    def _try(self, example: Callable[[nn.Module], Any], masks: Masks) -> ForwardRecord:
        found: list[ForwardRecord] = []
        loss = example.loss if isinstance(example, Trial) else None

        def run() -> None:
            with masks.drawing(0, range(2)):
                record = record_forward(
                    self._model, self._blocks, lambda: example(self._model), self._device, loss
                )
                found.append(record)

        draws = find_random(self._model, run)
        if draws:
            raise PacelineError(
                "PL487",
                saw=f"{draws[0].where}: {draws[0].saw}",
                rule="A rank of pp skips the draws of other stages, so it would draw other numbers than one "
                "process.",
                fix="Draw with nn.Dropout, F.dropout or dropout in F.scaled_dot_product_attention.",
            )
        return found[0]

    def _find_users(self, cut: StageCut) -> dict[str, tuple[int, ...]]:
        """Return the stages that use each parameter; one that no stage uses belongs to the first."""
        used = cut.record.parameters
        return {
            self._names[number]: tuple(sorted({cut.find_stage(s) for s in used.get(number, {0})}))
            for number in self._names
        }

    def _check_users(self, cut: StageCut) -> None:
        for name, stages in self._find_users(cut).items():
            others = set(stages) - set(self.users[name])
            used = any(self._names[number] == name for number in cut.record.parameters)
            if others and used:
                raise PacelineError(
                    "PL485",
                    saw=f"stage {min(others)} uses {name}, which is on stage {self.users[name][0]}.",
                    rule="The trial forward determines which stage uses which weight.",
                    fix="Make the model use the same weights in every forward, in training and evaluation.",
                )

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        new.__dict__.update(old.__dict__)
        for module in self._model.modules():
            own = own_parameters(module)
            for key in [key for key, value in own.items() if value is old]:
                setattr(module, key, new)

    def _describe(self, costs: Sequence[float]) -> str:
        total = sum(costs) or 1.0
        shares = [
            f"{sum(costs[first:last]) / total:.0%}"
            for first, last in zip(self._starts, self._starts[1:], strict=False)
        ]
        begins = [f"block {start}" if start else "the start" for start in self._starts[:-1]]
        text = (
            f"pp: {self.num_stages} stages that begin with {', '.join(begins)} and have {', '.join(shares)}"
        )
        text += f" of the operations; schedule {self._layout.schedule}"
        if self.shared:
            text += f"; on several stages: {name_some(list(self.shared))}"
        return text


def _empty_like(parameter: Tensor) -> Tensor:
    """Return a tensor on the meta device that is laid out like a parameter."""
    return lay_out_like(torch.empty_like(local(parameter.detach()), device="meta"), parameter)


def _refuse_layers(model: nn.Module, layout: Layout) -> None:
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if "_orig_mod" in children or read_compiled_call(module) is not None:
            raise PacelineError(
                "PL492",
                saw=f"{name or 'the model'} is compiled already, with layout.pp={layout.pp}.",
                rule="A stage follows the calls of the model's modules, which compiled code does not show.",
                fix="Pass the model uncompiled, with compile=True: each block of a stage is then compiled.",
            )


def _few_blocks_error(num_blocks: int, num_stages: int, layout: Layout) -> PacelineError:
    return PacelineError(
        "PL491",
        saw=f"layout.pp={layout.pp} with {num_stages} stages, for a forward that calls {num_blocks} blocks "
        "or layers.",
        rule="Each stage begins with the call of a repeated block, or of a layer outside of blocks.",
        fix="Lower pp or chunks, or divide the model into more modules.",
    )


def _segments_error(num_blocks: int, expected: int) -> PacelineError:
    return PacelineError(
        "PL482",
        saw=f"the forward of a batch calls {num_blocks} blocks, and that of the example {expected}.",
        rule="The stages of a model begin with the same blocks for every batch.",
        fix="Call every block for every batch; multiply by zero what must not count.",
    )
