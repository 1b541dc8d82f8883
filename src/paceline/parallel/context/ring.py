"""Attention by rows whose keys and values go round the ranks (`cp_by = "ring"`).

A rank attends with its own positions, to the keys and values of one rank after another. In each of n - 1
turns it sends what it has to the next rank and receives the previous rank's. Results are merged by the
logarithm of the sum of exponentials, which makes their softmax that of all keys (Liu et al. 2023, "Ring
Attention with Blockwise Transformers for Near-Infinite Context", section 3; Milakov and Gimelshein 2018). A
merged sum has another order than one process's, so the forward is equal within rounding.

Rows are in zigzag if an attention of the stretch is causal (`division.py`). Then a causal call meets half of
the pairs of queries and keys in each turn, on every rank:

| keys of                   | queries            | keys               |
|---------------------------|--------------------|--------------------|
| this rank                 | all, causal        | all                |
| a lower rank              | all                | of its first chunk |
| a higher rank             | of the last chunk  | all                |

In backward, keys and values go round again. The gradients of a rank's keys and values go round behind them,
from the rank after it, which adds first, to the rank itself, which adds last.

With K the bytes of the keys of one block, a rank sends (n-1)/n x 2K bytes per attention in forward, in n - 1
messages, and twice that in backward. It holds 1/n of keys and values, and those that are on their way. On CPU
torch's flash kernel computes each turn, and elsewhere matrix products, which hold the weights of the turn.
With dropout inside of attention these are used on CPU too. All ranks of the axis must call it in the same
order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import has_torch_function_unary

from paceline.parallel.context.division import Division
from paceline.parallel.context.exchange import Rows
from paceline.parallel.dropout.values import repeat_heads
from paceline.parallel.tensor.collectives import refuse_graph, show
from paceline.torch_seams.operators import attend_with_sums, propagate_with_sums
from paceline.torch_seams.tensors import is_fake


@dataclass(frozen=True)
class RingCall:
    """A call of attention, without its queries, keys and values.

    Attributes:
        mask: this rank's rows of the mask, for the keys of all ranks; `None` for none.
        factors: what dropout multiplies the weights by, laid out like them; `None` for no dropout.
        is_causal: whether a position attends to none after it.
        scale: of the scores.
        enable_gqa: whether several heads of queries share one of keys.
        rows: of the stretch.
    """

    mask: Tensor | None
    factors: Tensor | None
    is_causal: bool
    scale: float
    enable_gqa: bool
    rows: Rows


@dataclass(frozen=True)
class _Turn:
    """The result that a rank computes with the keys of one rank.

    Attributes:
        queries, keys: the rows that meet; others are hidden from each other.
        mask: added to the scores of these; `None` for none.
        factors: as in `RingCall`, for these.
        is_causal: whether queries and keys have the same positions, and none attends to later ones.
        scale: of the scores.
    """

    queries: slice
    keys: slice
    mask: Tensor | None
    factors: Tensor | None
    is_causal: bool
    scale: float


def attend_in_ring(query: Tensor, key: Tensor, value: Tensor, call: RingCall) -> Tensor:
    """Return the attention of this rank's queries [.., heads, rows, width] to the keys of all ranks."""
    if has_torch_function_unary(query):
        return show(attend_in_ring, query, key, value, call)
    if is_fake(query):
        return query.new_empty(*query.shape[:-1], value.shape[-1])
    result: Tensor = _Ring.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: RingCall) -> Tensor:
        axis, division = call.rows.axis, call.rows.division
        out, sums = None, None
        passing, width = torch.cat([key, value], -1).contiguous(), key.shape[-1]
        for turn in range(axis.size):
            source = (axis.rank - turn) % axis.size
            sending = _Sending()
            if turn + 1 < axis.size:
                sending = _pass_on(passing, division.counts[(source - 1) % axis.size], call.rows)
            given = _take_turn(call, division, source, query)
            if given is not None:
                keys, values = _unpack(passing[..., given.keys, :], width, query, call.enable_gqa)
                part, part_sums = _compute(query[..., given.queries, :], keys, values, given)
                out, sums = _add_turn(out, sums, part, part_sums, given.queries)
            passing = sending.finish()
        assert out is not None and sums is not None  # noqa: PT018
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.call, ctx.division = call, division
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        query, key, value, out, sums = ctx.saved_tensors
        call, division, axis = ctx.call, ctx.division, ctx.call.rows.axis
        # A row that attends to nothing has no gradient: exp(score - inf) is 0.
        sums = sums.masked_fill(sums == -math.inf, math.inf)
        passing, width = torch.cat([key, value], -1).contiguous(), key.shape[-1]
        grad, total = grad.contiguous(), torch.zeros_like(query, dtype=sums.dtype)
        own = torch.zeros_like(passing)
        added: Tensor | None = None  # the gradients of `passing`, of the ranks that had it before
        arriving = _Sending()
        for turn in range(axis.size):
            source = (axis.rank - turn) % axis.size
            sending = _Sending()
            if turn + 1 < axis.size:
                sending = _pass_on(passing, division.counts[(source - 1) % axis.size], call.rows)
            found = torch.zeros_like(passing)
            given = _take_turn(call, division, source, query)
            if given is not None:
                keys, values = _unpack(passing[..., given.keys, :], width, query, call.enable_gqa)
                g, q, o = (tensor[..., given.queries, :] for tensor in (grad, query, out))
                row_sums = sums[..., given.queries]
                of_query, of_key, of_value = _propagate(g, q, keys, values, o, row_sums, given)
                total[..., given.queries, :] += of_query
                found[..., given.keys, :] = torch.cat([_share(of_key, key), _share(of_value, value)], -1)
            if turn == 0:
                own = found
            else:
                added = arriving.finish() if turn > 1 else None
                found = found if added is None else added + found
                arriving = _pass_on(found, division.counts[(source - 1) % axis.size], call.rows)
            passing = sending.finish()
        own = arriving.finish() + own if axis.size > 1 else own
        return total.to(query.dtype), own[..., :width], own[..., width:], None


def _take_turn(call: RingCall, division: Division, source: int, query: Tensor) -> _Turn | None:
    """Return what applies to the keys of one rank; `None` if all are hidden from this rank's queries."""
    rank, everything = call.rows.axis.rank, slice(None)
    queries, keys = everything, everything
    if call.is_causal and source != rank:
        if division.is_zigzag:
            half = division.counts[rank] // 2
            queries, keys = (everything, slice(half)) if source < rank else (slice(half, None), everything)
        elif source > rank:
            return None
    mask = call.mask
    if mask is not None:
        # One column stands for all, and so does one row.
        if mask.shape[-1] == 1:
            mask = mask.expand(*mask.shape[:-1], division.counts[source])
        else:
            mask = division.take(mask, mask.dim() - 1, source)
        mask = mask[..., keys]
        if mask.dim() > 1 and mask.shape[-2] > 1:
            mask = mask[..., queries, :]
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    factors = call.factors
    if factors is not None:
        factors = division.take(factors, factors.dim() - 1, source)[..., queries, keys]
    return _Turn(queries, keys, mask, factors, call.is_causal and source == rank, call.scale)


def _unpack(packed: Tensor, width: int, query: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor]:
    keys, values = packed[..., :width], packed[..., width:]
    return repeat_heads(keys, query, enable_gqa), repeat_heads(values, query, enable_gqa)


def _share(gradient: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of keys whose heads were repeated for the queries that share them."""
    if gradient.dim() > 2 and gradient.shape[-3] != like.shape[-3]:
        gradient = gradient.unflatten(-3, (like.shape[-3], -1)).sum(-3)  # type: ignore[no-untyped-call]
    return gradient.to(like.dtype)


def _merge(out: Tensor | None, sums: Tensor | None, part: Tensor, part_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attentions of the same queries to different keys."""
    part = part.to(part_sums.dtype)
    if out is None or sums is None:
        return part, part_sums
    both = torch.logaddexp(sums, part_sums)
    finite = both.masked_fill(both == -math.inf, 0.0)
    out = out * (sums - finite).exp().unsqueeze(-1) + part * (part_sums - finite).exp().unsqueeze(-1)
    return out, both


def _add_turn(
    out: Tensor | None, sums: Tensor | None, part: Tensor, part_sums: Tensor, queries: slice
) -> tuple[Tensor, Tensor]:
    """Merge what a turn has computed for some queries; the first turn computes it for all."""
    if out is None or sums is None or queries == slice(None):
        return _merge(out, sums, part, part_sums)
    merged, merged_sums = _merge(out[..., queries, :], sums[..., queries], part, part_sums)
    out[..., queries, :] = merged
    sums[..., queries] = merged_sums
    return out, sums


# ---- one turn: the results, and per query the logarithm of the sum of exponentials of its scores


def _compute(query: Tensor, key: Tensor, value: Tensor, turn: _Turn) -> tuple[Tensor, Tensor]:
    if not _is_fused(query, value, turn):
        scores = _score(query, key, turn)
        sums = scores.logsumexp(-1)
        weights = (scores - sums.masked_fill(sums == -math.inf, 0.0).unsqueeze(-1)).exp()
        if turn.factors is not None:
            weights = weights * turn.factors
        return weights @ value.to(weights.dtype), sums
    mask = _spread_mask(turn.mask)
    q, k, v = _as_batch(query), _as_batch(key), _as_batch(value)
    out, sums = attend_with_sums(q, k, v, mask, turn.is_causal, turn.scale)
    if mask is not None:
        none = (mask == -math.inf).all(-1).expand(sums.shape)
        out, sums = out.masked_fill(none.unsqueeze(-1), 0.0), sums.masked_fill(none, -math.inf)
    return out.view(*query.shape[:-1], -1), sums.view(query.shape[:-1])


def _propagate(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, turn: _Turn
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, from the merged results and sums."""
    if _is_fused(query, value, turn):
        mask, all_sums = _spread_mask(turn.mask), _as_batch(sums, 3)
        g, q, k, v, o = (_as_batch(tensor) for tensor in (grad, query, key, value, out))
        found = propagate_with_sums(g, q, k, v, o, all_sums, mask, turn.is_causal, turn.scale)
        shapes = (query.shape, key.shape, value.shape)
        of_query, of_key, of_value = (g.reshape(s) for g, s in zip(found, shapes, strict=True))
        return of_query, of_key, of_value
    weights = (_score(query, key, turn) - sums.unsqueeze(-1)).exp()
    wide = weights.dtype
    grad, out, query, key, value = (t.to(wide) for t in (grad, out, query, key, value))
    of_weights = grad @ value.transpose(-2, -1)
    dropped = weights
    if turn.factors is not None:
        of_weights, dropped = of_weights * turn.factors, weights * turn.factors
    of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True)) * turn.scale
    return of_scores @ key, of_scores.transpose(-2, -1) @ query, dropped.transpose(-2, -1) @ grad


def _is_fused(query: Tensor, value: Tensor, turn: _Turn) -> bool:
    """Return whether torch has a kernel that returns the sums and takes this mask."""
    fits = query.dim() in (3, 4) and query.shape[-1] == value.shape[-1] and turn.factors is None
    return fits and query.device.type == "cpu"


def _score(query: Tensor, key: Tensor, turn: _Turn) -> Tensor:
    """Return the scores in fp32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * turn.scale
    if turn.is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, -math.inf)
    return scores if turn.mask is None else scores + turn.mask


def _as_batch(tensor: Tensor, num_dims: int = 4) -> Tensor:
    return tensor if tensor.dim() == num_dims else tensor.unsqueeze(0)


def _spread_mask(mask: Tensor | None) -> Tensor | None:
    """Return a mask with four dimensions, as the kernel takes it."""
    if mask is None:
        return None
    return mask.view(*[1] * (4 - mask.dim()), *mask.shape).contiguous()


# ---- messages


class _Sending:
    """A message to the next rank and one from the previous rank, in progress; or none."""

    def __init__(self, into: Tensor | None = None, works: list[Any] | None = None, sent: Any = None) -> None:
        self._into, self._works, self._sent = into, works or [], sent

    def finish(self) -> Any:
        """Wait, and return what has arrived."""
        for work in self._works:
            work.wait()
        return self._into


def _pass_on(tensor: Tensor, num_rows: int, rows: Rows) -> _Sending:
    """Send a tensor [.., rows, width] to the next rank, and receive the previous rank's, of `num_rows`."""
    axis = rows.axis
    into = tensor.new_empty(*tensor.shape[:-2], num_rows, tensor.shape[-1])
    sent = tensor.contiguous()
    following, previous = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    operations = [  # the receive first, see `comm.exchange.pass_on`
        dist.P2POp(dist.irecv, into, group=axis.group, group_peer=previous),
        dist.P2POp(dist.isend, sent, group=axis.group, group_peer=following),
    ]
    return _Sending(into, dist.batch_isend_irecv(operations), sent)
