"""Shares the experts of a model among the ranks of ep, and sends each token to its experts and back.

Protocol of one round, in which each rank of ep runs one microbatch or none. Per mixture, in the order of the
forward:

1. Each rank sorts its rows by expert, as in one process, and sends every other rank the number of rows that
follow. 2. The rows travel to the ranks that hold their experts. 3. With the exact reduction each rank
multiplies the rows of one microbatch after the other, as one process
   does. Otherwise the rows of all ranks that go to one expert are one product.
4. The answers travel back. Each rank weights and adds the answers to its own tokens.

Backward does the same in reverse. A rank without a microbatch left runs an idle round (`join_forward`,
`join_backward`): it has no tokens and runs nothing but the mixtures, so that the others can use its experts.
With recompute, the backward of a block begins with the exchanges of its second forward, in idle rounds too.

Under cp all ranks of a data rank have the same rows. Each takes those for some experts through these steps,
and then they exchange the answers (`spread.py`).

So outputs and gradients of each microbatch have the bits of one process, and a rank stores 1/ep of the
experts, of their gradients and of their optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.parallel.experts.expert_sums import ExpertSum
from paceline.parallel.experts.forms import Answer, ExpertForm, hide_functions
from paceline.parallel.experts.mixtures import check_forms, find_experts
from paceline.parallel.experts.spread import SameRows
from paceline.parallel.experts.token_exchange import exchange_counts, exchange_rows
from paceline.parallel.experts.turns import Turns
from paceline.parallel.parameter_hooks import check_hooks, has_hooks
from paceline.parallel.split import Split, take_parts
from paceline.parallel.sums.gradient_sum import RankSum
from paceline.torch_seams.tensors import is_fake


@dataclass(frozen=True)
class _IdleBlock:
    """The mixtures of one block in an idle round, between its forward and its backward.

    Attributes:
        answers: to none of this rank's rows.
        is_recomputed: whether the block's backward begins with a second forward.
    """

    forms: list[ExpertForm]
    answers: list[Tensor]
    is_recomputed: bool


class ExpertLayout:
    """The experts of one model, shared among the ranks of ep.

    Collective: every rank must construct it. The model's parameters are replaced by this rank's parts.

    Args:
        model: whole, with the same weights on every rank, or on meta.
        is_exact: whether to sum gradients in an order that does not depend on the ranks.
        recomputed: names of the blocks whose forward backward repeats.

    Attributes:
        splits: of the experts' parameters, by full name.
        names: of the experts, in the order of the forward, each with the full name of its first parameter.
        number: of the round whose forward runs.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        is_exact: bool,
        device: torch.device,
        recomputed: Sequence[str] = (),
    ) -> None:
        self._recomputed = tuple(recomputed)
        # Of the ranks of ep, those with tokens of other microbatches, and those of cp with the same tokens.
        self._axis, self._sources, self._mesh = mesh.ep, mesh.ep_data, mesh
        check_forms(model)
        self._forms = find_experts(model)
        self.names = {name: f"{name}.{form.keys[0]}".removeprefix(".") for name, form in self._forms.items()}
        self._name_of = {id(form): name for name, form in self._forms.items()}
        self._num_experts = {id(form): form.num_experts for form in self._forms.values()}
        self._check(mesh.ep.size)
        self.splits = {
            f"{name}.{key}".removeprefix("."): Split(0, 1, mesh.ep.size, "ep")
            for name, form in self._forms.items()
            for key in form.keys
        }
        named = dict(model.named_parameters())
        check_hooks((name, named[name]) for name in self.splits)
        for name in self.splits:
            _refuse_hooks(name, named[name])
        take_parts(model, self.splits, mesh.ep.rank)
        for form in self._forms.values():
            forward = form.make_forward(self._num_experts[id(form)], self._make_answer(form))
            form.module.forward = MethodType(hide_functions(forward), form.module)
        self._lent = [mesh.borrow_group(mesh.ep_data)]
        self._group = self._lent[0]
        self._spread = SameRows()
        if mesh.ep_cp.size > 1:
            self._lent.append(mesh.borrow_group(mesh.ep_cp))
            self._spread = SameRows(mesh.ep_cp.size, mesh.ep_cp.rank, self._lent[-1])
        copies = None
        if is_exact and mesh.expert_replicas.size > 1:
            copies = mesh.borrow_group(mesh.expert_replicas)
            self._lent.append(copies)
        self._is_exact, self._copies_group, self._device = is_exact, copies, device
        self.number = 0
        self._turns = Turns(list(self._forms), goes_in_stages=mesh.pp.size > 1)
        model.register_forward_pre_hook(self._turns.begin)
        # A stage of pp leaves the forward by an exception.
        model.register_forward_hook(self._turns.end, always_call=True)
        self._stages: dict[int, list[ExpertForm]] = {}
        self._sums: dict[int, ExpertSum] = {}
        self._sum_of: dict[int, ExpertSum] = {}
        self._microbatches: list[list[int | None]] = []
        self._idle: dict[tuple[int, int], list[_IdleBlock]] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parts of the experts' parameters."""
        return [weight for form in self._forms.values() for weight in form.list_weights()]

    def complete(self, stages: Mapping[str, int] | None = None) -> None:
        """Prepare the sums of the gradients, once the parameters have their values; collective.

        Args:
            stages: by full name of this rank's experts, the stage of pp that runs them. Without pp, all are
                of stage 0.
        """
        copies = self._mesh.expert_replicas
        ranks = RankSum(self._copies_group, self._device, is_exact=self._is_exact, replicas=copies)
        stages = dict.fromkeys(self._forms, 0) if stages is None else stages
        for name, stage in stages.items():
            self._stages.setdefault(stage, []).append(self._forms[name])
        for stage, forms in sorted(self._stages.items()):
            trained = [p for form in forms for p in form.list_weights() if p.requires_grad]
            self._sums[stage] = ExpertSum(trained, self._sources, copies, ranks)
            self._sum_of |= {id(form): self._sums[stage] for form in forms}

    def describe(self) -> str:
        """Return a line for the log."""
        counts = sorted(set(self._num_experts.values()))
        return (
            f"experts: {len(self._forms)} mixtures of {' or '.join(map(str, counts))} experts, over "
            f"ep={self._axis.size}, {self._mesh.expert_replicas.size} copies"
        )

    def count_rounds(self, num_owned: tuple[int, ...]) -> int:
        """Return the number of rounds of the ranks that share this rank's experts.

        Args:
            num_owned: per data rank, the number of microbatches that it computes.
        """
        return max(num_owned[source] for source in self._list_sources())

    def begin(self, num_owned: tuple[int, ...], *, idle_first: bool, num_rounds: int | None = None) -> None:
        """Start a global batch; see `count_rounds`.

        Args:
            num_owned: per data rank, the number of microbatches that it computes.
            idle_first: whether ranks with fewer microbatches run idle rounds first, or last.
            num_rounds: of the step, if ranks beside those that share experts run more.
        """
        num_rounds = self.count_rounds(num_owned) if num_rounds is None else num_rounds
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
        self.start_round(0)

    def start_round(self, number: int) -> None:
        """Start a round, before its forward; under pp, of one stage."""
        self.number = number
        self._turns.num_forwards = 0

    def join_forward(
        self, autocast: Callable[[], AbstractContextManager[Any]], number: int, stage: int = 0
    ) -> None:
        """Take part in the other ranks' forward of a round without tokens.

        Args:
            autocast: returns the context of a forward.
        """
        self.start_round(number)
        blocks = []
        with autocast():
            for block, forms in groupby(self._stages.get(stage, ()), key=self._find_block):
                own = list(forms)
                blocks.append(_IdleBlock(own, [self._answer_nothing(form) for form in own], block != ""))
        if torch.is_grad_enabled():
            self._idle[number, stage] = blocks

    def join_backward(
        self, autocast: Callable[[], AbstractContextManager[Any]], number: int, stage: int = 0
    ) -> None:
        """Take part in the other ranks' backward of a round without tokens; see `join_forward`."""
        for block in reversed(self._idle.pop((number, stage))):
            if block.is_recomputed:
                with torch.no_grad(), autocast():
                    for form in block.forms:
                        self._answer_nothing(form)
            for answer in reversed(block.answers):
                answer.backward(torch.zeros_like(answer))  # type: ignore[no-untyped-call]
        self.end_round(number, stage)

    def _answer_nothing(self, form: ExpertForm) -> Tensor:
        """Take part in an exchange without rows; return the answers to none."""
        rows = form.list_weights()[0].new_empty(0, form.width)
        counts = torch.zeros(self._num_experts[id(form)], dtype=torch.int64, device=rows.device)
        return self._answer(form, rows, counts)

    def _find_block(self, form: ExpertForm) -> str:
        """Return the name of the recomputed block that the experts are in, or \"\" for none."""
        name = self._name_of[id(form)]
        return next((block for block in self._recomputed if name.startswith(f"{block}.")), "")

    def end_round(self, number: int, stage: int = 0) -> None:
        """End a round of a step, after its backward."""
        if stage in self._sums:
            self._sums[stage].end_round(number, self._microbatches[number])

    def end(self) -> None:
        """Put the sums of the gradients into the parameters; collective."""
        assert not self._idle
        for each in self._sums.values():
            each.end()

    def close(self) -> None:
        """Return the groups to the mesh."""
        for group in self._lent:
            self._mesh.return_group(group)
        self._lent = []

    def _list_sources(self) -> range:
        """Return the data ranks that share this rank's copy of the experts."""
        start = self._mesh.expert_replicas.rank * self._sources.size
        return range(start, start + self._sources.size)

    def _check(self, degree: int) -> None:
        for name, form in self._forms.items():
            if form.num_experts % degree:
                what = f"the {form.num_experts} experts of {name}"
                raise experts_not_divided_error(degree, what, form.num_experts)

    def _make_answer(self, form: ExpertForm) -> Answer:
        def answer(rows: Tensor, counts: Tensor) -> Tensor:
            if not is_fake(rows):
                self._turns.take(self._name_of[id(form)])
            return self._answer(form, rows, counts)

        return answer

    def _answer(self, form: ExpertForm, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' answers to this rank's rows; collective over ep, in backward too."""
        if is_fake(rows):
            return form.multiply(rows, counts, form.list_weights())  # a trial forward, for shapes
        kind = rows.device.type
        if torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))  # as the product does, but before the way
        if torch.is_grad_enabled():
            for key, weight in zip(form.keys, form.list_weights(), strict=True):
                _refuse_hooks(key, weight)
            if not rows.requires_grad:
                # The other ranks' backward needs this rank's, whatever is frozen here.
                rows = rows.detach().requires_grad_()
        lengths = counts.view(self._axis.size, -1).sum(1).tolist()
        spread = self._spread
        # On the host: the products below read them for each group of rows.
        arrived = exchange_counts(spread.pick(counts, self._axis.size), self._group).cpu()
        sent, received = lengths[spread.rank :: spread.size], arrived.sum(1).tolist()
        found = exchange_rows(spread.take(rows, lengths), sent, received, self._group)
        multiply = self._multiply_apart if self._is_exact else _multiply_together
        answers = exchange_rows(multiply(form, found, arrived), received, sent, self._group)
        return spread.join(answers, lengths)

    def _multiply_apart(self, form: ExpertForm, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the answers, from one product per rank and expert."""
        answers = []
        for place, part in enumerate(torch.split(rows, counts.sum(1).tolist())):
            weights: list[Tensor] = [*form.list_weights()]
            if torch.is_grad_enabled():
                use = self._sum_of[id(form)].use
                weights = [use(w, place, self.number) if w.requires_grad else w for w in weights]
            answers.append(form.multiply(part, counts[place], weights))
        return torch.cat(answers)


def _multiply_together(form: ExpertForm, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the answers, from one product per expert."""
    experts = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    order = experts.repeat_interleave(counts.reshape(-1)).argsort(stable=True).to(rows.device)
    answers = form.multiply(rows.index_select(0, order), counts.sum(0), form.list_weights())
    return answers.index_select(0, order.argsort())


def experts_not_divided_error(degree: int, what: str, num_experts: int) -> PacelineError:
    """Return the error for experts that ep does not divide."""
    fitting = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
    return PacelineError(
        "PL655",
        saw=f"layout.ep={degree} does not divide {what}.",
        rule="Each rank of ep holds the same number of experts of each mixture.",
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
