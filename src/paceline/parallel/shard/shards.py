"""Sharding: each copy of the model, with gradients and optimizer state, is divided over ranks of dp_shard.

Protocol of one optimizer step of k rounds, on every rank of dp:

1. `begin`, with the number of microbatches that each rank owns. The rank with the most has a round for each.
   A rank with fewer runs idle rounds on any microbatch, whose gradients do not count, because all ranks
   gather in every forward.
2. Per round a forward, in which each block's parameters are gathered before they are used, and a backward,
   in which gradients are summed over ranks and cut. `zero` decides what is kept between them:

   | zero | parameters gathered | gradients summed | a rank keeps between rounds |
   |---|---|---|---|
   | 3 | twice per round, block by block | every round | its shards |
   | 2 | once per step | every round | all parameters, its shards of the gradients |
   | 1 | once per step | once per step | all parameters and all gradients |

   The optimizer's state is sharded with all three. The exact reduction keeps every microbatch's gradients and
   sums them in the last round, whatever `zero` is.
3. `check_reduced`. Then parameters and gradients are DTensors on the mesh of dp_shard, and the optimizer
   updates this rank's shards.

With dp_replicate > 1 every replica is sharded in the same way, and the replicas' chunks of the gradient are
summed once per step. Gradients are *summed*, not averaged. `gradient_exchange.py` describes the collectives.

Built on `torch.distributed.fsdp.fully_shard` (Zhao et al. 2023, "PyTorch FSDP",
https://arxiv.org/abs/2304.11277). The levels are those of Rajbhandari et al. 2020, "ZeRO"
(https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.own_code import describe_place, is_own
from paceline.parallel.parameter_hooks import check_hooks
from paceline.parallel.shard.gradient_exchange import ChunkSum, GatherChunks, StepProgress
from paceline.parallel.shard.held import HeldUnits, Reads
from paceline.parallel.shard.marks import Marks, gradient_error
from paceline.parallel.shard.scalars import WholeParameters, split_groups
from paceline.parallel.shard.setup import ShardSettings, apply_sharding
from paceline.parallel.shard.skipped import Skipped
from paceline.parallel.sums.gradient_sum import RankSum
from paceline.phrases import first_line, name_some
from paceline.torch_seams.fsdp import clear_gradients, forget_iteration, gathered, list_records
from paceline.torch_seams.modules import CALL

log = logging.getLogger(__name__)

# Parts of messages of torch: for an operation between a shard and a plain tensor, and for a block that is
# called before the model.
_MIXED = "mixed torch.Tensor and DTensor"
_NO_MODEL = "'FSDPCommContext' object has no attribute"
# A part of the message of `torch.autograd.grad` for the shards, which forward replaces by whole parameters.
_UNUSED = "appears to not have been used in the graph"


class Shards:
    """A model that the ranks of dp_shard share, and whose gradients are summed over all ranks of dp.

    Collective: every rank of dp must construct it with equal models, and run the same rounds.

    Args:
        model: on its device, in its final dtype, equal on all ranks; or on the meta device, to be filled
            before the first forward (each parameter's `to_local()` is this rank's shard).
        zero: what is sharded: 1 the optimizer's state, 2 gradients too, 3 parameters too.
        offload: "none" or "cpu": where the shards and the optimizer's state are kept between uses.
        exact_group: a private group over `mesh.dp` for the exact reduction, or `None` for the fast one.
        apart: full names of parameters that are not sharded, and whose gradients are summed elsewhere.

    Attributes:
        group: the ranks over which gradients are summed.
        num_ranks: number of these ranks.
        units: the sets of parameters that are gathered together.
        silent: whether nothing is sent at the moment, see `silenced`.

    Communication: per gather (n-1)/n of the parameters' bytes received, per reduction (n-1)/n of the
    gradients' sent, for n = dp_shard; over dp_replicate an all-reduce of 1/n of the gradients per step.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        settings: ShardSettings,
        *,
        zero: int,
        offload: str = "none",
        exact_group: dist.ProcessGroup | None = None,
        apart: Collection[str] = (),
    ) -> None:
        assert mesh.dp_shard.size > 1, "one rank has nothing to share"
        assert zero in (1, 2, 3), zero
        self.group = mesh.dp.group
        self.num_ranks = mesh.dp.size
        self._is_exact = exact_group is not None
        # The exact reduction must see each microbatch's gradients separately.
        self._sums_once = zero == 1 and not self._is_exact
        self._keeps_parameters = zero < 3
        self._model = model
        self._progress = StepProgress()
        self._is_in_round = False
        self.units = apply_sharding(model, mesh.shard_mesh, settings, zero=zero, offload=offload, apart=apart)
        on_cpu = mesh.device.type == "cpu"
        ranks = RankSum(
            exact_group,
            mesh.device,
            is_exact=self._is_exact,
            shards=mesh.dp_shard,
            replicas=mesh.replicas,
            sends_rows=self._is_exact and mesh.layout.count_turns(is_exact=True) > 1,
        )
        self._chunks = [ChunkSum(self._progress, number, ranks) for number in range(len(self.units))]
        for number, (unit, chunks) in enumerate(zip(self.units, self._chunks, strict=True)):
            unit.module.set_custom_all_gather(GatherChunks(self._progress, number, on_cpu))
            unit.module.set_custom_reduce_scatter(chunks)
        ranks = RankSum(exact_group, mesh.device, is_exact=self._is_exact, replicas=mesh.dp)
        self._whole = WholeParameters(model, self._progress, ranks, apart)
        self._has_plain = bool(self._whole) or bool(apart)
        *blocks, root = [unit.module for unit in self.units]
        held = HeldUnits(unit.module for unit in self.units if unit.is_table)
        self._marks = Marks(root, blocks, mesh.device.type, held)
        self._skipped = Skipped(model, self.units, self._progress, settings.prefetch, self._marks, held)
        self._reads: Reads | None = None  # of the first step
        self._num_steps = 0
        # Runs after torch's own hook, which gathers the model's own parameters and at first reads all.
        model.register_forward_pre_hook(lambda *_: self._begin_forward(held, blocks))
        model.register_forward_hook(self._reshard_without_backward)
        log.info(
            "shard: fully_shard over dp_shard=%d, zero=%d, %d blocks and the rest, %s reduction",
            mesh.dp_shard.size,
            zero,
            len(self.units) - 1,
            "exact" if self._is_exact else "fast",
        )

    @property
    def used(self) -> set[int]:
        """The ids of the parameters that a microbatch of this rank has used in this step."""
        return self._skipped.used | self._whole.used

    @property
    def num_rounds(self) -> int:
        """The number of rounds of this step: the largest number of microbatches that a rank owns."""
        return self._progress.num_rounds

    @property
    def silent(self) -> bool:
        """Whether nothing is sent at the moment."""
        return self._progress.silent

    @property
    def signature(self) -> int:
        """A 63-bit number derived from the groups that were gathered and reduced since `begin`, in order.

        It is equal on all ranks unless they ran different modules, and so used one another's data: then the
        sums are wrong, though nothing failed. The agreement of each step compares it.
        """
        return self._progress.signature

    def begin(self, num_owned: tuple[int, ...], turns: int = 1) -> None:
        """Start a global batch.

        Args:
            num_owned: per rank of dp, the number of microbatches that it computes.
            turns: how many ranks take microbatches in turns, see `data.share.list_numbers`.
        """
        if self._is_in_round:  # a round of the last step has raised
            self._abandon_round()
        # With zero 1 and 2 the gathered parameters are those from before the optimizer's step.
        self.reshard()
        for unit in self.units:
            check_hooks(unit.parameters)
            for record in list_records(unit.module):
                clear_gradients(record)  # otherwise they would be added to this step's
        if self._reads is not None:
            self._reads.end()
            self._reads = None
        self._num_steps += 1
        self._progress.begin(num_owned, turns)
        self._skipped.begin()
        for chunks in self._chunks:
            chunks.begin()
        self._whole.begin()

    @contextmanager
    def synchronising(self, sync: bool, index: int | None) -> Iterator[None]:
        """Wrap the forward and backward of one round.

        Args:
            sync: whether it is the step's last round.
            index: number within the global batch of this rank's microbatch; `None` for an idle round.
        """
        self._progress.index, self._progress.is_last = index, sync
        self._progress.number += 1
        self._skipped.begin_round()
        if self._reads is not None:
            self._reads.begin_round()
        self._marks.begin_round()
        module = self.units[-1].module
        if self._sums_once:  # earlier rounds accumulate, and the last one sums over ranks
            module.set_requires_gradient_sync(sync)
        if self._keeps_parameters:  # gathered once per step, and freed by its last backward
            module.set_reshard_after_backward(sync)
        self._is_in_round = True
        with self._whole.round():
            yield
            self._whole.end_backward()
        self._is_in_round = False  # not in a `finally`: after an error, the next step drops torch's state

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Send nothing inside the context: for timing compute alone. The resulting numbers are meaningless.

        Instead of a gather, this rank's own shards are copied as often as the other ranks' would be. A sum
        over ranks is this rank's own gradient. Set it between steps only.
        """
        self._progress.silent = True
        try:
            yield
        finally:
            self._progress.silent = False

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Wrap a forward and its loss, which must call the model itself and not modules inside it."""
        try:
            yield
        except (RuntimeError, AttributeError) as error:
            if _UNUSED in str(error):
                raise gradient_error(f"{type(error).__name__}: {first_line(error)}") from error
            if _MIXED in str(error) or _NO_MODEL in str(error):
                raise _outside_error(error, [self._model]) from error
            raise

    def backward(self, loss: Tensor) -> float:
        """Run backward; in an idle round on zero times the loss.

        Returns the seconds that this round's forward and backward waited for communication; 0 under CUDA,
        where the host does not wait.
        """
        loss = self.tie_loss(loss)
        if self._progress.index is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        elif loss.requires_grad:
            (loss * 0.0).backward()  # type: ignore[no-untyped-call]
        waited_s, self._progress.waited_s = self._progress.waited_s, 0.0
        return 0.0 if loss.is_cuda else waited_s

    def tie_loss(self, loss: Tensor) -> Tensor:
        """Return a loss whose backward may run now."""
        return self._marks.tie_loss(loss)

    @property
    def scale(self) -> float:
        """The factor of a round's gradients that is applied before they are summed; 0 drops them."""
        return self._progress.scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._progress.scale = value

    def check_reduced(self) -> None:
        """Raise unless every gradient was summed; called after the last round."""
        missing = [
            name
            for unit, chunks in zip(self.units, self._chunks, strict=True)
            for name, p in unit.parameters
            if p.requires_grad and (p.grad is None or not chunks.is_complete)
        ]
        if not missing:
            return
        shown = name_some(missing, 8)
        raise PacelineError(
            "PL441",
            saw=f"{len(missing)} parameters got no gradient on rank {dist.get_rank()}: {shown}.",
            rule="The ranks sum a block's gradients as one vector, in the backward of the model's output.",
            fix="Call the model itself in forward=, or set requires_grad=False on what the loss leaves out.",
        )

    def reshard(self) -> None:
        """Put the shards back into the model in place of gathered parameters.

        Parameters stay gathered between the rounds of a step with `zero` 1 and 2. Costs nothing if there are
        none.
        """
        for unit in self.units:
            unit.module.reshard()

    def list_gathered(self) -> list[Tensor]:
        """Return the whole parameters that forward and backward use."""
        found = [gathered(record) for unit in self.units for record in list_records(unit.module)]
        return [each for each in found if each is not None]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step."""
        with split_groups(optimizer) if self._has_plain else nullcontext():
            optimizer.step()

    def _reshard_without_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Reshard after an evaluation's forward.

        fully_shard would keep the gathered parameters for a backward that does not follow, and use them again
        after the optimizer's next update.
        """
        if not torch.is_grad_enabled():
            self.reshard()

    def _begin_forward(self, held: HeldUnits, blocks: list[FSDPModule]) -> None:
        """Gather the units that are held; in the first step, find those that must be."""
        held.gather(blocks)
        if self._num_steps != 1 or self._reads is not None or not self._marks.is_open:
            return
        numbers = {unit.name: number for number, unit in enumerate(self.units[:-1]) if not unit.is_table}

        def hold(name: str) -> bool:
            if self._marks.is_open:
                self._skipped.hold(numbers[name])
            return self._marks.is_open

        self._reads = Reads([(name, self._model.get_submodule(name)) for name in numbers], hold)

    def _abandon_round(self) -> None:
        """Make torch drop the state of a forward or backward that raised."""
        self._is_in_round = False
        forget_iteration(self.units[-1].module)


def _outside_error(error: BaseException, models: Sequence[nn.Module]) -> PacelineError:
    if not any(each is model for each in _list_called(error) for model in models):
        return PacelineError(
            "PL435",
            saw=f"{_find_own_line(error) or 'forward='} calls parts of the model, not the model.",
            rule="Under dp_shard, parameters that belong to no block are gathered when the model is called.",
            fix="Call the model itself: move this code into its forward, or into a module around it.",
        )
    return PacelineError(
        "PL435",
        saw=f"{_find_own_line(error) or 'the forward'} uses a parameter of a block outside of the block's "
        "call.",
        rule="Under dp_shard the parameters of a block are gathered when the block is called. Other uses are "
        "found in the first step, if it reads the parameter as an attribute of its module.",
        fix="Do the work in the block's forward, or use the parameter in every forward in the same way, or "
        "use dp_shard=1.",
    )


def refuse_mixed(error: BaseException | None, models: Sequence[nn.Module]) -> None:
    """Raise PL435 for an error of torch between a shard and a plain tensor, in the user's own code."""
    if _MIXED not in str(error) and _NO_MODEL not in str(error):
        return
    assert error is not None
    if _list_called(error):
        raise _outside_error(error, models) from error
    raise PacelineError(
        "PL435",
        saw=f"{_find_own_line(error) or 'the script'} combines a parameter with a plain tensor of yours.",
        rule="Under dp_shard each rank has a part of every parameter, and a plain tensor is whole.",
        fix="Put a target network into the module that is trained, so that both are divided alike; for an "
        "average of weights use paceline.Average(model, 0.999); for whole values call whole_state() on every "
        "rank.",
    ) from error


def _list_called(error: BaseException) -> list[Any]:
    """Return the modules that were called, and not those of which another method was."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return [frame.f_locals.get("self") for frame in frames if frame.f_code is CALL]


def _find_own_line(error: BaseException) -> str | None:
    frames = [(each.f_code, line) for each, line in walk_tb(error.__traceback__)]
    own = [describe_place(c.co_filename, line, c.co_name) for c, line in frames if is_own(c.co_filename)]
    return own[-1] if own else None
