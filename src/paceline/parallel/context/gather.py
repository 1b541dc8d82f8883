"""Attention by rows: a rank's queries against the keys and values of all ranks.

With `cp_by = "gather"` these are gathered; with `"ring"` they go round (`ring.py`).

| function      | forward    | backward                                  |
|---------------|------------|-------------------------------------------|
| `gather_keys` | all-gather | each rank's rows of the sum over the ranks |

A rank has the rows of the queries, and of the mask, that belong to its positions. Dubey et al. 2024, "The
Llama 3 Herd of Models", section 3.3.2. With K the bytes of the keys of one block and n the ranks, a rank
sends (n-1)/n x 2K bytes per attention and pass by gather, in one message: keys and values travel together.
All ranks of the axis must call these functions in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.parallel.context.exchange import Rows, all_gather_rows, exchange_messages
from paceline.parallel.context.ring import RingCall, attend_in_ring
from paceline.parallel.dropout.replacements import draw_factors
from paceline.parallel.tensor.calls import Change
from paceline.parallel.tensor.collectives import refuse_graph, show

# The dimension of the positions in queries, keys, values and masks.
POSITIONS = -2


class AttentionCall(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False

    def run(self, function: Callable[..., Any]) -> Any:
        """Call the function with these arguments."""
        return function(*self[:6], scale=self.scale, enable_gqa=self.enable_gqa)


def attend_by_rows(rows: Rows, *, gathers: bool, is_causal: bool, by: str = "gather") -> Change:
    """Return a change that makes a call of attention see the keys of all ranks.

    Args:
        rows: of the stretch.
        gathers: whether a rank has rows of the keys too; if not, they are of a whole sequence.
        is_causal: whether a call with several queries is. Code may leave that out for a single query, which
            in one process is the first position, and here is any.
        by: `"gather"` or `"ring"`.
    """

    def attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        call = AttentionCall(*args, **kwargs)
        rows.check(call.query, POSITIONS, rows.own)
        if gathers and by == "ring":
            return _attend_in_turns(call, rows, is_causal=is_causal)
        key, value = call.key, call.value
        if gathers:
            key, value = _gather_both(key, value, rows)
        mask = cut_mask(call.attn_mask, rows)
        if call.is_causal or (is_causal and mask is None and rows.own == 1):
            mask = _make_causal(rows, key.shape[POSITIONS], key.device)
        return call._replace(key=key, value=value, attn_mask=mask, is_causal=False).run(run)

    return attend


def _attend_in_turns(call: AttentionCall, rows: Rows, *, is_causal: bool) -> Tensor:
    """Compute a call's attention in turns, with the same types and dropout as without a ring."""
    query, key, value = call[:3]
    rows.check(key, POSITIONS, rows.own)
    mask, device = cut_mask(call.attn_mask, rows), query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    with torch.autocast(device, enabled=False):
        factors = draw_factors(query, rows.whole, call.dropout_p) if call.dropout_p else None
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        causal = call.is_causal or (is_causal and mask is None and rows.own == 1)
        given = RingCall(mask, factors, causal, scale, call.enable_gqa, rows)
        return attend_in_ring(query, key, value, given)


def refuse_unknown(module: str, by: str) -> Change:
    """Return a change that refuses a call of attention, which would see this rank's keys only."""

    def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        raise PacelineError(
            "PL634",
            saw=f'layout.cp_by="{by}": {module} calls F.scaled_dot_product_attention at another place of '
            "its code than in the trial forward.",
            rule=f"By {by}, keys and values are exchanged in the calls that the trial forward, in training "
            "mode, has made.",
            fix='Set cp_by="heads", or let the code take the same path in training and in evaluation.',
        )

    return refuse


def cut_mask(mask: Tensor | None, rows: Rows) -> Tensor | None:
    """Return this rank's rows of a mask of the whole sequence; one that is the same for all stays.

    Raises:
        PacelineError: PL631 for a mask of another length.
    """
    if mask is None or mask.dim() < 2 or mask.shape[POSITIONS] == 1:
        return mask
    rows.check(mask, POSITIONS, rows.whole)
    return mask.narrow(POSITIONS, rows.start, rows.own)


def cut_entering(tensor: Tensor, dim: int, rows: Rows) -> Tensor:
    """Return this rank's rows of a tensor that a block gets besides the stream: positions."""
    rows.check(tensor, dim, rows.whole)
    return tensor.narrow(dim, rows.start, rows.own)


def gather_keys(tensor: Tensor, dim: int, rows: Rows) -> Tensor:
    """Return the rows of all ranks; each rank uses them for other rows of the result.

    Args:
        tensor: this rank's rows.
        dim: of the rows, not negative.
        rows: of the stretch.
    """
    if has_torch_function_unary(tensor):
        return show(gather_keys, tensor, dim, rows)
    rows.check(tensor, dim, rows.own)
    result: Tensor = _GatherKeys.apply(tensor, dim, rows.counts, rows.axis)  # type: ignore[no-untyped-call]
    return result


def _gather_both(key: Tensor, value: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Gather keys and values in one message."""
    both = gather_keys(torch.cat([key, value], -1), key.dim() + POSITIONS, rows)
    keys, values = both[..., : key.shape[-1]], both[..., key.shape[-1] :]
    return keys.contiguous(), values.contiguous()


def _make_causal(rows: Rows, num_keys: int, device: torch.device) -> Tensor:
    """Return this rank's rows of the causal mask [positions, keys]; positions count in the whole sequence."""
    own = torch.arange(rows.start, rows.start + rows.own, device=device)
    return own[:, None] >= torch.arange(num_keys, device=device)


def _add_up_rows(tensor: Tensor, dim: int, counts: tuple[int, ...], axis: Axis) -> Tensor:
    """Return this rank's rows of the sum of all ranks' tensors, added in the order of the ranks."""
    sent = [part.contiguous() for part in torch.split(tensor, list(counts), dim)]
    received = [torch.empty_like(sent[axis.rank]) for _ in counts]
    exchange_messages(received, sent, axis)
    total = received[0]
    for part in received[1:]:
        total += part
    return total


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, counts: tuple[int, ...], axis: Axis) -> Tensor:
        ctx.given = dim, counts, axis
        return all_gather_rows(tensor, dim, counts, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        return _add_up_rows(grad, *ctx.given), None, None, None


def outside_attention_error(where: str, by: str) -> PacelineError:
    """Return the error for code that combines positions anywhere but in torch's attention function."""
    return PacelineError(
        "PL634",
        saw=f'layout.cp_by="{by}": {where} combines positions, and is not part of '
        "F.scaled_dot_product_attention.",
        rule=f"By {by}, a rank has rows of everything, and gets other ranks' keys and values in calls of "
        "F.scaled_dot_product_attention.",
        fix='Set cp_by="heads", with which any attention code works. Or have the model call that function '
        '(for models of transformers: attn_implementation="sdpa").',
    )
