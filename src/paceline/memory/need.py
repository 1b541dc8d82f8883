"""Estimates what a step needs at its peak, as it is and under other settings.

A forward that was half through is taken to need as much again per parameter that it had not used. The peak is
the larger one of two: all activations beside the gradients that are there already, or all gradients. On top
comes what does not change: Python, libraries, the batch, and what variables keep. Not known are results that
live for a moment and gradients of activations, so a need has a range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.memory.account import Account, Kind

_STATE: tuple[Kind, ...] = ("parameters", "buffers", "gathered")
_LEAST_REACHED = 0.02
# A sharded module is whole in several copies: gathered, as parameters, and as gradients that are reduced.
_COPIES, _MOST_COPIES = 4, 6
# Gradients of activations and passing results, beside what was saved: measured, up to this part of it; and
# with the pieces between them that glibc keeps (benchmarks/memory).
_PASSING, _PASSING_ON_CPU = 0.25, 0.75
# glibc maps larger blocks on their own.
_LARGEST_IN_HEAP = 32 << 20


@dataclass(frozen=True)
class Need:
    """The memory that a whole step would need, in bytes of this rank.

    Attributes:
        activations: at the peak.
        state: parameters, gradients and optimizer state.
        other: all else.
        passing: the part of the activations by which the need may be higher.
        spread: by how much it may be for another reason.
    """

    activations: int
    state: int
    other: int
    passing: float = _PASSING
    spread: int = 0

    @property
    def total(self) -> int:
        """The peak."""
        return self.activations + self.state + self.other

    @property
    def most(self) -> int:
        """The upper end of the estimate."""
        return self.total + int(self.activations * self.passing) + self.spread

    def shrink(self, share: float) -> Need:
        """Return the need with this share of the activations."""
        return replace(self, activations=int(self.activations * share))


def estimate_need(account: Account, *, ranks: int = 1, accumulates: bool = False) -> Need:
    """Return the estimate of a step's peak.

    Args:
        account: of the rank that ran short.
        ranks: among which parameters, gradients and optimizer state are sharded.
        accumulates: whether gradients of earlier microbatches are there when a forward begins.
    """
    model, activations = account.model, _estimate_saved(account)
    is_training = not account.progress.is_evaluating
    is_on_cpu = account.limit_kind != "device"
    gradients = max(account.get("gradients"), model.trained if is_training else 0)
    optimizer = max(account.get("optimizer"), model.expected_state if is_training else 0)
    held = gradients if accumulates else account.get("gradients")
    fixed = account.get(*_STATE) + optimizer
    spread = 0
    if ranks > 1:
        fixed, gradients, held = (size // ranks for size in (fixed, gradients, held))
        fixed += _COPIES * model.largest_module
        spread = (_MOST_COPIES - _COPIES) * model.largest_module
        if is_on_cpu and model.largest_module < _LARGEST_IN_HEAP:
            # Whole modules come and go between the shards, which stay.
            spread += 2 * account.get("parameters")
    # Gradients appear while activations go.
    state = fixed + max(held, gradients - activations)
    known = account.get(*_STATE, "activations", "request", "gradients", "optimizer")
    other = max(0, account.total - known)
    return Need(activations, state, other, _PASSING_ON_CPU if is_on_cpu else _PASSING, spread)


def _estimate_saved(account: Account) -> int:
    """Return the activations at the forward's end from their bytes so far."""
    held = account.get("activations")
    grows = account.progress.phase == "forward" and account.progress.has_graph
    reached = min(1.0, max(account.progress.reached, _LEAST_REACHED))
    # The failed allocation is part of what the forward had not reached; it counts if it is more than that.
    return max(int(held / reached if grows else held), held + account.get("request"))
