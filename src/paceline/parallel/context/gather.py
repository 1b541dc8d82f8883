"""Attention by rows (`cp_by = "gather"`): a rank's queries against the gathered keys and values of all ranks.

| function      | forward    | backward                                  |
|---------------|------------|-------------------------------------------|
| `gather_keys` | all-gather | each rank's rows of the sum over the ranks |

A rank has the rows of the queries, and of the mask, that belong to its positions. Dubey et al. 2024, "The
Llama 3 Herd of Models", section 3.3.2. In zigzag, a rank has two chunks of positions. In a causal call it
attends with each to the keys up to the chunk's end alone.

With K the bytes of the keys of one block and n the ranks, a rank sends (n-1)/n x 2K bytes per attention and
pass, in one message: keys and values travel together. All ranks of the axis must call these
functions in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.parallel.context.division import Division
from paceline.parallel.context.row_exchange import Rows, all_gather_rows, exchange_messages
from paceline.parallel.tensor.calls import Change
from paceline.parallel.tensor.differentiable import differentiate, seen_by_modes
from paceline.torch_seams.operators import attend_to_end, flash_shares_heads

# The dimension of the positions in queries, keys, values and masks.
POSITIONS = -2
# The dimension of the heads in queries, keys and values of a batch.
_HEADS = -3
# torch's flash kernel on CPU sums over blocks of 512 keys (FlashAttentionKernel.cpp). A row whose last blocks
# are hidden has the same bits without these blocks; cut anywhere else, it has not.
_KEYS_PER_BLOCK = 512
# On CPU, rows of a product have the bits of one process in groups of 4 (docs/context.md).
_ROWS_TOGETHER = 4


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


def attend_by_rows(rows: Rows, *, gathers: bool, is_causal: bool) -> Change:
    """Return a change that makes a call of attention see the keys of all ranks.

    Args:
        gathers: whether a rank has rows of the keys too; if not, they are of a whole sequence.
        is_causal: whether a call with several queries is. Code may leave that out for a single query, which
            in one process is the first position, and here is any.
    """

    shares_heads = flash_shares_heads()

    def attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        call = AttentionCall(*args, **kwargs)
        rows.check(call.query, POSITIONS, rows.own)
        key, value = call.key, call.value
        if gathers:
            key, value = _gather_both(key, value, rows)
        mask = cut_mask(call.attn_mask, rows)
        call = call._replace(key=key, value=value)
        if not call.is_causal and not (is_causal and mask is None and rows.own == 1):
            return call._replace(attn_mask=mask).run(run)
        if gathers and _can_skip_keys(call, rows, shares_heads=shares_heads):
            return _attend_by_chunks(call, rows, run)
        positions = rows.division.list_positions(rows.axis.rank, key.device)
        mask = _make_causal(positions, key.shape[POSITIONS])
        return call._replace(attn_mask=mask, is_causal=False).run(run)

    return attend


def _can_skip_keys(call: AttentionCall, rows: Rows, *, shares_heads: bool) -> bool:
    """Return whether a causal call is computed by chunks: if that skips keys and changes no bit.

    With dropout, all weights are drawn at once. Where torch's flash kernel does not run on CPU, the bits
    depend on the number of keys.
    """
    query, key, value = call[:3]
    if call.dropout_p or query.dim() != 4:
        return False
    if query.device.type != "cpu":
        return True
    if not rows.division.is_zigzag or _find_end(rows, 0) == rows.whole:
        return False
    is_flash = query.shape[-1] == value.shape[-1] and (
        shares_heads or query.shape[_HEADS] == key.shape[_HEADS]
    )
    return is_flash and rows.own // 2 % _ROWS_TOGETHER == 0


def _find_end(rows: Rows, chunk: int) -> int:
    """Return how many keys a chunk of this rank needs: those up to its end, in whole blocks."""
    first, number = rows.division.list_runs(rows.axis.rank)[chunk]
    return min(rows.whole, -(-(first + number) // _KEYS_PER_BLOCK) * _KEYS_PER_BLOCK)


def _attend_by_chunks(call: AttentionCall, rows: Rows, run: Callable[..., Any]) -> Tensor:
    """Attend with each of this rank's chunks to the keys up to its end; on a device without a mask."""
    parts: list[Tensor] = []
    runs, is_on_cpu = rows.division.list_runs(rows.axis.rank), call.query.device.type == "cpu"
    queries = call.query.split([size for _, size in runs], POSITIONS)
    for chunk, (query, (first, size)) in enumerate(zip(queries, runs, strict=True)):
        end = _find_end(rows, chunk) if is_on_cpu else first + size
        key, value = (keys.narrow(POSITIONS, 0, end) for keys in (call.key, call.value))
        part = None if is_on_cpu else attend_to_end(query, key, value, call.scale, call.enable_gqa)
        if part is None:
            mask = _make_causal(torch.arange(first, first + size, device=query.device), end)
            seen = call._replace(query=query, key=key, value=value, attn_mask=mask, is_causal=False)
            part = seen.run(run)
        parts.append(part)
    # Positions may come before heads in memory, and code may rely on it (`transpose(1, 2).view(..)`).
    if parts[0].stride(POSITIONS) > parts[0].stride(_HEADS):
        parts = [part.transpose(_HEADS, POSITIONS) for part in parts]
        return torch.cat(parts, _HEADS).transpose(_HEADS, POSITIONS)
    return torch.cat(parts, POSITIONS)


def refuse_unknown(module: str) -> Change:
    """Return a change that refuses a call of attention, which would see this rank's keys only."""

    def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        raise PacelineError(
            "PL634",
            saw=f'layout.cp_by="gather": {module} calls F.scaled_dot_product_attention at another place of '
            "its code than in the trial forward.",
            rule="By gather, keys and values are exchanged in the calls that the trial forward, in training "
            "mode, has made.",
            fix='Set cp_by="heads", or let the code take the same path in training and in evaluation.',
        )

    return refuse


def cut_mask(mask: Tensor | None, rows: Rows) -> Tensor | None:
    """Return this rank's rows of a mask of the whole sequence; one that is the same for all stays."""
    if mask is None or mask.dim() < 2 or mask.shape[POSITIONS] == 1:
        return mask
    rows.check(mask, POSITIONS, rows.whole)
    return rows.take(mask, mask.dim() + POSITIONS)


def cut_entering(tensor: Tensor, dim: int, rows: Rows) -> Tensor:
    """Return this rank's rows of a tensor that a block gets besides the stream: positions."""
    rows.check(tensor, dim, rows.whole)
    return rows.take(tensor, dim)


@seen_by_modes
def gather_keys(tensor: Tensor, dim: int, rows: Rows) -> Tensor:
    """Return the rows of all ranks; each rank uses them for other rows of the result.

    Args:
        tensor: this rank's rows.
        dim: of the rows, not negative.
    """
    rows.check(tensor, dim, rows.own)
    return differentiate(all_gather_rows, _add_up_rows, tensor, dim, rows.division, rows.axis)


def _gather_both(key: Tensor, value: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Gather keys and values in one message."""
    both = gather_keys(torch.cat([key, value], -1), key.dim() + POSITIONS, rows)
    keys, values = both[..., : key.shape[-1]], both[..., key.shape[-1] :]
    return keys.contiguous(), values.contiguous()


def _make_causal(positions: Tensor, num_keys: int) -> Tensor:
    """Return rows of the causal mask [positions, keys]; positions count in the whole sequence."""
    return positions[:, None] >= torch.arange(num_keys, device=positions.device)


def _add_up_rows(tensor: Tensor, dim: int, division: Division, axis: Axis) -> Tensor:
    """Return this rank's rows of the sum of all ranks' tensors, added in the order of the ranks."""
    sent = [division.take(tensor, dim, rank).contiguous() for rank in range(axis.size)]
    received = [torch.empty_like(sent[axis.rank]) for _ in sent]
    exchange_messages(received, sent, axis)
    total = received[0]
    for part in received[1:]:
        total += part
    return total


def outside_attention_error(where: str) -> PacelineError:
    """Return the error for code that combines positions anywhere but in torch's attention function."""
    return PacelineError(
        "PL634",
        saw=f'layout.cp_by="gather": {where} combines positions, and is not part of '
        "F.scaled_dot_product_attention.",
        rule="By gather, a rank has rows of everything, and gets other ranks' keys and values in calls of "
        "F.scaled_dot_product_attention.",
        fix='Set cp_by="heads", with which any attention code works. Or have the model call that function '
        '(for models of transformers: attn_implementation="sdpa").',
    )
