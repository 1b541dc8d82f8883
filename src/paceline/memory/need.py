"""Estimates what a step needs at its peak, as it is and under other settings.

The peak is the larger one of two. In forward and backward there are parameters, optimizer state, and what the
simulation of the operations holds. In the optimizer's step there are all gradients. On top comes what does
not change: Python, libraries, the batch, and what variables keep. Memory that the C library keeps in pieces
depends on the order of all allocations, so the estimate has a range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.memory.account import Account, Kind
from paceline.memory.heap import LARGEST_IN_HEAP
from paceline.memory.operations import Forward, append_heads, complete, find_blocks
from paceline.memory.peaks import Peak, lower, measure_saved, scale, simulate

_STATE: tuple[Kind, ...] = ("parameters", "buffers", "gathered", "buckets")
_LEAST_REACHED = 0.02
# A sharded module is whole in several copies: gathered, as parameters, and as gradients that are reduced.
_COPIES, _MOST_COPIES = 4, 6
# Temporary results of an optimizer for one parameter: Adam's root and its quotient.
_TEMPORARY = 2


@dataclass(frozen=True)
class Setting:
    """A training with other settings.

    Attributes:
        share: of the samples that one forward computes.
        divides_batch: whether the batch itself has that share too, and not only its microbatches.
        recomputes: whether the repeated modules run again in backward.
        is_half: whether it computes in bfloat16.
        has_graph: whether autograd saves anything.
        ranks: among which parameters, gradients and optimizer state are sharded.
        released: bytes that variables no longer keep; -1: nothing changes.
    """

    share: float = 1.0
    divides_batch: bool = False
    recomputes: bool = False
    is_half: bool = False
    has_graph: bool = True
    ranks: int = 1
    released: int = -1


@dataclass(frozen=True)
class Need:
    """The memory that a whole step would need, in bytes of this rank.

    Attributes:
        activations: with gradients of activations, at the peak.
        state: parameters, gradients and optimizer state.
        other: all else.
        pieces: freed memory that the C library keeps, as estimated.
        most_pieces: the upper end of that estimate. The lower end is none.
        spread: by how much the need may be lower or higher for another reason.
    """

    activations: int
    state: int
    other: int
    pieces: int = 0
    most_pieces: int = 0
    spread: int = 0

    @property
    def total(self) -> int:
        """The peak."""
        return self.activations + self.state + self.other + self.pieces

    @property
    def least(self) -> int:
        """The lower end of the estimate."""
        return self.total - self.pieces - self.spread

    @property
    def most(self) -> int:
        """The upper end of the estimate."""
        return self.total - self.pieces + self.most_pieces + self.spread

    def without_pieces(self) -> Need:
        """Return the need if freed memory goes back at once."""
        return replace(self, pieces=0, most_pieces=0)


def estimate_need(account: Account, setting: Setting | None = None) -> Need:
    """Return the estimate of a step's peak under a setting; `None`: as the training is."""
    setting = setting or Setting()
    peak = estimate_peak(account, setting)
    other = _estimate_other(account, setting)
    if peak is None:
        ends = _estimate_pieces(account, setting, None)
        return Need(_estimate_saved(account), _estimate_state(account, setting), other, *ends)
    fixed, gradients, held = _divide_state(account, setting)
    spread = (_MOST_COPIES - _COPIES) * account.model.largest_module if setting.ranks > 1 else 0
    # Gradients appear while activations go, so most are there after the peak.
    during = held + peak.num_bytes
    after = gradients + _TEMPORARY * account.model.largest_parameter if account.model.optimizer else gradients
    pieces, most_pieces = _estimate_pieces(account, setting, peak)
    if after > during:
        activations, state, other = 0, fixed + gradients, other + after - gradients
    else:
        activations, state = peak.num_bytes, fixed + held
    return Need(activations, state, other, pieces, most_pieces, spread)


def _estimate_pieces(account: Account, setting: Setting, peak: Peak | None) -> tuple[int, int]:
    """Return the freed memory that the C library keeps, as estimated and at most."""
    if not account.keeps_pieces:
        return 0, 0
    pieces, most = (0, 0) if peak is None else (peak.pieces, peak.most_pieces)
    if setting.released < 0:
        # There may be more already than a step explains. Only what is released is known to be their cause.
        now = peak and estimate_peak(account, Setting())
        more = max(0, account.get("freed") - (now.pieces if now else 0))
        pieces, most = pieces + more, most + more
    if setting.ranks > 1 and account.model.largest_module < LARGEST_IN_HEAP:
        # Whole modules come and go between the shards, which stay.
        parameters = account.get("parameters")
        pieces, most = pieces + parameters, most + 2 * parameters
    return pieces, most


def estimate_peak(account: Account, setting: Setting) -> Peak | None:
    """Return the peak of activations and their gradients; `None` if the operations are not known."""
    if not account.forward.operations:
        return None
    forward, missing = _complete(account)
    number = account.model.num_repeated
    blocks = find_blocks(forward, account.model.repeated) if number > 1 and setting.recomputes else []
    if setting.recomputes and not blocks:
        return None
    if setting.share < 1.0:
        forward = scale(forward, setting.share)
    if setting.is_half:
        forward = lower(forward, is_device=account.limit_kind == "device")
    peak = simulate(
        forward,
        blocks,
        has_graph=setting.has_graph,
        has_backward=not account.progress.is_evaluating,
        keeps_pieces=account.keeps_pieces,
    )
    if not setting.has_graph or not missing:
        return peak
    more = int(missing * measure_saved(forward))
    return replace(peak, num_bytes=peak.num_bytes + more)


def _complete(account: Account) -> tuple[Forward, float]:
    """Return the whole forward, else what has run of it and the part of it that is missing."""
    progress, model = account.progress, account.model
    if progress.phase != "forward" or progress.reached >= 1.0:
        return account.forward, 0.0
    whole = complete(account.forward, model.repeated, model.num_repeated) if model.num_repeated else None
    if whole is not None:
        return append_heads(whole, model.heads), 0.0
    return account.forward, 1 / max(progress.reached, _LEAST_REACHED) - 1


def _divide_state(account: Account, setting: Setting) -> tuple[int, int, int]:
    """Return what stays of the model's state, all gradients, and those that the forward begins with."""
    is_training = not account.progress.is_evaluating and setting.has_graph
    have = account.get("gradients")
    gradients = max(have, account.model.trained if is_training else 0)
    optimizer = max(account.get("optimizer"), account.model.expected_state if is_training else 0)
    # From the second microbatch on, there are gradients of the first.
    held = gradients if setting.share < 1.0 else have
    fixed = account.get(*_STATE) + optimizer
    if setting.ranks == 1:
        return fixed, gradients, held
    whole = _COPIES * account.model.largest_module
    return fixed // setting.ranks + whole, gradients // setting.ranks, held // setting.ranks


def _estimate_state(account: Account, setting: Setting) -> int:
    fixed, gradients, held = _divide_state(account, setting)
    return fixed + (held if _estimate_saved(account) > gradients else gradients)


def _estimate_saved(account: Account) -> int:
    """Return the activations at the forward's end from their bytes so far."""
    held = account.get("activations")
    grows = account.progress.phase == "forward" and account.progress.has_graph
    reached = min(1.0, max(account.progress.reached, _LEAST_REACHED))
    # The failed allocation is part of what the forward had not reached; it counts if it is more than that.
    return max(int(held / reached if grows else held), held + account.get("request"))


def _estimate_other(account: Account, setting: Setting) -> int:
    """Return what is neither state nor activations."""
    tensors = account.get(*_STATE, "activations", "request", "gradients", "optimizer")
    other = account.total - tensors
    if account.keeps_pieces or setting.released >= 0:
        # It is estimated by itself.
        other -= account.get("freed")
    if account.forward.operations:
        other -= account.get("rest") - _settle(account)
    if not setting.has_graph:
        # The caller holds what the first operation reads, also if only the graph of that is found.
        forward = account.forward
        data = {extra for one in forward.operations if one.has_data for extra in one.extras}
        other += sum(forward.extras[extra] for extra in data)
    other -= max(0, setting.released)
    if setting.divides_batch:
        other -= int(account.get("batch") * (1 - setting.share))
    return max(0, other)


def _settle(account: Account) -> int:
    """Return what is not accounted for between two operations: without the result that one is writing."""
    rest = account.get("rest")
    if account.limit_kind == "device" or account.get("request"):
        return rest  # The steps' record is of the process's memory. A failed allocation has written nothing.
    if account.steps.count and account.steps.settled:
        state = account.get(*_STATE, "optimizer") + account.model.trained
        return min(rest, max(0, account.steps.settled - account.get("base") - state))
    whole, _ = _complete(account)
    after = whole.operations[len(account.forward.operations) :]
    running = next((one.num_bytes for one in after if not one.is_view), 0)
    return max(0, rest - running // 2)
