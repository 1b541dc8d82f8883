"""Trains islands: blocks of every global batch, each with weights and an optimizer of its own.

This is DiLoCo (https://arxiv.org/abs/2311.08105) whose number of islands belongs to the run and not to the
ranks. Protocol for K islands on G blocks of ranks, with K / G islands in turns on each block:

- In the warm-up, an island's gradients, losses, weights and statistics are added to those of the others, in
  the order of the tree over islands (`comm/tree.py`). All islands are one model then.
- After it, an island trains alone. No message leaves its block.
- Every `every` steps, each island subtracts its weights from the global ones, and encodes this change. The
  changes are added in the order of the tree. Every rank steps the outer optimizer on its copy of the global
  weights with the mean, and all islands continue from these. Ranks with the same place in other blocks
  exchange, so with shards each sends its own part.
- The same exchange carries losses, requests to stop and digests of the global weights.

Sent per rank and exchange: (K / G + 1)(G - 1)/G times the bytes of its part of the weights. The order of
additions depends on K alone, so on any number of ranks the bits are the same.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.comm.codec import CODECS
from paceline.comm.residuals import SUM, Residuals, RowRange
from paceline.comm.slots import SlotSum
from paceline.comm.tree import TreeSum, plan_reduction
from paceline.comm.tree_exchange import Exchange
from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.memory.limits import Gauge
from paceline.parallel.placement import lay_out_like, local
from paceline.torch_seams.modules import BatchNormBase
from paceline.train.agreement import Agreed
from paceline.train.equal_copies import digest_tensor
from paceline.train.island_ranks import IslandRanks
from paceline.train.pieces import OwnPart
from paceline.train.same_settings import digest_text
from paceline.train.several import list_parts
from paceline.train.update import Update, Updated

log = logging.getLogger(__name__)

_HALF = 1 << 26  # a digest travels as two numbers that are exact in float64


@dataclass(frozen=True)
class Exchanged:
    """The results of an exchange that concern the whole world.

    Attributes:
        loss: mean over the period and all islands.
        stop_signum: the signal that some rank received, or 0.
    """

    loss: float
    stop_signum: int


class Islands:
    """The islands of this rank's block, of which one is in the model at a time.

    Collective: all ranks construct it, and call its methods in the same order.

    Args:
        ranks: where the islands are.
        group: the ranks with this one's place in other blocks; `None` for one block.
        is_main: whether this is rank 0.

    Attributes:
        is_split: whether the warm-up is over, so that the islands differ.
        num_apart: the number of steps since the last exchange.
    """

    def __init__(
        self,
        ranks: IslandRanks,
        update: Update,
        group: dist.ProcessGroup | None,
        *,
        is_main: bool,
        device: torch.device,
    ) -> None:
        self.ranks, self.is_split, self.num_apart = ranks, False, 0
        self._section, self._own, self._live = ranks.section, ranks.own, ranks.own[0]
        self._update, self._placement, self._model = update, update.placement, update.model
        self._group, self._is_main, self._device = group, is_main, device
        self._named = update.updated
        self._statistics = [
            buffer
            for module in self._model.modules()
            if isinstance(module, BatchNormBase)
            for buffer in module.buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        self._exchange = None if group is None else Exchange(group, device)
        self._plan = plan_reduction((len(self._own),) * ranks.num_blocks)
        self._residuals = Residuals()
        self._slots: SlotSum | None = None
        if self._section.codec != "none":
            self._refuse_dtypes()
            codec = CODECS[self._section.codec]
            self._slots = SlotSum(codec, self._section.count, self._residuals, group)
        self._pieces = [_find_rows(name, p) for name, p in self._named]
        self._waiting: list[tuple[list[Tensor], float, Agreed]] = []
        self._kept: dict[int, dict[str, Any]] = {}
        self._global: list[Tensor] = []
        self._global_statistics: list[Tensor] = []
        self._outer: torch.optim.SGD | None = None
        self._sums = {island: [0.0, 0.0] for island in self._own}
        update.islands = self

    @property
    def global_buffers(self) -> set[int]:
        """The buffers that have a global value, by `id`: BatchNorm's statistics."""
        return set(map(id, self._statistics))

    @property
    def _tensors(self) -> list[Tensor]:
        """This rank's parts of the weights in the model."""
        return [local(p.detach()) for _, p in self._named]

    # The warm-up

    def add_gradients(
        self, gradients: Sequence[Tensor], has: Sequence[bool], agreed: Agreed
    ) -> Agreed | None:
        """Replace an island's gradients by the sum over all islands; return what these have agreed on.

        Args:
            gradients: this rank's parts, in place.
            has: by parameter, whether the island has a gradient.
            agreed: by the island.

        Returns:
            `None` if another island of this block follows.
        """
        is_last = len(self._waiting) == len(self._own) - 1
        used = float(digest_text(repr(list(has))) % _HALF)
        own = list(gradients) if is_last else [g.clone() for g in gradients]
        self._waiting.append((own, used, agreed))
        if not is_last:
            return None
        waiting, self._waiting = self._waiting, []
        rows = [
            torch.tensor(
                [each.stop_signum, used, *each.losses, *each.weights, *each.statistics.flatten().tolist()],
                dtype=torch.float64,
            )
            for _, used, each in waiting
        ]
        table = self._gather(rows)
        if len(set(table[:, 1].tolist())) > 1:
            raise _unused_error()
        for target, total in zip(gradients, self._sum([own for own, _, _ in waiting]), strict=True):
            target.copy_(total)
        number = len(agreed.losses)
        return replace(
            agreed,
            stop_signum=int(table[:, 0].max()),
            losses=table[:, 2 : 2 + number].flatten().tolist(),
            weights=table[:, 2 + number : 2 + 2 * number].flatten().tolist(),
            statistics=table[:, 2 + 2 * number :].reshape(len(table) * number, agreed.statistics.shape[1]),
        )

    # Turns

    def take_turns(self, share: Share) -> Iterator[tuple[int, Share]]:
        """Yield (island, its microbatches) of each own island, while that is in the model."""
        yield from zip(self._turns(), self.ranks.cut(share), strict=True)

    def _turns(self) -> Iterator[int]:
        """Put one own island after the other into the model; after the last one the first is there again."""
        for island in self._own:
            self._enter(island)
            yield island
        self._enter(self._own[0])

    def _enter(self, island: int) -> None:
        if island == self._live or not self.is_split:
            return
        self._update.before_write()
        self._kept[self._live] = self._read()
        self._write(self._kept.pop(island))
        self._live = island

    def _read(self) -> dict[str, Any]:
        """Return a copy of the island in the model; its optimizer's tensors are not copied."""
        parts = list_parts(self._update.optimizer)
        return {
            "weights": [tensor.clone() for tensor in self._tensors],
            "buffers": [buffer.clone() for buffer in self._model.buffers()],
            "optimizer": [dict(part.state) for part in parts],
            "groups": [
                [
                    {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
                    for group in each
                ]
                for each in (part.param_groups for part in parts)
            ],
            "progress": copy.deepcopy(self._update.state_dict()),
        }

    @torch.no_grad()
    def _write(self, kept: dict[str, Any]) -> None:
        for target, value in zip(self._tensors, kept["weights"], strict=True):
            target.copy_(value)
        for target, value in zip(self._model.buffers(), kept["buffers"], strict=True):
            target.copy_(value)
        parts = list_parts(self._update.optimizer)
        for part, state, groups in zip(parts, kept["optimizer"], kept["groups"], strict=True):
            part.state.clear()
            part.state.update(state)
            for group, values in zip(part.param_groups, groups, strict=True):
                group.update(values)
        self._update.load_progress(kept["progress"])

    # Periods

    def join_turns(self, done: Sequence[dict[str, Updated]]) -> dict[str, Updated]:
        """Return the results of a step: of this rank's first island, or in the warm-up of all islands."""
        if not self.is_split:
            return done[-1]
        for island, each in zip(self._own, (each["model"] for each in done), strict=True):
            if math.isfinite(each.loss):
                self._sums[island][0] += each.loss * each.weight
                self._sums[island][1] += each.weight
        return done[0]

    def end_step(self, step: int, signum: int, *, is_last: bool) -> Exchanged | None:
        """End a step of all own islands; exchange if a period ends, and else return `None`; collective.

        Args:
            signum: the signal that this rank received, or 0.
            is_last: whether the run ends with it.
        """
        if not self.is_split:
            return None
        self.num_apart += 1
        is_due = self.num_apart == self._section.every
        return self.exchange(step, signum) if is_due or is_last else None

    def begin_step(self, step: int) -> None:
        """Let the islands differ from the first step after the warm-up on."""
        if not self.is_split and step > self._section.warmup_steps:
            self._split()

    @torch.no_grad()
    def _split(self) -> None:
        self._refuse_memory()
        self.is_split = True
        self._global = [tensor.clone() for tensor in self._tensors]
        self._global_statistics = [buffer.clone() for buffer in self._statistics]
        outer = self._section.outer
        self._outer = torch.optim.SGD(
            self._global,
            lr=outer.lr,
            momentum=outer.momentum,
            nesterov=outer.nesterov and outer.momentum > 0,
        )
        for island in self._own[1:]:
            kept = self._read()
            kept["optimizer"] = [
                {p: {key: copy.deepcopy(value) for key, value in state.items()} for p, state in part.items()}
                for part in kept["optimizer"]
            ]
            self._kept[island] = kept

    @torch.no_grad()
    def exchange(self, step: int, signum: int) -> Exchanged:
        """Average the islands' changes, and let all continue from the new global weights; collective."""
        assert self._outer is not None
        self._update.before_write()
        if self.num_apart < self._section.every and self._is_main:
            log.info("islands: the last period ends after %d steps, with an exchange", self.num_apart)
        self.num_apart = 0
        found = self._agree(step, signum)
        held = [self._held(island, self._tensors, "weights") for island in self._own]
        changes = [[before - now for before, now in zip(self._global, own, strict=True)] for own in held]
        if self._slots is None:
            totals = self._sum(changes)
        else:
            totals = [torch.empty_like(tensor) for tensor in self._global]
            rows = [[_view(t, piece) for t, piece in zip(own, self._pieces, strict=True)] for own in changes]
            targets = [_view(t, piece) for t, piece in zip(totals, self._pieces, strict=True)]
            self._slots.sum(self._pieces, rows, targets, 1.0)
            self._residuals.settle(keep=True)
        for tensor, total in zip(self._global, totals, strict=True):
            tensor.grad = total.div_(self._section.count)
        self._outer.step()
        for tensor in self._global:
            tensor.grad = None
        for own in held:
            for target, value in zip(own, self._global, strict=True):
                target.copy_(value)
        if self._statistics:
            buffers = [self._held(island, self._statistics, "buffers") for island in self._own]
            means = self._sum(buffers)
            self._global_statistics = [mean.div_(self._section.count) for mean in means]
        return found

    def _held(self, island: int, live: list[Tensor], key: str) -> list[Tensor]:
        """Return an own island's weights or statistics, where they are."""
        if island == self._live:
            return live
        found: list[Tensor] = self._kept[island][key]
        if key == "buffers":
            wanted = set(map(id, live))
            found = [b for b, own in zip(found, self._model.buffers(), strict=True) if id(own) in wanted]
        return found

    def _agree(self, step: int, signum: int) -> Exchanged:
        digest = sum(map(digest_tensor, self._global))
        halves = (float(digest % _HALF), float(digest // _HALF % _HALF))
        rows = [
            torch.tensor([signum, step, *halves, *self._sums[island]], dtype=torch.float64)
            for island in self._own
        ]
        table = self._gather(rows)
        for column, code, saw, rule in _SAME:
            if len(set(table[:, column].tolist())) > 1:
                fix = "Resume from the last checkpoint."
                raise PacelineError(code, saw=saw, rule=rule, fix=fix, on_every_rank=True)
        self._sums = {island: [0.0, 0.0] for island in self._own}
        total, weight = (math.fsum(table[:, column].tolist()) for column in (4, 5))
        # Ranks of one block may have got different signals.
        signums = torch.tensor([float(table[:, 0].max())], dtype=torch.float64, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(signums, dist.ReduceOp.MAX)
        return Exchanged(total / weight if weight else math.nan, int(signums))

    # The global weights

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have the global weights and statistics in the model inside of the context."""
        if not self.is_split:
            yield
            return
        live = [*self._tensors, *self._statistics]
        kept = [tensor.clone() for tensor in live]
        _copy(live, [*self._global, *self._global_statistics])
        try:
            yield
        finally:
            _copy(live, kept)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return on rank 0 all that a checkpoint has of the islands beside the global weights; collective.

        The state of the optimizer of island 0 is that of the checkpoint. Rank 0 holds all islands meanwhile.
        """
        if not self.is_split:
            return {}
        assert self._outer is not None
        islands = {}
        for island in self._turns():
            optimizer = self._update.optimizer_state() if island else None
            islands[str(island)] = {
                "weights": self._join(p.detach() for _, p in self._named),
                "buffers": {name: buffer.cpu().clone() for name, buffer in self._model.named_buffers()},
                "optimizer": optimizer,
                "progress": copy.deepcopy(self._update.state_dict()),
                "sums": list(self._sums[island]),
            }
        momentum = None
        if any(self._outer.state.get(tensor) for tensor in self._global):
            buffers = (self._outer.state[tensor]["momentum_buffer"] for tensor in self._global)
            momentum = self._join(buffers) if self._section.outer.momentum else None
        gathered: list[Any] | None = [islands]
        if dist.is_initialized() and dist.get_world_size() > 1:
            gathered = [None] * dist.get_world_size() if self._is_main else None
            leads = dist.get_rank() % self.ranks.layout.num_ranks == 0
            dist.gather_object(islands if leads else {}, gathered, dst=0)
        found = {island: state for own in gathered or [] for island, state in own.items()}
        shapes = {name: self._placement.whole_shape(name, p) for name, p in self._named}
        residuals = self._residuals.gather(shapes)
        statistics = [each.cpu() for each in self._global_statistics]
        return {
            "islands": found,
            "num_apart": self.num_apart,
            "momentum": momentum,
            "residuals": {str(slot): by_name for slot, by_name in residuals.items()},
            "statistics": statistics,
        }

    def needs(self, names: Sequence[Any]) -> bool:
        """Return whether this rank needs a tensor of a checkpoint.

        Args:
            names: that lead to it.
        """
        if tuple(names[:3]) == ("state", "islands", "islands"):
            return int(names[3]) in self._own
        if tuple(names[:3]) == ("state", "islands", "residuals"):
            return int(names[3]) == SUM or int(names[3]) in self._own
        return True

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`, after the model and the optimizer of island 0."""
        self.is_split, self._live, self._kept, self._waiting = False, self._own[0], {}, []
        self.num_apart = 0
        if not state:
            return
        if (saved_count := len(state["islands"])) != self._section.count:
            raise PacelineError(
                "PL676",
                saw=f"islands.count={self._section.count}, and a checkpoint of {saved_count} islands.",
                rule="After the warm-up every island has weights and optimizer state of its own.",
                fix=f"Set islands.count to {saved_count}, or to 1 to go on with the global weights.",
            )
        self._split()
        self.num_apart = state["num_apart"]
        assert self._outer is not None
        for target, value in zip(self._global_statistics, state["statistics"], strict=True):
            target.copy_(value)
        for island in self._turns():
            saved = state["islands"][str(island)]
            _copy(self._tensors, self._cut(saved["weights"]))
            for name, buffer in self._model.named_buffers():
                buffer.copy_(saved["buffers"][name])
            if saved["optimizer"] is not None:
                self._update.load_optimizer_state(self._cut_optimizer(saved["optimizer"]))
            self._update.load_progress(saved["progress"])
            self._sums[island] = list(saved["sums"])
        if state["momentum"] is not None:
            for target, value in zip(self._global, self._cut(state["momentum"]), strict=True):
                self._outer.state[target]["momentum_buffer"] = value.to(target).clone()
        self._residuals.load(
            {
                (int(slot), name): rows.to(self._device)
                for slot, by_name in state["residuals"].items()
                if self.needs(("state", "islands", "residuals", slot))
                for name, rows in by_name.items()
            }
        )

    def _join(self, tensors: Any) -> dict[str, Tensor]:
        found = {}
        for (name, parameter), tensor in zip(self._named, tensors, strict=True):
            part = lay_out_like(local(tensor), parameter)
            found[name] = self._placement.whole(name, part).to("cpu", copy=True)
        return found

    def _cut(self, whole: dict[str, Tensor]) -> list[Tensor]:
        return [self._placement.part(name, whole[name], p) for name, p in self._named]

    def _cut_optimizer(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the state of an optimizer with this rank's parts in place of whole tensors."""
        named = dict(self._named)
        found = {}
        for name, saved in tree["parameters"].items():
            state = dict(saved["state"])
            for key, value in state.items():
                p = named.get(name)
                if p is not None and isinstance(value, Tensor) and self._placement.divides(name, p, value):
                    state[key] = OwnPart(name, self._placement.part(name, value, p).clone())
            found[name] = saved | {"state": state}
        return tree | {"parameters": found}

    # Sums over islands

    def _gather(self, rows: list[Tensor]) -> Tensor:
        """Return the row of numbers of every island, on the CPU; collective."""
        own = torch.stack(rows).to(self._device)
        if self._group is None:
            return own.cpu()
        found = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(found, own, group=self._group)
        return torch.cat(found).cpu()

    def _sum(self, own: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the sum over all islands of each tensor, in the order of the tree; collective."""
        shapes = [tensor.shape for tensor in own[0]]
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in own[0]):
            places = [place for place, tensor in enumerate(own[0]) if tensor.dtype == dtype]
            tree: TreeSum[Tensor] = TreeSum(self._section.count, lambda left, right: left.add_(right))
            for island, tensors in zip(self._own, own, strict=True):
                flat = torch.cat([tensors[place].reshape(-1) for place in places])
                tree.push((island, island + 1), flat)
            subtrees = [value for _, value in tree.subtrees]
            total = subtrees[-1]
            if self._exchange is not None:
                self._exchange.sum_subtrees(subtrees, self._plan, total)
            sizes = [shapes[place].numel() for place in places]
            found |= dict(zip(places, torch.split(total, sizes), strict=True))
        return [found[place].view(shape) for place, shape in enumerate(shapes)]

    # Refusals

    def _refuse_dtypes(self) -> None:
        for name, parameter in self._named:
            if parameter.dtype != torch.float32:
                raise PacelineError(
                    "PL671",
                    saw=f"islands.codec={self._section.codec!r} for {name} of {parameter.dtype}.",
                    rule="Codecs encode the changes of fp32 parameters.",
                    fix='Use dtype "fp32", "bf16" or "fp16", or islands.codec="none".',
                )

    def _refuse_memory(self) -> None:
        """Raise PL674 if the islands that take turns do not fit into memory."""
        num_turns = len(self._own)
        if num_turns == 1:
            return
        weights = sum(tensor.nbytes for tensor in self._tensors)
        states = [value for p in self._update.optimizer.state.values() for value in p.values()]
        moments = sum(local(each).nbytes for each in states if isinstance(each, Tensor))
        one = weights + (moments or 2 * weights)
        needed = (num_turns - 1) * one + (num_turns + 4) * weights
        if self._device.type == "cuda":
            free: float = torch.cuda.mem_get_info(self._device)[0]
        else:
            use = Gauge().read_fullest()
            free = use.limit - use.used
        if needed > free:
            raise PacelineError(
                "PL674",
                saw=f"{num_turns} islands in turns on this rank need {needed / 1e6:,.0f} MB more, and "
                f"{free / 1e6:,.0f} MB are free: {(needed - free) / 1e6:,.0f} MB are missing.",
                rule="Each island that waits for its turn keeps its weights and the state of its optimizer.",
                fix="Use more ranks, which share out the islands, or a smaller model.",
            )


_SAME: tuple[tuple[int, str, str, str], ...] = (
    (1, "PL430", "islands are at different steps.", "Every island takes the same steps."),
    *(
        (
            column,
            "PL418",
            "the global weights of the islands' ranks have different bits.",
            "All ranks apply the same sum to them.",
        )
        for column in (2, 3)
    ),
)


def _unused_error() -> PacelineError:
    return PacelineError(
        "PL675",
        saw="islands have used different parameters in a step of the warm-up.",
        rule="The warm-up adds the islands' gradients, and a parameter has one on all islands or none.",
        fix="Use every parameter in every microbatch (multiply what must not count by zero), or set "
        "islands.warmup_steps to 0.",
        on_every_rank=True,
    )


def _find_rows(name: str, parameter: Tensor) -> RowRange:
    """Return this rank's rows of a parameter that only dp_shard may divide, as numbered in the whole."""
    whole = RowRange.all_of(name, parameter.shape)
    if not isinstance(parameter, DTensor):
        return whole
    axis = parameter.device_mesh
    first = min(axis.get_local_rank() * -(-whole.num_rows // axis.size()), whole.num_rows)
    return RowRange(name, first, first + local(parameter).shape[0], whole.length)


def _view(tensor: Tensor, piece: RowRange) -> Tensor:
    return tensor.view(piece.num_rows, piece.length)


@torch.no_grad()
def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(local(value))
