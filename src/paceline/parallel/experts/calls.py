"""Sends the inputs of experts in a list to the ranks that hold them, and the answers back.

Per mixture: a message with the type and the shape of each expert's input, 48 bytes per expert; then the
inputs as rows; then the answers as rows. Each rank computes its experts' answers to the inputs of one rank
after the other, each input by itself. All ranks of ep must call `answer_calls` in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.experts.exchange import exchange_counts, exchange_rows
from paceline.parallel.experts.lists import MAX_DIMS, ListForm
from paceline.parallel.experts.loop import loop_error
from paceline.parallel.experts.spread import SameRows
from paceline.parallel.tensor.collectives import differentiate

# In messages, a type is its place here.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# From a parameter, and the place in ep of the rank whose input it meets, to what is used instead.
Use = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class _Header:
    """The type and the shape of an expert's input."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    def pack(self) -> list[int]:
        padding = [0] * (MAX_DIMS - len(self.shape))
        return [len(self.shape), _DTYPES.index(self.dtype), *self.shape, *padding]

    @staticmethod
    def unpack(numbers: list[int]) -> _Header | None:
        num_dims, place, *sizes = numbers
        return _Header(_DTYPES[place], tuple(sizes[:num_dims])) if num_dims else None


def answer_calls(
    form: ListForm,
    calls: Mapping[int, Tensor],
    group: dist.ProcessGroup,
    spread: SameRows,
    device: torch.device,
    use: Use,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return all answers to this rank's calls as rows, and each by its expert's number; collective.

    Args:
        form: the experts.
        calls: inputs by number of the expert.
        group: the ranks of ep with tokens of other microbatches.
        spread: those of cp with the same tokens.
        device: of the inputs.
        use: returns what takes the place of a parameter that is trained.

    Raises:
        PacelineError: PL662 for inputs of several types or widths, or with more than `MAX_DIMS` dimensions.
    """
    num_runs, numbers = group.size() * spread.size, sorted(calls)
    headers = {number: _read_header(form, calls[number]) for number in numbers}
    if len({(header.dtype, header.shape[-1]) for header in headers.values()}) > 1:
        raise loop_error(form.name, "experts are called with tensors of several types or widths.")
    packed = [headers[n].pack() if n in headers else [0] * (2 + MAX_DIMS) for n in range(form.num_experts)]
    arrived = [
        [_Header.unpack(numbers) for numbers in each]
        for each in exchange_counts(
            spread.pick(torch.tensor(packed, device=device), num_runs), group
        ).tolist()
    ]
    known = [*headers.values(), *(header for each in arrived for header in each if header is not None)]
    like = known[0] if known else _Header(torch.float32, (1,))
    flat = [calls[number].reshape(-1, like.shape[-1]) for number in numbers]
    rows = torch.cat(flat) if flat else torch.empty(0, like.shape[-1], dtype=like.dtype, device=device)
    if torch.is_grad_enabled() and not rows.requires_grad:
        # The other ranks' backward needs this rank's, whatever is frozen here.
        rows = rows.detach().requires_grad_()
    each_run = form.num_experts // num_runs
    lengths = [0] * num_runs
    for number, header in headers.items():
        lengths[number // each_run] += header.num_rows
    sent = lengths[spread.rank :: spread.size]
    received = [sum(header.num_rows for header in each if header is not None) for each in arrived]
    found = exchange_rows(spread.take(rows, lengths), sent, received, group)
    answers = _compute(form, found, arrived, use)
    back = spread.join(exchange_rows(answers, received, sent, group), lengths)
    parts = torch.split(back, [headers[number].num_rows for number in numbers])
    return back, {
        number: part.view(*headers[number].shape[:-1], part.shape[-1])
        for number, part in zip(numbers, parts, strict=True)
    }


def _read_header(form: ListForm, given: Tensor) -> _Header:
    if not 1 <= given.dim() <= MAX_DIMS or given.dtype not in _DTYPES:
        saw = f"an expert is called with {given.dtype} of {given.dim()} dimensions."
        raise loop_error(form.name, saw)
    return _Header(given.dtype, tuple(given.shape))


def _compute(form: ListForm, rows: Tensor, arrived: list[list[_Header | None]], use: Use) -> Tensor:
    """Return the answers of this rank's experts as rows, those to rank 0 first."""
    wanted = [
        (place, number, header)
        for place, headers in enumerate(arrived)
        for number, header in zip(form.numbers, headers, strict=True)
        if header is not None
    ]
    answers = []
    parts = torch.split(rows, [header.num_rows for _, _, header in wanted]) if wanted else ()
    for (place, number, header), part in zip(wanted, parts, strict=True):
        weights: list[Tensor] = [*form.list_weights_of(number)]
        if torch.is_grad_enabled():
            weights = [use(w, place) if w.requires_grad else w for w in weights]
        answer = form.compute(number, _copy(part).view(header.shape), weights)
        answers.append(_copy(answer).reshape(-1, answer.shape[-1]))
    if answers:
        return torch.cat(answers)
    # No rows, with the width and the type of the answers that arrive from other ranks.
    width, dtype = form.answer_kind or (1, rows.dtype)
    return rows.sum(-1, keepdim=True).expand(-1, width).to(dtype)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy, whose gradient is copied too.

    A part of a larger tensor may begin anywhere in memory. Kernels may then add its numbers in another order
    than those of a separate tensor, which one process has.
    """
    return differentiate(_clone, _clone, tensor)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
