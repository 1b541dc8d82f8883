"""Shares the experts of a model among the ranks of ep, and sends each token to its experts and back.

Protocol of one round, in which each rank of ep runs one microbatch or none. Per mixture, in the order of the
forward:

1. Each rank sorts its rows by expert, as in one process, and tells every other how many it sends.
2. The rows travel to the ranks that hold their experts.
3. With the exact reduction each rank multiplies the rows of one microbatch after the other, as one process
   does. Otherwise the rows of all ranks that go to one expert are one product.
4. The answers travel back. Each rank weights and adds the answers to its own tokens.

Backward does the same in reverse. A rank without a microbatch left runs an idle round (`join_forward`,
`join_backward`): it has no tokens and runs nothing but the mixtures, so that the others can use its experts.

So outputs and gradients of each microbatch have the bits of one process, and a rank stores 1/ep of the
experts, of their gradients and of their optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import gcd
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.exchange import Exchange, MessageExchange
from paceline.comm.shared_memory import SharedMemoryExchange
from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.models.moe import Experts
from paceline.parallel.experts.exchange import exchange_counts, exchange_rows
from paceline.parallel.experts.gradients import ExpertSum, OrderedExpertSum, QuickExpertSum
from paceline.parallel.parameter_hooks import check_hooks, has_hooks
from paceline.parallel.split import Split, take_parts
from paceline.torch_seams.tensors import is_fake

# The parameters of `Experts`, in the order in which `Experts.multiply` takes them.
WEIGHTS = ("gate_up_proj", "down_proj")


class ExpertLayout:
    """The experts of one model, shared among the ranks of ep.

    Collective: every rank must construct it. The model's parameters are replaced by this rank's parts.

    Args:
        model: whole, with the same weights on every rank, or on meta.
        mesh: the ranks.
        is_exact: whether to sum gradients in an order that does not depend on the ranks.
        device: of the laid-out model.

    Attributes:
        splits: of the experts' parameters, by full name.
        names: of the experts, in the order of the forward.
        number: of the round whose forward runs; runners set it.

    Raises:
        PacelineError: PL653 for a model without experts, PL655 if ep does not divide them, PL657 for hooks on
            their parameters, PL434 for hooks on accumulated gradients.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, is_exact: bool, device: torch.device) -> None:
        self._axis, self._mesh = mesh.ep, mesh
        self._modules = find_experts(model)
        self.names = list(self._modules)
        self._check(mesh.ep.size)
        self.splits = {
            f"{name}.{key}": Split(0, 1, mesh.ep.size, "ep") for name in self._modules for key in WEIGHTS
        }
        named = dict(model.named_parameters())
        check_hooks((name, named[name]) for name in self.splits)
        for name in self.splits:
            _refuse_hooks(name, named[name])
        take_parts(model, self.splits, mesh.ep.rank)
        for module in self._modules.values():
            module.forward = MethodType(self._make_forward(), module)  # type: ignore[method-assign]
        self._lent = [mesh.borrow_group(mesh.ep)]
        self._group = self._lent[0]
        copies = None
        if is_exact and mesh.expert_replicas.size > 1:
            copies = mesh.borrow_group(mesh.expert_replicas)
            self._lent.append(copies)
        self._is_exact, self._copies_group, self._device = is_exact, copies, device
        self.number = 0
        self._stages: dict[int, list[Experts]] = {}
        self._sums: dict[int, ExpertSum] = {}
        self._sum_of: dict[int, ExpertSum] = {}
        self._microbatches: list[list[int | None]] = []
        self._answers: dict[tuple[int, int], list[Tensor]] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parts of the experts' parameters."""
        return [weight for module in self._modules.values() for weight in _list_weights(module)]

    def complete(self, stages: Mapping[str, int] | None = None) -> None:
        """Prepare the sums of the gradients, once the parameters have their values; collective.

        Args:
            stages: by full name of this rank's experts, the stage of pp that runs them. Without pp, all are
                of stage 0.
        """
        exchange: Exchange | None = None
        if self._copies_group is not None:
            on_cpu = self._device.type == "cpu"
            exchange = (
                SharedMemoryExchange(self._copies_group)
                if on_cpu
                else MessageExchange(self._copies_group, self._device)
            )
        stages = dict.fromkeys(self._modules, 0) if stages is None else stages
        for name, stage in stages.items():
            self._stages.setdefault(stage, []).append(self._modules[name])
        copies = self._mesh.expert_replicas
        for stage, modules in sorted(self._stages.items()):
            trained = [p for module in modules for p in _list_weights(module) if p.requires_grad]
            self._sums[stage] = (
                OrderedExpertSum(trained, self._axis, copies, exchange)
                if self._is_exact
                else QuickExpertSum(trained, self._axis, copies)
            )
            self._sum_of |= {id(module): self._sums[stage] for module in modules}

    def describe(self) -> str:
        """Return a line for the log."""
        counts = sorted({self._count(module) for module in self._modules.values()})
        return (
            f"experts: {len(self._modules)} mixtures of {' or '.join(map(str, counts))} experts, over "
            f"ep={self._axis.size}, {self._mesh.expert_replicas.size} copies"
        )

    def count_rounds(self, num_owned: tuple[int, ...]) -> int:
        """Return the number of rounds of the ranks that share this rank's experts.

        Args:
            num_owned: per rank of dp_replicate, the number of microbatches that it computes.
        """
        return max(num_owned[source] for source in self._list_sources())

    def begin(self, num_owned: tuple[int, ...], *, idle_first: bool) -> None:
        """Start a global batch; see `count_rounds`.

        Args:
            num_owned: per rank of dp_replicate, the number of microbatches that it computes.
            idle_first: whether ranks with fewer microbatches run idle rounds first, or last.
        """
        num_rounds = self.count_rounds(num_owned)
        self._microbatches = []
        for number in range(num_rounds):
            row: list[int | None] = []
            for source in self._list_sources():
                own = number - (num_rounds - num_owned[source] if idle_first else 0)
                is_idle = not 0 <= own < num_owned[source]
                row.append(None if is_idle else sum(num_owned[:source]) + own)
            self._microbatches.append(row)
        for each in self._sums.values():
            each.begin(num_owned)

    def join_forward(
        self, autocast: Callable[[], AbstractContextManager[Any]], number: int, stage: int = 0
    ) -> None:
        """Take part in the other ranks' forward of a round without tokens.

        Args:
            autocast: returns the context of a forward.
            number: of the round.
            stage: of pp.
        """
        self.number = number
        answers = []
        with autocast():
            for module in self._stages.get(stage, ()):
                rows = module.gate_up_proj.new_empty(0, module.gate_up_proj.shape[2])
                counts = torch.zeros(self._count(module), dtype=torch.int64, device=rows.device)
                answers.append(self._answer(module, rows, counts))
        if torch.is_grad_enabled():
            self._answers[number, stage] = answers

    def join_backward(self, number: int, stage: int = 0) -> None:
        """Take part in the other ranks' backward of a round without tokens; see `join_forward`."""
        for answer in reversed(self._answers.pop((number, stage))):
            answer.backward(torch.zeros_like(answer))  # type: ignore[no-untyped-call]
        self.end_round(number, stage)

    def end_round(self, number: int, stage: int = 0) -> None:
        """End a round of a step, after its backward."""
        if stage in self._sums:
            self._sums[stage].end_round(number, self._microbatches[number])

    def end(self) -> None:
        """Put the sums of the gradients into the parameters; collective."""
        assert not self._answers
        for each in self._sums.values():
            each.end()

    def close(self) -> None:
        """Return the groups to the mesh."""
        for group in self._lent:
            self._mesh.return_group(group)
        self._lent = []

    def _list_sources(self) -> range:
        """Return the ranks of dp_replicate that share this rank's copy of the experts."""
        start = self._mesh.expert_replicas.rank * self._axis.size
        return range(start, start + self._axis.size)

    def _check(self, degree: int) -> None:
        for name, module in self._modules.items():
            num_experts = module.gate_up_proj.shape[0]
            if num_experts % degree:
                raise experts_not_divided_error(degree, f"the {num_experts} experts of {name}", num_experts)

    def _count(self, module: Experts) -> int:
        return module.gate_up_proj.shape[0] * self._axis.size

    def _make_forward(self) -> Callable[[Experts, Tensor, Tensor], Tensor]:
        def forward(module: Experts, rows: Tensor, counts: Tensor) -> Tensor:
            return self._answer(module, rows, counts)

        return forward

    def _answer(self, module: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' answers to this rank's rows; collective over ep, in backward too."""
        if is_fake(rows):
            return module.multiply(rows, counts, *_list_weights(module))  # a trial forward, for shapes
        kind = rows.device.type
        if torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))  # as the product does, but before the way
        if torch.is_grad_enabled():
            for key in WEIGHTS:
                _refuse_hooks(key, getattr(module, key))
            if not rows.requires_grad:
                # The other ranks' backward needs this rank's, whatever is frozen here.
                rows = rows.detach().requires_grad_()
        arrived = exchange_counts(counts, self._group)
        sent = counts.view(self._axis.size, -1).sum(1).tolist()
        received = arrived.sum(1).tolist()
        found = exchange_rows(rows, sent, received, self._group)
        multiply = self._multiply_apart if self._is_exact else _multiply_together
        return exchange_rows(multiply(module, found, arrived), received, sent, self._group)

    def _multiply_apart(self, module: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the answers, from one product per rank and expert."""
        answers = []
        for place, part in enumerate(torch.split(rows, counts.sum(1).tolist())):
            weights: list[Tensor] = [*_list_weights(module)]
            if torch.is_grad_enabled():
                use = self._sum_of[id(module)].use
                weights = [use(w, place, self.number) if w.requires_grad else w for w in weights]
            answers.append(module.multiply(part, counts[place], *weights))
        return torch.cat(answers)


def _list_weights(module: Experts) -> list[nn.Parameter]:
    return [getattr(module, key) for key in WEIGHTS]


def _multiply_together(module: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the answers, from one product per expert."""
    experts = torch.arange(counts.shape[1], device=rows.device).repeat(counts.shape[0])
    order = experts.repeat_interleave(counts.reshape(-1)).argsort(stable=True)
    weights = _list_weights(module)
    answers = module.multiply(rows.index_select(0, order), counts.sum(0), *weights)
    return answers.index_select(0, order.argsort())


def find_experts(model: nn.Module) -> dict[str, Experts]:
    """Return the experts of all mixtures of a model by full name, in the order of the forward."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Experts)}


def count_experts(model: nn.Module) -> int:
    """Return the greatest number of experts that every mixture of a model is a multiple of; 0 for none."""
    return gcd(*(module.gate_up_proj.shape[0] for module in find_experts(model).values()))


def experts_not_divided_error(degree: int, what: str, num_experts: int) -> PacelineError:
    """Return the error for experts that ep does not divide."""
    fitting = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
    return PacelineError(
        "PL655",
        saw=f"layout.ep={degree} does not divide {what}.",
        rule="Each rank of ep holds equally many experts of each mixture.",
        fix=f"Set ep to one of {', '.join(map(str, fitting))}.",
    )


def _refuse_hooks(name: str, parameter: Tensor) -> None:
    if has_hooks(parameter):
        raise PacelineError(
            "PL657",
            saw=f"a hook of register_hook on {name}, with layout.ep above 1.",
            rule="Such a hook gets the gradient of one microbatch for the whole parameter. Under ep no rank "
            "has that for experts.",
            fix="Read the sums with trainer.on_gradients, or train this model without ep.",
        )
